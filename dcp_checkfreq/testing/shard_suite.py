"""What every tier promises of large files. A part of `TierSuite`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dcp_checkfreq.testing.tier_tests import (
    SIZES_BYTES,
    TierTests,
    at_once,
    cut,
    expect,
    pattern,
    same,
)


class ShardSuite(TierTests):
    """`write_shard` and `read_into`, by one thread and by several."""

    # --- write_shard ---------------------------------------------------------------------

    def test_shards_of_every_size_hold_their_bytes(self, tmp_path: Path) -> None:
        """Around block sizes, in one piece and in odd pieces."""
        tier = self.made(tmp_path)
        wanted = {}
        for size_bytes in SIZES_BYTES:
            data = pattern(size_bytes)
            for pieces_of in (1000, 4096, 1 << 30):
                name = f"{size_bytes} by {pieces_of}"
                tier.write_shard(name, cut(data, [pieces_of]), size_bytes)
                wanted[name] = data
        tier.sync()
        assert self.raw_files(tier, tmp_path) == wanted
        for name, data in wanted.items():
            assert tier.size(name) == len(data)
            assert tier.read(name) == data

    def test_a_large_shard_in_odd_pieces_holds_its_bytes(self, tmp_path: Path) -> None:
        """40 MiB and a bit, in pieces from nothing to 9 MiB."""
        tier = self.made(tmp_path)
        data = pattern((40 << 20) + 13)
        lengths = [1, 0, 4095, 4097, 3 << 20, 7, 65_536, 9 << 20, 333_333]
        tier.write_shard("large", cut(data, lengths), len(data))
        tier.sync()
        assert tier.size("large") == len(data)
        assert same(self.raw_files(tier, tmp_path)["large"], data)
        reader = tier.open("large")
        got = bytearray(len(data))
        reader.read_into(0, memoryview(got))
        reader.close()
        assert same(got, data)

    def test_pieces_may_be_any_flat_memory(self, tmp_path: Path) -> None:
        """Slices at odd offsets, writable and read-only, of bytes and of bytearray."""
        tier = self.made(tmp_path)
        data = bytearray(pattern(100_003))
        pieces = [
            memoryview(data)[:1],
            memoryview(bytes(data))[1:50_001],
            memoryview(data)[50_001:],
        ]
        tier.write_shard("a", pieces, len(data))
        assert self.raw_files(tier, tmp_path) == {"a": data}

    def test_an_error_in_the_pieces_leaves_no_file(self, tmp_path: Path) -> None:
        """At the start, after little and after much content."""
        tier = self.made(tmp_path)

        def pieces(good: int) -> Iterator[memoryview]:
            for _ in range(good):
                yield memoryview(bytes(1 << 20))
            raise ValueError("no more")

        for good in (0, 1, 9):
            expect(ValueError, tier.write_shard, "a", pieces(good), 10 << 20)
            assert self.raw_files(tier, tmp_path) == {}
        tier.write_shard("a", [memoryview(b"now")], 3)
        assert self.raw_files(tier, tmp_path) == {"a": b"now"}

    def test_a_shard_never_goes_over_a_file_that_is_there(self, tmp_path: Path) -> None:
        """`write_shard` on the name of a shard and of a created file."""
        tier = self.made(tmp_path)
        tier.write_shard("a", [memoryview(b"old")], 3)
        tier.create("b", b"old too", scratch="s")
        for name in ("a", "b"):
            expect(FileExistsError, tier.write_shard, name, [memoryview(b"newer")], 5)
        assert self.raw_files(tier, tmp_path) == {"a": b"old", "b": b"old too"}

    def test_threads_write_different_shards_at_once(self, tmp_path: Path) -> None:
        """Eight shards by eight threads."""
        tier = self.made(tmp_path)
        datas = [pattern(300_000 + 4099 * who, seed=who) for who in range(8)]
        results = at_once(
            8, lambda who: tier.write_shard(f"{who}", cut(datas[who], [7777]), len(datas[who]))
        )
        assert results == [None] * 8, results
        tier.sync()
        assert self.raw_files(tier, tmp_path) == {f"{who}": datas[who] for who in range(8)}

    # --- read_into -----------------------------------------------------------------------

    def test_ranges_are_read_exactly(self, tmp_path: Path) -> None:
        """Ranges around block limits, the empty one included."""
        tier = self.made(tmp_path)
        data = pattern(3 * 4096 + 17)
        tier.write_shard("a", [memoryview(data)], len(data))
        reader = tier.open("a")
        assert reader.size_bytes == len(data)
        starts = (0, 1, 4095, 4096, 4097, len(data) - 1, len(data))
        for start in starts:
            for length in (0, 1, 100, 4096, 8192, len(data) - start):
                if start + length <= len(data):
                    got = bytearray(b"\xaa" * (length + 2))
                    reader.read_into(start, memoryview(got)[1:-1])
                    wanted = b"\xaa" + data[start : start + length] + b"\xaa"
                    assert got == wanted, (start, length)
        reader.close()
        reader.close()

    def test_a_range_past_the_end_raises(self, tmp_path: Path) -> None:
        """One byte too many, far past the end, and in an empty file."""
        tier = self.made(tmp_path)
        tier.write_shard("a", [memoryview(pattern(5000))], 5000)
        tier.write_shard("empty", [], 0)
        for name, offset, length in (("a", 4990, 11), ("a", 9_999_999, 1), ("empty", 0, 1)):
            reader = tier.open(name)
            expect(EOFError, reader.read_into, offset, memoryview(bytearray(length)))
            reader.close()

    def test_threads_share_one_open_file(self, tmp_path: Path) -> None:
        """Eight threads read their own ranges of one reader."""
        tier = self.made(tmp_path)
        data = pattern(8 * 100_001)
        tier.write_shard("a", [memoryview(data)], len(data))
        reader = tier.open("a")
        got = bytearray(len(data))

        def read_part(who: int) -> None:
            for start in range(who * 100_001, (who + 1) * 100_001, 9973):
                stop = min(start + 9973, (who + 1) * 100_001)
                reader.read_into(start, memoryview(got)[start:stop])

        results = at_once(8, read_part)
        reader.close()
        assert results == [None] * 8, results
        assert same(got, data)
