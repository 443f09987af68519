"""A module is read in one sitting. At 400 lines look for the seam; 600 fail."""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = ("dcp_checkfreq", "tests", "integration", "scripts")
LIMIT_LINES = 600


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_has_600_lines(folder):
    sizes = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / folder).rglob("*.py")
    }
    assert sizes
    assert {name: size for name, size in sizes.items() if size >= LIMIT_LINES} == {}
