"""The in-memory tiers keep every promise of a tier; the crash tier loses only what it may."""

import errno
import threading

import pytest

from dcp_checkfreq.storage.tier import RangeReader, Tier
from dcp_checkfreq.testing import (
    CrashTier,
    Fault,
    FaultyTier,
    ForwardingTier,
    GatedTier,
    ManualClock,
    MemoryTier,
    PowerLoss,
    TierSuite,
)


class TestMemoryTier(TierSuite):
    def make_tier(self, tmp_path):
        return MemoryTier()

    def raw_files(self, tier, tmp_path):
        return tier.files()


class TestCrashTierWithPower(TierSuite):
    """While the power holds, and after a loss that takes nothing."""

    def make_tier(self, tmp_path):
        return CrashTier().child("root")

    def raw_files(self, tier, tmp_path):
        files = {}

        def walk(folder, path):
            for name, node in folder.seen.items():
                if hasattr(node, "pending"):
                    walk(node, f"{path}{name}/")
                else:
                    files[path + name] = bytes(node.seen)

        walk(tier._find(tier._path), "")
        return files


class TestForwardingTier(TierSuite):
    def make_tier(self, tmp_path):
        return FaultyTier(MemoryTier(), [])

    def raw_files(self, tier, tmp_path):
        return tier.inner.files()


def shard(tier, name, data):
    tier.write_shard(name, [memoryview(data)], len(data))


def test_the_test_tiers_are_tiers():
    for tier in (
        MemoryTier(),
        CrashTier(),
        FaultyTier(MemoryTier(), []),
        GatedTier(MemoryTier()),
        ForwardingTier(MemoryTier()),
    ):
        assert isinstance(tier, Tier)
        tier.create("a", b"x", scratch="s")
        assert isinstance(tier.open("a"), RangeReader)


def test_holding_and_files_are_inverse():
    files = {"a": b"1", "b/c": b"2", "b/d/e f": b""}
    tier = MemoryTier.holding({**files, "empty/": b""})
    assert tier.files() == files
    assert tier.child("b").files() == {"c": b"2", "d/e f": b""}
    assert tier.folders() == {"b", "b/d", "empty"}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", "nul\0"])
def test_a_path_is_not_a_name(name):
    for tier in (MemoryTier(), CrashTier()):
        for call in (
            lambda t: t.child(name),
            lambda t: t.read(name),
            lambda t: t.delete(name),
            lambda t: t.create(name, b"", scratch="s"),
            lambda t: shard(t, name, b""),
        ):
            with pytest.raises(ValueError, match="plain file name"):
                call(tier)
        assert tier.list() == []


# --- CrashTier: what survives ------------------------------------------------------------


def seeds():
    return ["none", "all", *range(40)]


def test_what_the_protocol_promises_survives_every_loss():
    tier = CrashTier()
    folder = tier.child("a").child("b")
    folder.make()
    shard(folder, "shard", b"content")
    folder.sync()
    folder.create("created", b"x", scratch="s1")
    folder.replace("created", b"y", scratch="s2")
    shard(folder, "gone", b"z")
    folder.sync()
    folder.delete("gone")
    folder.sync()
    for keep in seeds():
        assert tier.after_power_loss(keep=keep).files() == {
            "a/b/shard": b"content",
            "a/b/created": b"y",
        }


def test_an_unsynced_name_survives_in_some_losses_and_not_in_others():
    tier = CrashTier()
    shard(tier, "shard", b"content")
    assert tier.after_power_loss(keep="none").files() == {}
    assert tier.after_power_loss(keep="all").files() == {"shard": b"content"}
    seen = {tuple(tier.after_power_loss(keep=seed).files().items()) for seed in range(40)}
    assert seen == {(), (("shard", b"content"),)}


def test_unsynced_deletes_survive_in_any_combination():
    tier = CrashTier(MemoryTier.holding({"a": b"1", "b": b"2"}))
    tier.delete("a")
    tier.delete("b")
    assert tier.after_power_loss(keep="none").files() == {"a": b"1", "b": b"2"}
    assert tier.after_power_loss(keep="all").files() == {}
    seen = {tuple(sorted(tier.after_power_loss(keep=seed).files())) for seed in range(40)}
    assert seen == {(), ("a",), ("b",), ("a", "b")}


