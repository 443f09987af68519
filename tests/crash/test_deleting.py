"""A crash while old checkpoints or leftovers are removed never harms a checkpoint that counts."""

import itertools

import pytest
from crash_saves import (
    folder_name,
    load,
    newest,
    root_with_step_1,
    same_values,
    save,
    state_of,
    survives,
)

from dcp_checkfreq.format.digest import identity
from dcp_checkfreq.recovery.clean import KnownSteps, clean_root, delete_step
from dcp_checkfreq.testing import CrashTier, ManualClock, MemoryTier

pytestmark = pytest.mark.crash

KEEPS = ("none", "all", *range(12))


def files_of(root, step):
    return root.child(folder_name(step)).files()


def known(tier, start, step):
    """Return a step as it was at the start."""
    content = files_of(start, step)[".metadata"]
    return KnownSteps(tier, {folder_name(step): identity(content)})


def three_steps():
    root = root_with_step_1()
    save(root, 2)
    save(root, 3)
    return root


@pytest.mark.parametrize("doomed", [1, 2, 3])
def test_a_crash_while_deleting_a_step_never_leaves_one_that_is_found_and_not_whole(doomed):
    start = three_steps()
    seen = set()
    for n in itertools.count():
        tier = CrashTier(start, crash_at=n)
        survives(delete_step, known(tier, start, doomed), folder_name(doomed))
        if not tier.crashed:
            break
        for keep in KEEPS:
            left = tier.after_power_loss(keep=keep)
            found = newest(left, depth="size")  # loads it, too
            assert found == 3 or (doomed == 3 and found == 2), (n, keep, tier.log)
            seen.add(".metadata" in files_of(left, doomed))
            for other in {1, 2, 3} - {doomed}:
                assert files_of(left, other) == files_of(start, other)
            if ".metadata" in files_of(left, doomed):
                assert files_of(left, doomed) == files_of(start, doomed), (n, keep, tier.log)
    assert n >= 4, tier.log
    assert seen == {True, False}
    assert files_of(tier.after_power_loss(keep="all"), doomed) == {}


def test_cleaning_after_any_crash_of_a_save_keeps_all_that_is_whole_and_nothing_else():
    start = root_with_step_1()
    wanted_1 = files_of(start, 1)
    for n in itertools.count():
        tier = CrashTier(start, crash_at=n, clock=ManualClock(wall_s=1000.0))
        survives(save, tier, 2)
        for keep in KEEPS:
            left = tier.after_power_loss(keep=keep)
            before = newest(left)
            clean_root(left, now_s=5000.0)
            assert newest(left) == before
            assert files_of(left, 1) == wanted_1
            if before == 1:
                assert left.files().keys() == start.files().keys(), (n, keep)
            else:
                assert len(files_of(left, 2)) == 2, files_of(left, 2).keys()
        if not tier.crashed:
            break


def test_cleaning_spares_the_files_of_a_save_that_began_just_now():
    clock = ManualClock(wall_s=1000.0)
    start = root_with_step_1()
    tier = CrashTier(start, crash_at=6, clock=clock)  # the shard is there, the commit is not
    assert not survives(save, tier, 2)
    left = tier.after_power_loss(keep="all")
    young = files_of(left, 2)
    assert young
    assert clean_root(left, now_s=1001.0) == []
    assert files_of(left, 2) == young


def test_a_crash_while_cleaning_can_be_cleaned_again():
    first = CrashTier(root_with_step_1(), crash_at=8, clock=ManualClock(wall_s=1000.0))
    assert not survives(save, first, 2)
    start = first.after_power_loss(keep="all")
    assert files_of(start, 2)
    for n in itertools.count():
        tier = CrashTier(start, crash_at=n, clock=ManualClock(wall_s=1000.0))
        survives(clean_root, tier, now_s=5000.0)
        for keep in KEEPS:
            left = tier.after_power_loss(keep=keep)
            assert newest(left) == 1
            clean_root(left, now_s=5000.0)
            assert files_of(left, 2) == {}
        if not tier.crashed:
            break


def test_cleaning_leaves_foreign_files_and_unreadable_records_alone():
    root = root_with_step_1()
    shard, data = next((k, v) for k, v in files_of(root, 1).items() if k.endswith(".distcp"))
    planted = {
        "step_00000002/notes.txt": b"mine",
        "step_00000003/.metadata": b"damaged",
        f"step_00000003/{shard}": data,
        "other/__0_0_0123456789ab.distcp": b"not in a step folder",
        "step_00000004/__0_0.distcp": b"a stock shard name",
    }
    everything = MemoryTier.holding({**root.files(), **planted})
    clean_root(everything, now_s=1e12)
    assert everything.files() == {**root.files(), **planted}
    assert same_values(load(everything, 1), state_of(1))
