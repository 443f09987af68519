"""The fast lane leaves out what the rules say, and fails what is slow and is not marked."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TREES = ("tests", "integration")
# What a thread has waited for a core does not count, so 1.5 s leave room for that.
TESTS = {
    "tests/test_plain.py": """
import os, time
import pytest
from hypothesis import given, settings, strategies as st

tried = []

@given(st.integers())
def test_few_examples(number):
    tried.append(number)

def test_what_is_left_in_the_folder_for_temporary_files_is_removed():
    import subprocess, sys, tempfile
    leave = "import tempfile; print(tempfile.mkdtemp(prefix='left-'))"
    left = subprocess.run([sys.executable, "-c", leave], capture_output=True, text=True).stdout
    for folder in (left.strip(), tempfile.mkdtemp(prefix="left-")):
        assert os.path.isdir(folder)
        print("LEFT", folder)

def test_few_were_tried():
    assert 1 <= len(tried) <= 10

def test_slow_without_a_mark():
    time.sleep(1.5)

@pytest.fixture
def slow_to_make():
    time.sleep(1.5)

def test_slow_set_up(slow_to_make):
    pass

def test_fails():
    assert tried is None

@pytest.mark.slow
def test_marked_slow():
    time.sleep(1.5)

@pytest.mark.dist
def test_marked_dist():
    pass

@pytest.mark.parametrize("kind", ["one", pytest.param("other", marks=pytest.mark.slow)])
def test_some(kind):
    pass

@pytest.fixture
def weed():
    pass

@pytest.fixture
def folder(weed):
    pass

def test_server(folder):
    pass
""",
    **{
        f"{folder}/test_{folder.replace('/', '_')}.py": "def test_it(): pass\n"
        for folder in ("tests/dist", "tests/crash", "tests/bench", "tests/distance")
    },
    "integration/s3/test_s3.py": "def test_it(): pass\n",
}
FAILS = "tests/test_plain.py::test_fails"
QUICK = {
    "tests/test_plain.py::test_few_examples",
    "tests/test_plain.py::test_few_were_tried",
    "tests/test_plain.py::test_what_is_left_in_the_folder_for_temporary_files_is_removed",
    "tests/test_plain.py::test_some[one]",
    "tests/distance/test_tests_distance.py::test_it",
}
TOO_SLOW = {
    "tests/test_plain.py::test_slow_without_a_mark",
    "tests/test_plain.py::test_slow_set_up",
}
LEFT_OUT = {
    "tests/test_plain.py::test_marked_slow",
    "tests/test_plain.py::test_marked_dist",
    "tests/test_plain.py::test_some[other]",
    "tests/test_plain.py::test_server",
}
NOT_READ = {
    "tests/dist/test_tests_dist.py::test_it",
    "tests/crash/test_tests_crash.py::test_it",
    "tests/bench/test_tests_bench.py::test_it",
    "integration/s3/test_s3.py::test_it",
}


def run(folder, *options):
    """Run the tests in ``folder`` by the rules of this repository; return outcomes by name."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *options],
        cwd=folder, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    found = re.findall(r"^(PASSED|FAILED|ERROR) (\S+)(.*)", done.stdout, re.M)
    assert found, done.stdout + done.stderr
    return {name: (outcome, why) for outcome, name, why in found}, done


@pytest.fixture
def folder(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    rules = (ROOT / "conftest.py").read_text("utf-8")
    rules, found = re.subn(r"^BUSY = 3 ", "BUSY = 1e9 ", rules, flags=re.M)
    assert found == 1
    (tmp_path / "conftest.py").write_text(rules)  # waiting counts, however busy this machine is
    for name, text in TESTS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.slow
def test_the_fast_lane_runs_what_is_quick_and_fails_what_is_slow_without_a_mark(folder):
    found, done = run(folder, "--fast")
    assert found.keys() == QUICK | TOO_SLOW | {FAILS}
    for name in QUICK:
        assert found[name][0] == "PASSED", done.stdout
    assert found[FAILS][0] == "FAILED"
    for name in TOO_SLOW:
        assert found[name][0] == "FAILED", done.stdout
        assert f"{name} took 1." in done.stdout
    assert "make it quicker, or mark it slow" in done.stdout
    assert f"{len(LEFT_OUT)} deselected" in done.stdout
    assert done.returncode == 1
    left = re.findall(r"^LEFT (.*)", done.stdout, re.M)
    assert len(left) == 2
    assert not any(map(os.path.exists, left))


@pytest.mark.slow
def test_all_tests_run_without_it_however_slow(folder):
    found, done = run(folder)
    assert found.keys() == QUICK | TOO_SLOW | LEFT_OUT | NOT_READ | {
        "tests/test_plain.py::test_fails"
    }
    failed = {name for name, (outcome, _) in found.items() if outcome != "PASSED"}
    few = "tests/test_plain.py::test_few_were_tried"
    assert failed == {"tests/test_plain.py::test_fails", few}, done.stdout
    only, _ = run(folder, "-m", "server or dist")
    assert only.keys() == {
        "tests/test_plain.py::test_marked_dist",
        "tests/test_plain.py::test_server",
        "tests/dist/test_tests_dist.py::test_it",
        "integration/s3/test_s3.py::test_it",
    }


def test_the_rules_name_folders_and_fixtures_that_exist(request):
    (rules,) = (
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(ROOT / "conftest.py")
    )
    for folder in rules.BY_FOLDER:
        assert list((ROOT / folder).rglob("test_*.py")), folder
    paths = {path for name in TREES for path in (ROOT / name).rglob("*.py")} - {Path(__file__)}
    code = "\n".join(path.read_text("utf-8") for path in sorted(paths))
    for name in rules.BY_FIXTURE:
        assert re.search(rf"^@pytest.fixture.*\ndef {name}\(", code, re.M), name