def test_unsynced_content_is_torn_or_zeros():
    tier = CrashTier(crash_at=2)  # new file, write, then before the sync of its content
    with pytest.raises(PowerLoss):
        shard(tier, "a", b"12345678")
    assert tier.after_power_loss(keep="all").files() == {"a": b"12345678"}
    contents = {tier.after_power_loss(keep=seed).files().get("a") for seed in range(300)}
    assert {None, b"", b"12345678", bytes(8)} <= contents
    assert any(c and c != b"12345678" and b"12345678".startswith(c) for c in contents)
    assert any(c and c[:1] == b"1" and c.endswith(b"\0") for c in contents)


def test_a_folder_made_durably_survives_and_its_unsynced_content_does_not():
    tier = CrashTier()
    tier.child("a").make()
    shard(tier.child("a"), "f", b"x")
    left = tier.after_power_loss(keep="none")
    assert (left.files(), left.folders()) == ({}, {"a"})


def test_a_crash_in_make_may_lose_the_folder():
    tier = CrashTier(crash_at=1)
    with pytest.raises(PowerLoss):
        tier.child("a").make()
    assert tier.after_power_loss(keep="none").folders() == set()
    assert tier.after_power_loss(keep="all").folders() == {"a"}


def test_every_crash_in_replace_leaves_old_or_new_content():
    seen = set()
    for n in range(100):
        tier = CrashTier(MemoryTier.holding({"a": b"old"}), crash_at=n)
        try:
            tier.replace("a", b"new", scratch="s")
        except PowerLoss:
            pass
        else:
            assert tier.after_power_loss(keep="none").files() == {"a": b"new"}
            break
        for keep in seeds():
            seen.add(tier.after_power_loss(keep=keep).files()["a"])
    assert seen == {b"old", b"new"}
    assert n == 5  # scratch name, content, its sync, rename, sync of the folder


def test_every_crash_in_create_leaves_all_of_it_or_nothing_under_the_name():
    for when in ("before", "after"):
        for n in range(100):
            tier = CrashTier(crash_at=n, crash_when=when)
            try:
                tier.create("a", b"new", scratch="s")
            except PowerLoss:
                pass
            else:
                break
            for keep in seeds():
                assert tier.after_power_loss(keep=keep).files().get("a") in (None, b"new")
        assert n == 6


def test_no_except_exception_goes_on_and_every_later_call_raises():
    tier = CrashTier(crash_at=0)

    def create_with_a_handler():
        try:
            tier.create("a", b"x", scratch="s")
        except Exception:  # noqa: BLE001 - the very thing that must not help
            pytest.fail("an error handler ran on a dead machine")

    with pytest.raises(PowerLoss):
        create_with_a_handler()
    for call in (
        tier.list,
        tier.sync,
        tier.make,
        tier.child("b").make,
        tier.remove,
        lambda: tier.read("a"),
        lambda: tier.delete("a"),
        lambda: shard(tier, "b", b""),
    ):
        with pytest.raises(PowerLoss, match="before new file /s"):
            call()
    assert tier.crashed


def test_the_start_state_is_copied():
    start = MemoryTier.holding({"a": b"old"})
    tier = CrashTier(start)
    tier.replace("a", b"new", scratch="s")
    assert start.files() == {"a": b"old"}
    left = tier.after_power_loss(keep=3)
    left.poke("a", b"changed")
    assert tier.after_power_loss(keep=3).files() == {"a": b"new"}


def test_the_same_seed_gives_the_same_loss():
    def run(seed):
        tier = CrashTier()
        for turn in range(9):
            shard(tier, f"{turn}", bytes([65 + turn]) * 9)
        return tier.after_power_loss(keep=seed).files()

    assert [run(seed) for seed in range(9)] == [run(seed) for seed in range(9)]


