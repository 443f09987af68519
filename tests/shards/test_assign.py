"""Where items go: each once, aligned, without overlap, over files of nearly equal size."""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dcp_checkfreq.shards import assign
from dcp_checkfreq.shards.assign import (
    MIN_FILE_BYTES,
    PAGE_ALIGNED_FROM_BYTES,
    PAGE_BYTES,
    SMALL_ALIGN_BYTES,
    Extent,
    assign_files,
    place,
)

SIZES = st.lists(st.integers(0, 8).map(lambda n: n * MIN_FILE_BYTES // 2), max_size=9)
PAYLOADS = st.one_of(
    st.integers(0, 300),
    st.integers(PAGE_ALIGNED_FROM_BYTES - 2, PAGE_ALIGNED_FROM_BYTES + 2),
    st.integers(0, 1 << 22),
)
EXTENTS = st.lists(
    st.builds(Extent, st.integers(0, 1500), PAYLOADS, st.integers(0, 1000)), max_size=20
)


@given(sizes=SIZES, max_files=st.integers(1, 6))
def test_every_item_is_in_exactly_one_file(sizes, max_files):
    files = assign_files(sizes, max_files)
    assert sorted(itertools.chain(*files)) == list(range(len(sizes)))
    assert len(files) <= max_files
    assert all(files)
    assert all(file == sorted(file) for file in files)


@given(sizes=SIZES, max_files=st.integers(1, 6))
def test_the_same_items_go_the_same_way(sizes, max_files):
    assert assign_files(sizes, max_files) == assign_files(list(sizes), max_files)


def smallest_possible(sizes, files):
    """Return the size of the heaviest file in the best of all assignments, by trying them."""
    best = sum(sizes)

    def put(position, loads):
        nonlocal best
        if max(loads) >= best:
            return
        if position == len(sizes):
            best = max(loads)
            return
        for number in {load: n for n, load in enumerate(loads)}.values():
            put(position + 1, [*loads[:number], loads[number] + sizes[position],
                               *loads[number + 1 :]])  # fmt: skip

    put(0, [0] * files)
    return best


@given(sizes=SIZES, max_files=st.integers(1, 4))
def test_no_file_is_above_four_thirds_of_the_best_possible(sizes, max_files):
    assume(sum(sizes))
    files = assign_files(sizes, max_files)
    heaviest = max(sum(sizes[item] for item in file) for file in files)
    count = max(1, min(max_files, sum(sizes) // MIN_FILE_BYTES))
    assert 3 * heaviest <= 4 * smallest_possible(sorted(sizes, reverse=True), count)


@given(sizes=SIZES, max_files=st.integers(1, 6))
def test_few_bytes_make_few_files(sizes, max_files):
    files = assign_files(sizes, max_files)
    assert len(files) <= max(1, sum(sizes) // MIN_FILE_BYTES)


def test_nothing_makes_no_file_and_empty_items_make_one():
    assert assign_files([], 3) == []
    assert assign_files([0, 0], 3) == [[0, 1]]


@pytest.mark.parametrize("max_files", [0, -1])
def test_no_files_at_all_is_an_error(max_files):
    with pytest.raises(ValueError, match="max_files"):
        assign_files([1], max_files)


@given(extents=EXTENTS, data=st.data())
def test_items_keep_their_order_and_never_overlap(extents, data):
    items = data.draw(st.permutations(range(len(extents))))
    placement = place(items, extents)
    assert placement.items == tuple(items)
    end = 0
    for item, start in zip(placement.items, placement.starts, strict=True):
        extent = extents[item]
        assert start >= end
        end = start + extent.prefix_bytes + extent.payload_bytes + extent.suffix_bytes
    assert placement.size_bytes >= end


@given(extents=EXTENTS)
def test_payloads_are_aligned_by_their_size(extents):
    placement = place(range(len(extents)), extents)
    for extent, start in zip(extents, placement.starts, strict=True):
        large = extent.payload_bytes >= PAGE_ALIGNED_FROM_BYTES
        assert (start + extent.prefix_bytes) % (PAGE_BYTES if large else SMALL_ALIGN_BYTES) == 0


@given(extents=EXTENTS)
def test_gaps_are_below_the_alignment_and_the_file_ends_soon(extents):
    placement = place(range(len(extents)), extents)
    end = 0
    for extent, start in zip(extents, placement.starts, strict=True):
        large = extent.payload_bytes >= PAGE_ALIGNED_FROM_BYTES
        assert start - end < (PAGE_BYTES if large else SMALL_ALIGN_BYTES)
        end = start + extent.prefix_bytes + extent.payload_bytes + extent.suffix_bytes
    assert placement.size_bytes - end < PAGE_BYTES
    assert placement.size_bytes % PAGE_BYTES == 0 or placement.size_bytes == end < PAGE_BYTES


@given(extents=EXTENTS)
def test_the_same_extents_are_placed_the_same(extents):
    assert place(range(len(extents)), extents) == place(list(range(len(extents))), list(extents))


def test_the_alignments_suit_direct_io():
    assert PAGE_BYTES % SMALL_ALIGN_BYTES == 0
    assert assign.PAGE_BYTES == 4096
