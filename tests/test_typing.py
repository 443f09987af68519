"""A user's code type-checks in strict mode, and their mistakes are found."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.slow  # mypy reads torch's types; seconds with the cache that scripts/test has warmed
@pytest.mark.timeout(600)
def test_the_public_api_is_typed_as_it_is_used():
    command = [sys.executable, "-m", "mypy", "--warn-unused-ignores", "tests/typing/api.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "dcp_checkfreq" / "py.typed").exists()