def test_a_child_sees_its_own_part_of_what_survived():
    tier = CrashTier()
    tier.child("a").make()
    tier.child("a").create("f", b"x", scratch="s")
    assert tier.child("a").after_power_loss(keep="none").files() == {"f": b"x"}


# --- FaultyTier, GatedTier, ManualClock ----------------------------------------------------


def test_the_nth_matching_call_fails_once():
    inner = MemoryTier()
    tier = FaultyTier(inner, [Fault(verb="write_shard", name="a*", nth=1, error=errno.ENOSPC)])
    shard(tier, "a1", b"")
    shard(tier, "b", b"")
    with pytest.raises(OSError, match="injected") as caught:
        shard(tier, "a2", b"")
    assert caught.value.errno == errno.ENOSPC
    shard(tier, "a3", b"")
    assert set(inner.files()) == {"a1", "b", "a3"}
    assert tier.struck == 1
    assert tier.calls == [("write_shard", name) for name in ("a1", "b", "a2", "a3")]


def test_a_call_fails_forever_from_the_nth_on_in_children_too():
    tier = FaultyTier(MemoryTier(), [Fault(verb="make", nth=1, times="forever")])
    tier.child("a").make()
    for name in ("b", "c"):
        with pytest.raises(OSError, match="injected"):
            tier.child(name).make()
    assert [entry.name for entry in tier.list()] == ["a"]


def test_a_lost_answer_carries_the_call_out():
    inner = MemoryTier()
    tier = FaultyTier(inner, [Fault(verb="create", lost_answer=True)])
    with pytest.raises(OSError, match="injected"):
        tier.create("a", b"x", scratch="s")
    assert inner.files() == {"a": b"x"}


def test_a_write_that_fails_half_way_goes_through_the_inner_tier():
    crash = CrashTier()
    tier = FaultyTier(crash, [Fault(verb="write_shard", nth=1, after_bytes=5, error=errno.ENOSPC)])
    tier.write_shard("good", [memoryview(b"12345678")], 8)
    with pytest.raises(OSError, match="injected"):
        tier.write_shard("a", [memoryview(b"123"), memoryview(b"45678")], 8)
    assert [entry.name for entry in crash.list()] == ["good"]
    assert "write 3 bytes to /a" in crash.log
    assert "write 2 bytes to /a" in crash.log


def test_reads_of_an_open_file_can_fail():
    tier = FaultyTier(
        MemoryTier.holding({"a": b"12"}), [Fault(verb="read_into", nth=1, error=errno.EIO)]
    )
    reader, got = tier.open("a"), bytearray(1)
    reader.read_into(1, memoryview(got))
    assert got == b"2"
    with pytest.raises(OSError, match="injected"):
        reader.read_into(0, memoryview(got))


def test_a_gate_holds_the_call_until_released():
    inner = MemoryTier()
    tier = GatedTier(inner, name="a")
    worker = threading.Thread(target=shard, args=(tier, "a", b"x"), name="held-writer")
    worker.start()
    tier.wait_until_held()
    shard(tier, "b", b"y")
    assert set(inner.files()) == {"b"}
    tier.release()
    worker.join()
    assert set(inner.files()) == {"a", "b"}


def test_a_gate_nobody_opens_raises_instead_of_hanging():
    tier = GatedTier(MemoryTier(), timeout_s=0.0)
    with pytest.raises(TimeoutError, match="never released"):
        shard(tier, "a", b"x")
    with pytest.raises(TimeoutError, match="no call"):
        GatedTier(MemoryTier(), timeout_s=0.0).wait_until_held()


def test_the_clock_moves_only_by_hand_and_never_back():
    clock = ManualClock(wall_s=100.0)
    clock.advance(2.5)
    assert (clock.wall_s(), clock.monotonic_s()) == (102.5, 2.5)
    clock.set_wall(50.0)
    assert (clock.wall_s(), clock.monotonic_s()) == (50.0, 2.5)
    for backward_s in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="never goes back"):
            clock.advance(backward_s)
    assert clock.monotonic_s() == 2.5
