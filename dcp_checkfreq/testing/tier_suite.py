"""The tests that every tier must pass. Subclass `TierSuite` in a test module of your own.

    class TestMyTier(TierSuite):
        def make_tier(self, tmp_path): return MyTier(tmp_path / "root")
        def raw_files(self, tier, tmp_path): ...  # what is really there, read without the tier

Methods take pytest's ``tmp_path``; nothing else of pytest is needed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from dcp_checkfreq.storage.tier import Reservation, ReservationRevoked, Tier

ODD_NAMES = (
    "plain",
    "with space",
    "grüße-😀",
    "[brackets]{braces}",
    "star*question?",
    "per%20cent#hash",
    "quote'\"quote",
    "-dash",
    ".metadata",
    "__0_0_0123456789abcdef.distcp",
)
RESERVED = ".metadata.0123456789ab.tmp"
RESERVED_TOO = ".metadata.ba9876543210.tmp"
SIZES_BYTES = (0, 1, 511, 512, 4095, 4096, 4097, 65_536, (1 << 20) + 1)


class TierSuite:
    """The promises of `Tier`, each as one test. Reads what was written without the tier."""

    keeps_empty_folders = True  # False for object stores, where folders are parts of names
    turns = 16  # of what is tried several times because its order is left to chance

    def make_tier(self, tmp_path: Path) -> Tier:
        """Return a tier of an empty folder, which need not exist yet."""
        raise NotImplementedError

    def raw_files(self, tier: Tier, tmp_path: Path) -> Mapping[str, bytes]:
        """Return the content of all files of this tier by relative path, not by its own calls."""
        raise NotImplementedError

    def made(self, tmp_path: Path) -> Tier:
        """Return the tier with its folder made."""
        tier = self.make_tier(tmp_path)
        tier.make()
        return tier

    # --- folders -------------------------------------------------------------------------

    def test_a_missing_folder_lists_as_empty(self, tmp_path: Path) -> None:
        """`list` of what was never made."""
        assert self.make_tier(tmp_path).child("never made").list() == []

    def test_child_touches_nothing(self, tmp_path: Path) -> None:
        """`child` alone makes no folder."""
        tier = self.made(tmp_path)
        tier.child("below").child("further")
        assert tier.list() == []

    def test_make_makes_the_parents_and_may_be_repeated(self, tmp_path: Path) -> None:
        """`make` two levels down, twice."""
        tier = self.make_tier(tmp_path)
        below = tier.child("a").child("b c")
        below.make()
        below.make()
        below.write_shard("f", [memoryview(b"x")], 1)
        assert self.raw_files(tier, tmp_path) == {"a/b c/f": b"x"}
        (entry,) = tier.list()
        assert (entry.name, entry.is_folder, entry.size_bytes) == ("a", True, 0)

    def test_several_threads_may_make_one_folder(self, tmp_path: Path) -> None:
        """`make` by eight at once."""
        tier = self.make_tier(tmp_path)
        results = at_once(8, lambda _: tier.child("a").child("b").make())
        assert results == [None] * 8, results

    def test_make_refuses_the_name_of_a_file(self, tmp_path: Path) -> None:
        """`make` where a file is."""
        tier = self.made(tmp_path)
        tier.write_shard("taken", [memoryview(b"x")], 1)
        expect(OSError, tier.child("taken").make)
        assert self.raw_files(tier, tmp_path) == {"taken": b"x"}

    def test_children_with_odd_names_are_apart(self, tmp_path: Path) -> None:
        """One folder for each odd name, one file in each."""
        tier = self.made(tmp_path)
        for number, name in enumerate(ODD_NAMES):
            tier.child(name).make()
            tier.child(name).create("f", str(number).encode(), scratch="s")
        assert self.raw_files(tier, tmp_path) == {
            f"{name}/f": str(number).encode() for number, name in enumerate(ODD_NAMES)
        }
        assert {e.name for e in tier.list() if e.is_folder} == set(ODD_NAMES)

    def test_remove_takes_only_an_empty_folder(self, tmp_path: Path) -> None:
        """`remove` with a file, with a folder, empty, and missing."""
        tier = self.made(tmp_path)
        below = tier.child("below")
        below.child("deep").make()
        below.remove()
        assert [e.name for e in below.list()] == ["deep"] * self.keeps_empty_folders
        below.child("deep").remove()
        below.create("f", b"x", scratch="s")
        below.remove()
        assert self.raw_files(tier, tmp_path) == {"below/f": b"x"}
        below.delete("f")
        below.sync()
        below.remove()
        assert tier.list() == []
        below.remove()

    def test_location_is_text_that_tells_children_apart(self, tmp_path: Path) -> None:
        """`location` of two children."""
        tier = self.make_tier(tmp_path)
        places = [tier.location, tier.child("a").location, tier.child("b").location]
        assert all(places)
        assert len(set(places)) == 3

    # --- list, size, read, delete --------------------------------------------------------

    def test_list_tells_every_name_and_size(self, tmp_path: Path) -> None:
        """Odd names of different sizes."""
        tier = self.made(tmp_path)
        for size_bytes, name in enumerate(ODD_NAMES):
            tier.write_shard(name, [memoryview(bytes(size_bytes))], size_bytes)
        tier.sync()
        listed = {entry.name: entry for entry in tier.list()}
        assert {name: e.size_bytes for name, e in listed.items()} == {
            name: size_bytes for size_bytes, name in enumerate(ODD_NAMES)
        }
        assert not any(entry.is_folder for entry in listed.values())
        assert all(entry.modified_s > 0 for entry in listed.values())
        assert {name: tier.size(name) for name in ODD_NAMES} == {
            name: entry.size_bytes for name, entry in listed.items()
        }

    def test_every_call_asks_the_storage(self, tmp_path: Path) -> None:
        """Two tiers of one folder see each other's writes at once."""
        tier = self.made(tmp_path)
        one, other = tier.child("x"), tier.child("x")
        assert other.list() == []
        one.make()
        one.create("f", b"1", scratch="s")
        assert [entry.name for entry in other.list()] == ["f"]
        assert (other.read("f"), other.size("f")) == (b"1", 1)
        one.replace("f", b"22", scratch="s")
        assert (other.read("f"), other.size("f")) == (b"22", 2)
        one.delete("f")
        expect(FileNotFoundError, other.read, "f")
        assert other.list() == []

    def test_missing_names_raise_and_make_nothing(self, tmp_path: Path) -> None:
        """`size`, `read` and `open` of a missing name, in a folder and in none."""
        tier = self.made(tmp_path)
        for folder in (tier, tier.child("missing")):
            expect(FileNotFoundError, folder.size, "no")
            expect(FileNotFoundError, folder.read, "no")
            expect(FileNotFoundError, folder.open, "no")
        assert tier.list() == []

    def test_delete_removes_one_file_and_forgives_a_missing_one(self, tmp_path: Path) -> None:
        """`delete` of a file, again, and in a missing folder."""
        tier = self.made(tmp_path)
        tier.create("a", b"1", scratch="s")
        tier.create("ab", b"2", scratch="s")
        tier.delete("a")
        tier.delete("a")
        tier.sync()
        tier.child("missing").delete("a")
        assert self.raw_files(tier, tmp_path) == {"ab": b"2"}

    # --- create and replace --------------------------------------------------------------

    def test_create_writes_exactly_the_data_and_leaves_no_scratch(self, tmp_path: Path) -> None:
        """`create` in several sizes and under odd names."""
        tier = self.made(tmp_path)
        wanted = {f"of {size}": pattern(size) for size in SIZES_BYTES}
        wanted |= {name: name.encode() for name in ODD_NAMES}
        for name, data in wanted.items():
            tier.create(name, data, scratch=f"scratch of {name}")
        assert self.raw_files(tier, tmp_path) == wanted
        assert {name: tier.read(name) for name in wanted} == wanted

    def test_create_on_a_taken_name_leaves_the_old_content(self, tmp_path: Path) -> None:
        """`create` twice, and over a shard."""
        tier = self.made(tmp_path)
        tier.create("a", b"old", scratch="s1")
        tier.write_shard("b", [memoryview(b"shard")], 5)
        expect(FileExistsError, tier.create, "a", b"newer", scratch="s2")
        expect(FileExistsError, tier.create, "b", b"newer", scratch="s3")
        assert self.raw_files(tier, tmp_path) == {"a": b"old", "b": b"shard"}

    def test_of_eight_creators_exactly_one_wins(self, tmp_path: Path) -> None:
        """`create` by eight threads at once, 16 times over."""
        tier = self.made(tmp_path)
        for turn in range(16):
            name = f"turn {turn}"
            datas = [f"{turn} by {who}".encode() * (1 + 997 * who) for who in range(8)]
            results = at_once(8, partial(_create_one_of, tier, name, datas))
            winners = [who for who, result in enumerate(results) if result is None]
            losers = [result for result in results if result is not None]
            assert len(winners) == 1, results
            assert all(isinstance(error, FileExistsError) for error in losers), losers
            assert self.raw_files(tier, tmp_path)[name] == datas[winners[0]]
        assert len(self.raw_files(tier, tmp_path)) == 16, "a loser left its scratch file"

    def test_replace_puts_new_content_over_old_or_none(self, tmp_path: Path) -> None:
        """`replace` of nothing, of longer and of shorter content."""
        tier = self.made(tmp_path)
        for data in (b"first", b"", b"longer than before", b"short", pattern(70_001)):
            tier.replace("a", data, scratch="s")
            assert self.raw_files(tier, tmp_path) == {"a": data}
            assert tier.read("a") == data

    def test_readers_see_old_or_new_content_never_a_mix(self, tmp_path: Path) -> None:
        """`read` during many `replace` calls."""
        tier = self.made(tmp_path)
        contents = [bytes([number]) * (5000 + 3000 * number) for number in range(4)]
        tier.replace("a", contents[0], scratch="s")
        done = threading.Event()

        def replace_and_read(who: int) -> None:
            if who == 0:
                try:
                    for turn in range(100):
                        tier.replace("a", contents[turn % 4], scratch="s")
                finally:
                    done.set()
            else:
                while not done.is_set():
                    assert tier.read("a") in contents

        assert at_once(3, replace_and_read) == [None] * 3

    def test_an_open_file_goes_on_reading_what_it_opened(self, tmp_path: Path) -> None:
        """`read_into` after the name was replaced: old bytes or an error, never the new ones."""
        tier = self.made(tmp_path)
        tier.create("a", b"old", scratch="s")
        reader = tier.open("a")
        tier.replace("a", b"new", scratch="s")
        got = bytearray(3)
        try:
            reader.read_into(0, memoryview(got))
        except OSError:
            got[:] = b"old"
        reader.close()
        assert got == b"old"

    # --- reserve, commit, revoke ---------------------------------------------------------

    def test_a_reservation_commits_the_record_and_leaves_nothing_else(self, tmp_path: Path) -> None:
        """`reserve`, a listing, `commit`."""
        tier = self.made(tmp_path)
        reservation = tier.reserve("a", scratch=RESERVED)
        assert [entry.name for entry in tier.list()] == [RESERVED]
        expect(FileNotFoundError, tier.read, "a")
        reservation.commit(b"record", over=None)
        assert self.raw_files(tier, tmp_path) == {"a": b"record"}
        reservation.cancel()
        assert self.raw_files(tier, tmp_path) == {"a": b"record"}

    def test_what_was_revoked_or_cancelled_commits_nothing(self, tmp_path: Path) -> None:
        """`revoke` and `cancel` before `commit`, over nothing and over something."""
        tier = self.made(tmp_path)
        tier.create("old", b"old", scratch="s")
        for name, over in (("new", None), ("old", b"old")):
            reservation = tier.reserve(name, scratch=RESERVED)
            assert tier.revoke(name, scratch=RESERVED)
            expect(ReservationRevoked, reservation.commit, b"record", over=over)
            reservation.cancel()
            reservation = tier.reserve(name, scratch=RESERVED)
            reservation.cancel()
            expect(ReservationRevoked, reservation.commit, b"record", over=over)
        assert self.raw_files(tier, tmp_path) == {"old": b"old"}

    def test_a_revocation_takes_back_nothing_that_was_committed(self, tmp_path: Path) -> None:
        """`commit`, then `revoke`, and `revoke` of what was never there."""
        tier = self.made(tmp_path)
        tier.reserve("a", scratch=RESERVED).commit(b"record", over=None)
        assert tier.revoke("a", scratch=RESERVED)
        assert tier.revoke("b", scratch=RESERVED)
        tier.child("missing").revoke("a", scratch=RESERVED)
        assert self.raw_files(tier, tmp_path) == {"a": b"record"}

    def test_a_commit_replaces_only_what_it_was_told_of(self, tmp_path: Path) -> None:
        """`commit` over a free name, the right content, other content, and a taken name."""
        tier = self.made(tmp_path)
        tier.reserve("a", scratch=RESERVED).commit(b"one", over=b"gone meanwhile")
        tier.reserve("a", scratch=RESERVED).commit(b"two", over=b"one")
        for over in (b"one", None):
            reservation = tier.reserve("a", scratch=RESERVED)
            expect(FileExistsError, reservation.commit, b"three", over=over)
            assert tier.read("a") == b"two"
            reservation.cancel()
        reservation = tier.reserve("a", scratch=RESERVED)
        expect(FileExistsError, reservation.commit, b"three", over=b"one")
        reservation.commit(b"three", over=b"two")
        assert self.raw_files(tier, tmp_path) == {"a": b"three"}

    def test_reservations_of_one_name_do_not_touch_each_other(self, tmp_path: Path) -> None:
        """Two of them, one revoked; then two, of which only one can commit."""
        tier = self.made(tmp_path)
        first = tier.reserve("a", scratch=RESERVED)
        second = tier.reserve("a", scratch=RESERVED_TOO)
        assert tier.revoke("a", scratch=RESERVED)
        second.commit(b"second", over=None)
        expect(ReservationRevoked, first.commit, b"first", over=None)
        third = tier.reserve("a", scratch=RESERVED)
        expect(FileExistsError, third.commit, b"third", over=None)
        third.cancel()
        assert self.raw_files(tier, tmp_path) == {"a": b"second"}

    def test_a_commit_and_a_revocation_at_once_exclude_each_other(self, tmp_path: Path) -> None:
        """16 times over: what is there afterwards is what both were told."""
        tier = self.made(tmp_path)
        for turn in range(self.turns):
            name = f"turn {turn}"
            reservation = tier.reserve(name, scratch=RESERVED)
            told: list[bool] = []

            def commit_or_revoke(
                who: int,
                reservation: Reservation = reservation,
                name: str = name,
                told: list[bool] = told,
            ) -> None:
                if who == 0:
                    reservation.commit(b"record", over=None)
                else:
                    told.append(tier.revoke(name, scratch=RESERVED))

            (committed, refused) = at_once(2, commit_or_revoke)
            assert refused is None, refused
            assert committed is None or isinstance(committed, ReservationRevoked), committed
            there = name in self.raw_files(tier, tmp_path)
            assert there == (committed is None)
            if told == [False]:
                assert there, "what could not be stopped has not committed"
            reservation.cancel()

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


