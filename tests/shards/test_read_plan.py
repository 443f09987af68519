"""Few large reads that bring every wanted byte once, each with its whole digest blocks."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.shards.read_plan import PAGE_BYTES, Want, round_to_blocks, split, windows

BLOCKS = st.sampled_from([0, 1, 512, 1000, 4096, 16384])


@st.composite
def payload_wants(draw, ticket=0):
    block = draw(BLOCKS)
    size = draw(st.integers(0, 200_000))
    start = draw(st.integers(0, size))
    stop = draw(st.integers(start, size))
    start, stop = round_to_blocks(start, stop, block, size)
    file = draw(st.sampled_from(["a", "b"]))
    return Want(ticket, file, draw(st.integers(0, 400_000)), start, stop, block)


@st.composite
def several(draw):
    return [draw(payload_wants(ticket)) for ticket in range(draw(st.integers(0, 8)))]


LIMITS = st.integers(4 * PAGE_BYTES, 40 * PAGE_BYTES)


@given(wants=several(), max_bytes=LIMITS, gap=st.integers(0, 50_000))
def test_every_byte_of_every_want_is_in_exactly_one_window(wants, max_bytes, gap):
    brought = defaultdict(list)
    for window in windows(wants, max_bytes=max_bytes, max_gap_bytes=gap):
        for part in window.wants:
            brought[part.ticket].append((part.start, part.stop))
    for want in wants:
        at = want.start
        for start, stop in sorted(brought[want.ticket]):
            assert start == at
            assert stop > start
            at = stop
        assert at == want.stop or want.start == want.stop


@given(wants=several(), max_bytes=LIMITS, gap=st.integers(0, 50_000))
def test_a_window_holds_its_wants_whole_and_starts_and_ends_at_pages(wants, max_bytes, gap):
    for window in windows(wants, max_bytes=max_bytes, max_gap_bytes=gap):
        assert window.start % PAGE_BYTES == window.stop % PAGE_BYTES == 0
        assert window.wants
        for part in window.wants:
            assert part.file == window.file
            assert window.start <= part.payload_offset + part.start
            assert part.payload_offset + part.stop <= window.stop


@given(wants=several(), max_bytes=LIMITS, gap=st.integers(0, 50_000))
def test_no_window_is_above_the_limit_but_for_one_block_that_is(wants, max_bytes, gap):
    for window in windows(wants, max_bytes=max_bytes, max_gap_bytes=gap):
        size = window.stop - window.start
        if size > max_bytes:
            (part,) = window.wants
            assert part.stop - part.start <= part.block
            assert size < part.block + 2 * PAGE_BYTES


@given(wants=several(), max_bytes=LIMITS, gap=st.integers(0, 50_000))
def test_parts_are_whole_digest_blocks(wants, max_bytes, gap):
    by_ticket = {want.ticket: want for want in wants}
    for window in windows(wants, max_bytes=max_bytes, max_gap_bytes=gap):
        for part in window.wants:
            whole = by_ticket[part.ticket]
            assert part.block == whole.block
            assert part.payload_offset == whole.payload_offset
            if part.block:
                assert part.start % part.block == 0
                assert part.stop % part.block == 0 or part.stop == whole.stop


@given(wants=several(), max_bytes=LIMITS, gap=st.integers(0, 50_000))
def test_no_more_than_the_allowed_gap_is_read_over(wants, max_bytes, gap):
    for window in windows(wants, max_bytes=max_bytes, max_gap_bytes=gap):
        spans = sorted(
            (p.payload_offset + p.start, p.payload_offset + p.stop) for p in window.wants
        )
        end = spans[0][1]
        for start, stop in spans[1:]:
            assert start - end <= gap
            end = max(end, stop)
        assert spans[0][0] - window.start < PAGE_BYTES
        assert window.stop - end < PAGE_BYTES


@given(wants=several(), max_bytes=LIMITS, gap=st.integers(0, 50_000), data=st.data())
def test_the_order_of_the_wants_does_not_matter(wants, max_bytes, gap, data):
    shuffled = data.draw(st.permutations(wants))
    plans = [
        {(w.file, w.start, w.stop) for w in windows(some, max_bytes=max_bytes, max_gap_bytes=gap)}
        for some in (wants, shuffled)
    ]
    assert plans[0] == plans[1]


def test_neighbours_are_read_together_and_files_are_not():
    wants = [Want(n, "a", 1000 * n, 0, 900, 0) for n in range(10)] + [Want(10, "b", 0, 0, 9, 0)]
    made = windows(wants, max_bytes=1 << 20, max_gap_bytes=100)
    assert [(w.file, w.start, w.stop, len(w.wants)) for w in made] == [
        ("a", 0, 3 * PAGE_BYTES, 10),
        ("b", 0, PAGE_BYTES, 1),
    ]


def test_nothing_wanted_is_nothing_read():
    assert windows([], max_bytes=1 << 20, max_gap_bytes=0) == []
    assert windows([Want(0, "a", 5, 0, 0, 16)], max_bytes=1 << 20, max_gap_bytes=0) == []


@given(
    size=st.integers(0, 10_000), block=st.integers(0, 600), data=st.data(),
)  # fmt: skip
def test_rounding_widens_to_whole_blocks_within_the_payload(size, block, data):
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    low, high = round_to_blocks(start, stop, block, size)
    if start == stop or not block:
        assert (low, high) == (start, stop)
        return
    assert low <= start < stop <= high <= size
    assert low % block == 0
    assert high % block == 0 or high == size
    assert start - low < block
    assert high - stop < block


@pytest.mark.parametrize("block", [0, 16, 4096, 100_000])
def test_a_split_adds_up_to_the_whole(block):
    parts = list(split(Want(3, "a", 7, 0, 50_000, block), 10_000))
    assert parts[0].start == 0
    assert parts[-1].stop == 50_000
    assert all(one.stop == other.start for one, other in itertools.pairwise(parts))
    assert {(p.ticket, p.file, p.payload_offset, p.block) for p in parts} == {(3, "a", 7, block)}
