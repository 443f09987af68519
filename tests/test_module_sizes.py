"""A module is read in one sitting. At 400 lines look for the seam."""

import pathlib
import statistics

import pytest

ROOT = pathlib.Path(__file__).parent.parent
MOST_LINES = {"dcp_checkfreq": 450, "tests": 600, "integration": 600, "scripts": 600}
MOST_MEDIAN_LINES = 150  # of the package
MOST_LINES_OF_POLICY = 1500  # of the whole folder: decision 0034


def sizes_of(folder):
    return {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in (ROOT / folder).rglob("*.py")
    }


@pytest.mark.parametrize("folder", MOST_LINES)
def test_no_module_is_too_long(folder):
    sizes = sizes_of(folder)
    assert sizes
    assert {name: size for name, size in sizes.items() if size > MOST_LINES[folder]} == {}


def test_half_of_all_modules_are_short():
    assert statistics.median(sizes_of("dcp_checkfreq").values()) <= MOST_MEDIAN_LINES


def test_the_policy_stays_small():
    assert sum(sizes_of("dcp_checkfreq/policy").values()) <= MOST_LINES_OF_POLICY