def _create_one_of(tier: Tier, name: str, datas: list[bytes], who: int) -> None:
    tier.create(name, datas[who], scratch=f"{name} {who}")


def pattern(size_bytes: int, seed: int = 1) -> bytes:
    """Return bytes that repeat nowhere, the same on every run."""
    return random.Random(seed).randbytes(size_bytes)


def cut(data: bytes, lengths: list[int]) -> Iterator[memoryview]:
    """Yield ``data`` in pieces of these lengths, taken in turn."""
    start, turn = 0, 0
    while start < len(data):
        stop = start + lengths[turn % len(lengths)]
        yield memoryview(data)[start:stop]
        start, turn = min(stop, len(data)), turn + 1


def same(got: bytes | bytearray, wanted: bytes) -> bool:
    """Compare large content; a plain ``==`` in an assert would print all of it on failure."""
    return len(got) == len(wanted) and bytes(got) == wanted


def expect(
    kind: type[BaseException], call: Callable[..., object], *args: object, **kwargs: object
) -> BaseException:
    """Return the error of this kind that the call raises.

    Raises:
        AssertionError: it returned. An error of another kind goes through as it is.
    """
    try:
        call(*args, **kwargs)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def at_once(threads: int, work: Callable[[int], object]) -> list[BaseException | None]:
    """Run ``work(0)``, ``work(1)`` ... in threads that start together; return what each raised."""
    barrier = threading.Barrier(threads)

    def run(who: int) -> BaseException | None:
        barrier.wait()
        try:
            work(who)
        except (Exception, AssertionError) as error:  # noqa: BLE001 - the caller checks each
            return error
        return None

    numbers: Iterable[int] = range(threads)
    with ThreadPoolExecutor(threads, thread_name_prefix="tier-suite") as pool:
        return list(pool.map(run, numbers))
