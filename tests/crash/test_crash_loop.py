"""The power fails at every step of a save: what is found then is the old step or the new one."""

import itertools
import os

import pytest
from crash_saves import load, newest, root_with_step_1, same_values, save, state_of, survives

from dcp_checkfreq.testing import CrashTier

pytestmark = pytest.mark.crash

KEEPS = ("none", "all", *range(int(os.environ.get("KEEPS", "3"))))  # more: other choices


@pytest.fixture(params=[1, 3], ids=["one file", "three files"])
def files(request, monkeypatch):
    """Small states are written to one file; the limit is lowered to see several at once."""
    if request.param > 1:
        monkeypatch.setattr("dcp_checkfreq.shards.assign.MIN_FILE_BYTES", 4096)
    return request.param


def shard_names(tier):
    return sorted(path for path in tier.files() if path.endswith(".distcp"))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_step_of_a_save_leaves_the_old_step_or_the_new_one(files, when):
    start = root_with_step_1()
    newest_found = set()
    for n in itertools.count():
        tier = CrashTier(start, crash_at=n, crash_when=when)
        returned = survives(save, tier, 2, threads=files)
        if not tier.crashed:
            break
        for keep in KEEPS:
            left = tier.after_power_loss(keep=keep)
            found = newest(left)
            assert found in ({2} if returned else {1, 2}), (n, keep, tier.log)
            newest_found.add(found)
            assert same_values(load(left, 1), state_of(1))
    assert returned
    for keep in KEEPS:
        left = tier.after_power_loss(keep=keep)
        assert newest(left, depth="digest") == 2
        assert len(shard_names(left.child("step_00000002"))) == files
    assert newest_found == {1, 2}
    assert n >= 12, tier.log


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_step_of_an_overwrite_leaves_all_old_or_all_new_values(files, when):
    start = root_with_step_1()
    seen = set()
    for n in itertools.count():
        tier = CrashTier(start, crash_at=n, crash_when=when)
        returned = survives(save, tier, 2, into=1, overwrite=True, threads=files)
        if not tier.crashed:
            break
        for keep in KEEPS:
            left = tier.after_power_loss(keep=keep)
            got = load(left, 1)
            old, new = (same_values(got, state_of(step)) for step in (1, 2))
            assert new or (old and not returned), (n, keep, tier.log)
            seen.add("old" if old else "new")
    assert returned
    assert seen == {"old", "new"}
    left = tier.after_power_loss(keep="none")
    assert same_values(load(left, 1), state_of(2))
    left = tier.after_power_loss(keep="all")
    assert len(shard_names(left)) == files, "the old files were not removed"


def test_after_any_crash_the_same_step_can_be_saved_again(files):
    start = root_with_step_1()
    for n in itertools.count():
        tier = CrashTier(start, crash_at=n)
        survives(save, tier, 2, threads=files)
        if not tier.crashed:
            break
        for keep in ("none", "all", 0):
            left = tier.after_power_loss(keep=keep)
            if newest(left) == 1:
                save(left, 2, threads=files)
            assert newest(left, depth="digest") == 2


def test_a_crash_after_a_crash_leaves_the_old_step_or_the_new_one():
    """Leftovers of one dead attempt never become part of the next one."""
    first = CrashTier(root_with_step_1(), crash_at=9)
    assert not survives(save, first, 2, threads=1)
    for keep in ("none", "all", 3):
        start = first.after_power_loss(keep=keep)
        before = newest(start)
        if before == 2:
            continue
        for n in itertools.count():
            tier = CrashTier(start, crash_at=n)
            survives(save, tier, 2, threads=1)
            if not tier.crashed:
                break
            for second in ("none", "all", 1, 2):
                assert newest(tier.after_power_loss(keep=second)) in (1, 2)
