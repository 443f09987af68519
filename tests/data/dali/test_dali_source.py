"""What a pipeline is fed with: pinned numbers, and the id of a list of files."""

import os

import numpy as np
from dali_tools import loader_of, take

from dcp_checkfreq.data.dali.source import names_id, uniforms
from dcp_checkfreq.data.order.permutation import SAMPLE_STREAM, derive


def test_random_numbers_are_pinned():
    """A half-done epoch depends on them: they may never change."""
    found = uniforms(7, 1, [0, 5, 10**9], 3)
    assert found.dtype == np.float32
    assert (found * 2**24).astype(int).tolist() == GOLDEN


GOLDEN = [[2738447, 2036169, 6161888], [7930578, 15106717, 12478037], [3912249, 4176258, 12291441]]


def test_random_numbers_are_those_of_derive():
    for index in (0, 12345, 2**40):
        wanted = [derive(SAMPLE_STREAM, 2**63 + 5, 3, index, k) >> 40 for k in range(4)]
        assert (uniforms(2**63 + 5, 3, [index], 4)[0] * 2**24).astype(int).tolist() == wanted


def test_random_numbers_do_not_depend_on_who_asks_and_fill_the_interval():
    together = uniforms(1, 0, range(20_000), 6)
    alone = uniforms(1, 0, [777], 6)
    assert np.array_equal(together[777], alone[0])
    assert np.array_equal(together[:, :2], uniforms(1, 0, range(20_000), 2))
    assert 0 <= together.min() < 1e-4
    assert 1 - 1e-4 < together.max() < 1
    counts = np.histogram(together, bins=100, range=(0, 1))[0]
    assert abs(counts - together.size / 100).max() < 6 * np.sqrt(together.size / 100)
    apart = np.corrcoef(np.hstack([together, uniforms(1, 1, range(20_000), 6)]), rowvar=False)
    assert abs(apart - np.eye(12)).max() < 5 / np.sqrt(20_000)


def test_a_list_of_files_is_known_by_names_and_order_not_by_its_folder():
    names = ["a/1.png", "a/2.png", "b/1.png"]
    here, there = ([f"{root}/{name}" for name in names] for root in ("/data/train", "elsewhere"))
    assert names_id(here) == names_id(there)
    assert names_id(here) != names_id(here[::-1])
    assert names_id(["/d/ab", "/d/c"]) != names_id(["/d/a", "/d/bc"])
    assert names_id(["/d/x1.png", "/d/x2.png"]) == names_id(["/e/x1.png", "/e/x2.png"])
    assert names_id(["/d/1.png"]) == names_id(["/e/1.png"]) != names_id(["/e/2.png"])


def test_a_name_that_is_no_utf8_is_read(paths, tmp_path):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe caf\xc3\xa9.png")
    with open(paths[1], "rb") as source, open(odd, "wb") as copy:
        copy.write(source.read())
    (found,) = take(loader_of([odd], 1))
    assert found[0] == 0
