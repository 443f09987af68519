"""What several ranks want is read once, by ranks that want it, in about equal parts."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.shards.shared_read_plan import rounds

RANGES = [
    (file, 1000 * number, start, start + size, block)
    for file in "ab"
    for number, (start, size, block) in enumerate(
        [(0, 100, 0), (0, 5000, 0), (128, 40_000, 64), (0, 0, 0), (0, 12_345, 16), (5, 1, 0)]
    )
]


@given(
    st.lists(st.lists(st.sampled_from(RANGES), max_size=12), min_size=1, max_size=5),
    st.sampled_from([1, 64, 5000, 1 << 20]),
)
def test_every_byte_that_several_ranks_want_is_in_one_chunk(ranks, chunk_bytes):
    plan = rounds(ranks, chunk_bytes=chunk_bytes)
    covered = {}
    for chunks in plan:
        assert len({chunk.owner for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            assert chunk.owner in chunk.wanters
            assert len(chunk.wanters) > 1
            assert chunk.size_bytes == sum(part.stop - part.start for _, part in chunk.parts)
            for wanted, part in chunk.parts:
                assert [wanted in ranges for ranges in ranks] == [
                    rank in chunk.wanters for rank in range(len(ranks))
                ]
                assert (part.file, part.payload_offset, part.block) == (*wanted[:2], wanted[4])
                covered.setdefault(wanted, []).append((part.start, part.stop))
            blocks = max((wanted[4] for wanted, _ in chunk.parts), default=0)
            assert chunk.size_bytes <= max(chunk_bytes, blocks, 4096)
    for wanted in RANGES:
        several = sum(wanted in ranges for ranges in ranks) > 1 and wanted[2] < wanted[3]
        assert (wanted in covered) == several
        if several:
            parts = sorted(covered[wanted])
            assert (parts[0][0], parts[-1][1]) == wanted[2:4]
            assert all(one[1] == other[0] for one, other in pairwise(parts))


def test_the_reading_is_shared_out_evenly():
    wanted = [("a", 0, 0, 64 << 20, 1 << 20), ("b", 0, 0, 3 << 20, 0), ("b", 9 << 20, 0, 7, 0)]
    read_bytes = [0] * 4
    for chunks in rounds([wanted] * 4, chunk_bytes=4 << 20):
        for chunk in chunks:
            read_bytes[chunk.owner] += chunk.size_bytes
    assert sum(read_bytes) == sum(stop - start for _, _, start, stop, _ in wanted)
    assert max(read_bytes) - min(read_bytes) <= 8 << 20


def test_what_one_rank_wants_alone_is_left_alone():
    assert rounds([[("a", 0, 0, 10, 0)], [("a", 0, 0, 11, 0)]], chunk_bytes=100) == []
