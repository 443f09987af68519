"""The script on a source of our own making: what stock passes and ours does not is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # processes that import torch

HERE = Path(__file__).parent

THEIRS = """
import os, tempfile, unittest
import torch
import torch.distributed.checkpoint as dcp

class TestTiny(unittest.TestCase):
    def saved(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        dcp.save({"w": torch.arange(4)}, storage_writer=dcp.FileSystemWriter(folder))
        return folder

    def test_comes_back(self):
        target = {"w": torch.zeros(4, dtype=torch.int64)}
        dcp.load(target, storage_reader=dcp.FileSystemReader(self.saved()))
        assert torch.equal(target["w"], torch.arange(4))

    def test_name_of_the_file(self):
        assert "__0_0.distcp" in os.listdir(self.saved())

    def test_takes_the_process_with_it(self):
        if "__0_0.distcp" not in os.listdir(self.saved()):
            os._exit(7)

    def test_nobody_passes(self):
        raise ValueError("of the test")

    @unittest.skip("not here")
    def test_skipped(self):
        pass
"""


@pytest.fixture
def source(tmp_path):
    tests = tmp_path / "theirs" / "test" / "distributed" / "checkpoint"
    tests.mkdir(parents=True)
    (tests / "test_tiny.py").write_text(THEIRS)
    return tmp_path / "theirs"


def conformance(source, *arguments):
    return subprocess.run(
        [sys.executable, HERE / "pytorch.py", "--source", source, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path[1:]])},
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_stock_passes_and_ours_does_not_is_told(source, tmp_path):
    page = tmp_path / "page.md"
    mark = "pytorch-0.1-on-" + subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__, end='')"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    page.write_text(f"before\n<!-- {mark} -->\nold\n<!-- /{mark} -->\nafter\n")
    done = conformance(source, "--label", "0.1", "--out", tmp_path, "--page", page)
    assert done.returncode == 1, done.stderr
    (written,) = tmp_path.glob("*.json")
    arms = json.loads(written.read_text())["files"]["test_tiny.py"]
    assert arms["stock"]["outcomes"] == {
        "TestTiny::test_comes_back": "passed",
        "TestTiny::test_name_of_the_file": "passed",
        "TestTiny::test_nobody_passes": "failed",
        "TestTiny::test_skipped": "skipped",
        "TestTiny::test_takes_the_process_with_it": "passed",
    }
    assert arms["stock"]["made"] == {}
    assert arms["ours"]["outcomes"]["TestTiny::test_comes_back"] == "passed"
    assert arms["ours"]["outcomes"]["TestTiny::test_name_of_the_file"] == "failed"
    assert "TestTiny::test_takes_the_process_with_it" not in arms["ours"]["outcomes"]
    assert "pytest ended with 7" in arms["ours"]["why"]["(file)"]
    assert arms["ours"]["made"]["writer"] >= 3
    assert arms["ours"]["made"]["reader"] >= 1
    told = done.stdout
    assert "passed by stock, not by us: test_tiny.py::TestTiny::test_name_of_the_file" in told
    assert "not by us: test_tiny.py::TestTiny::test_takes_the_process_with_it" in told
    assert "not by stock: TestTiny::test_nobody_passes: ValueError: of the test" in told
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    row = "| `test_tiny.py` | 6 | 3 | 1 | "
    assert row in text


def test_a_source_without_tests_is_refused(tmp_path):
    done = conformance(tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "there are no tests in test/distributed/checkpoint" in done.stderr.replace("\n", " ")
