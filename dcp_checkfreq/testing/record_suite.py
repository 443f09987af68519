"""What every tier promises of small files and of commits. A part of `TierSuite`."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

from dcp_checkfreq.storage.tier import Reservation, ReservationRevoked, Tier
from dcp_checkfreq.testing.tier_tests import (
    ODD_NAMES,
    SIZES_BYTES,
    TierTests,
    at_once,
    expect,
    pattern,
)

RESERVED = ".metadata.0123456789ab.tmp"
RESERVED_TOO = ".metadata.ba9876543210.tmp"


class RecordSuite(TierTests):
    """`create` and `replace` are whole or nothing; so is a reserved commit, unless revoked."""

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


def _create_one_of(tier: Tier, name: str, datas: list[bytes], who: int) -> None:
    tier.create(name, datas[who], scratch=f"{name} {who}")
