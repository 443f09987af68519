"""The Python code of the README runs as it stands."""

import pathlib
import re
import subprocess
import sys

import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"
ALL = re.findall(r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.M | re.S)
BLOCKS = [code for code in ALL if "s3://" not in code]  # those run in integration/s3
WITH_CHECKPOINTER = [code for code in BLOCKS if "max_overhead=" in code]


def run(code, folder):
    """Run code in a process of its own, as a reader would."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_there_is_code_to_run():
    assert len(BLOCKS) >= 3
    assert len(WITH_CHECKPOINTER) == 1


@pytest.mark.slow
@pytest.mark.parametrize("code", BLOCKS)
def test_every_python_block_runs_alone_in_an_empty_folder(code, tmp_path):
    run(code, tmp_path)


@pytest.mark.slow
def test_the_loop_resumes_where_it_ended_when_it_is_run_again(tmp_path):
    (code,) = WITH_CHECKPOINTER
    tell = "\nprint(restored and restored.step, ckpt.step)"
    assert run(code + tell, tmp_path).split() == ["None", "200"]
    assert run(code + tell, tmp_path).split() == ["200", "200"]


@pytest.mark.slow
def test_a_background_save_keeps_the_values_from_before(tmp_path):
    (code,) = [code for code in BLOCKS if "async_save" in code]
    check = """
from dcp_checkfreq import CheckFreqReader
dcp.load(state, storage_reader=CheckFreqReader("run1/step_00000020"))
print(bool(state["model"]["weight"].any()))
"""
    assert run(code + check, tmp_path).split() == ["True"]
