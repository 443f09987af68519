"""What the tests of frameworks have shown goes to a file: the table in docs/integrations.md.

Only `scripts/test frameworks` has the frameworks; elsewhere all of these tests are skipped.
"""

import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FRAMEWORKS = ("transformers", "accelerate", "lightning", "torchtitan")
_shown = {}
_failed = []


def pytest_ignore_collect(collection_path):
    """Say once why a test file is not read where its framework is not installed."""
    needs = collection_path.stem.removeprefix("test_")
    if needs in FRAMEWORKS and importlib.util.find_spec(needs) is None:
        return None if collection_path.suffix != ".py" else _skipped(needs)
    return None


def _skipped(needs):
    if needs not in _said:
        _said.add(needs)
        print(f"\n{needs} is not installed: its tests run with `scripts/test frameworks`")
    return True


_said = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Note what a test has shown of which framework."""
    report = yield
    if report.failed:
        _failed.append(item.name)
    mark = item.get_closest_marker("framework")
    if mark is not None and call.when == "call" and report.passed:
        name, *shows = mark.args
        for one in shows:
            _shown.setdefault(name, {}).setdefault(one, []).append(item.name)
    return report


def pytest_sessionfinish():
    """Write the result where the lane wants it, if all that ran has passed."""
    path = os.environ.get("FRAMEWORKS_RESULT")
    if path and _shown and not _failed:
        Path(path).write_text(json.dumps(_result(), indent=1) + "\n")


def _result():
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    installed = [name for name in ("torch", *FRAMEWORKS) if importlib.util.find_spec(name)]
    return {
        "git": subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, CPU only",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in installed},
        "frameworks": _shown,
    }
