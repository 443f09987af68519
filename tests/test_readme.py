"""The Python code of the README, and of the pages that it links for more, runs as it stands."""

import os
import re
import signal
import subprocess
import sys

import pytest
from page_tools import ROOT, blocks_of, parted

README = (ROOT / "README.md").read_text("utf-8")
(LOOP,) = blocks_of(README)
PAGES = ("plain-dcp", "recovery")  # every block of these is a whole script
SCRIPTS = {
    f"{page} {number}": code
    for page in PAGES
    for number, code in enumerate(blocks_of((ROOT / f"docs/{page}.md").read_text("utf-8")))
} | {page: parted(f"docs/{page}.md")[0][0] for page in ("data", "data-dali")}
(TORCHRUN,) = blocks_of((ROOT / "docs/torchrun.md").read_text("utf-8"))
STEPS = "ckpt.step < 20_000"
assert LOOP.count(STEPS) == 1


def run(code, folder, *launcher):
    """Run code in a process of its own, as a reader would; return what it printed and logged."""
    (folder / "train.py").write_text(code)
    done = subprocess.run(
        [sys.executable, *launcher, "train.py"],
        cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_the_readme_is_for_five_minutes():
    assert len(README.splitlines()) <= 110
    assert README.count("(docs/promises.md") >= 5


def test_there_are_scripts_to_run():
    assert len([name for name in SCRIPTS if name.startswith("plain-dcp")]) == 2
    assert len(SCRIPTS) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_whole_script_runs_alone_in_an_empty_folder(name, tmp_path):
    if "nvidia.dali" in SCRIPTS[name]:
        pytest.importorskip("nvidia.dali")
    run(SCRIPTS[name], tmp_path)


@pytest.mark.slow
def test_the_loop_resumes_where_it_ended_when_it_is_run_again(tmp_path):
    code = LOOP.replace(STEPS, "ckpt.step < 200") + "\nprint('ended at', ckpt.step)"
    first, second = run(code, tmp_path), run(code, tmp_path)
    assert "starts after step 0" in first
    assert "ended at 200" in first
    assert "starts after step 200" in second
    assert "ended at 200" in second


@pytest.mark.slow
def test_a_killed_and_resumed_run_prints_what_the_readme_says(tmp_path):
    (tmp_path / "train.py").write_text(LOOP.replace(STEPS, "ckpt.step < 1_000_000"))
    job = subprocess.Popen(
        [sys.executable, "train.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    with job:
        said, saved = [], []
        for line in job.stdout:
            said.append(line)
            saved += re.findall(r"^step (\d+) saved: ", line)
            if len(saved) == 2:
                os.kill(job.pid, signal.SIGKILL)
                break
    assert job.returncode == -signal.SIGKILL, said
    last = int(saved[-1])
    again = run(LOOP.replace(STEPS, f"ckpt.step < {last + 10}"), tmp_path)
    (resumed,) = re.findall(r"^starts after step (\d+)$", again, re.M)
    assert int(resumed) >= last  # one more may have been published before the kill
    (shown,) = re.findall(r"^```text\n(.*?)^```$", README, re.M | re.S)
    kinds = {_without_numbers(line) for line in "".join([*said, again]).splitlines()}
    shown = [line for line in shown.splitlines() if line and not line.startswith(("$", "..."))]
    assert len(shown) >= 5
    assert {_without_numbers(line) for line in shown} <= kinds


def _without_numbers(line):
    line = re.sub(r"/\S*/run", "/run", line)
    return re.sub(r"\d[\d.]*", "N", line)


@pytest.mark.slow
def test_a_background_save_keeps_the_values_from_before(tmp_path):
    (code,) = [code for code in SCRIPTS.values() if "async_save" in code]
    check = """
from dcp_checkfreq import CheckFreqReader
dcp.load(state, storage_reader=CheckFreqReader("run1/step_00000020"))
print(bool(state["model"]["weight"].any()))
"""
    assert "True" in run(code + check, tmp_path).split()


@pytest.mark.dist
@pytest.mark.slow
def test_the_script_for_several_ranks_goes_on_with_other_ranks(tmp_path):
    logged = "import logging\nlogging.basicConfig(level='INFO')\n"
    code = logged + TORCHRUN
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
    run(code, tmp_path, *launcher, "2")
    again = run(code.replace("< 100", "< 110"), tmp_path, *launcher, "3")
    assert "restored step 100" in again
