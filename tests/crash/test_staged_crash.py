"""A staged run really dies by SIGKILL at each of its calls to either disk; a new one goes on."""

import itertools
import os
import shutil

import pytest
from killed import KILLED, killer
from staged_runs import train_in_one_thread as train

from dcp_checkfreq import find_latest_valid
from dcp_checkfreq.testing import CrashTier, ManualClock, MemoryTier

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(600)]

# Calls 0, 3, 6 and so on; the others are `long`. At each call there is a power loss, below.
EVERY_THIRD_CALL = [0, *(pytest.param(first, marks=pytest.mark.long) for first in (1, 2))]


@pytest.fixture(scope="module")
def child():
    with killer("staged_kill_child.py") as carry_out:
        yield lambda mode, n, folder: carry_out(f"{mode} {n} {folder}")


def look(folder):
    """Return the step that a start on new nodes, and one on the same node, goes on from.

    What is looked at is loaded with its exact values by `train`.
    """
    slow, nvme = folder / "slow", folder / "nvme"
    copy = shutil.copytree(slow, folder / "slow, seen from a new node")
    assert find_latest_valid(copy, depth="digest").step == train(copy, folder / "new nvme", 0)
    elsewhere = train(copy, folder / "new nvme", 1)
    found = find_latest_valid(slow, staging_dir=nvme, depth="digest")
    here = train(slow, nvme, 0)
    assert found.step == here
    # the upload is finished, and nothing of the dead attempt is left on the local disk
    assert find_latest_valid(slow, depth="digest").step == here
    train(slow, nvme, 1)
    assert find_latest_valid(slow, depth="digest").step == here + 1
    left = [name for _, _, names in os.walk(nvme) for name in names]
    assert sorted(name.rpartition(".")[2] for name in left) == ["distcp", "root-id", "up"]
    return elsewhere, here


@pytest.mark.parametrize("first", EVERY_THIRD_CALL)
def test_a_kill_at_any_call_leaves_the_old_step_or_the_new_one_on_both_sides(
    child, tmp_path, first
):
    seen = []
    for n in itertools.count(first, 3):
        folder = tmp_path / str(n)
        folder.mkdir()
        code, moment = child("save", n, folder)
        elsewhere, here = look(folder)
        seen.append((elsewhere, here))
        assert elsewhere <= here
        assert here in (2, 3), moment
        if code != KILLED:
            assert code == 0
            break
        shutil.rmtree(folder)
    print(*seen)
    assert seen == sorted(seen), "once there, it stays there"
    assert set(seen) == {(2, 2), (2, 3), (3, 3)}
    assert n >= 40, n


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_a_kill_in_the_midst_of_an_upload_costs_nothing_on_the_same_node(child, tmp_path, pieces):
    code, moment = child("upload", pieces, tmp_path)
    assert code == KILLED, moment
    assert look(tmp_path) == (2, 3)


@pytest.mark.parametrize("first", EVERY_THIRD_CALL)
def test_a_kill_while_an_upload_is_being_finished_costs_nothing_either(child, tmp_path, first):
    for n in itertools.count(first, 3):
        folder = tmp_path / str(n)
        folder.mkdir()
        assert child("upload", 1, folder)[0] == KILLED
        code, moment = child("resume", n, folder)
        elsewhere, here = look(folder)
        assert here == 3, moment
        assert elsewhere in (2, 3)
        if code != KILLED:
            assert (code, elsewhere) == (0, 3)
            break
        shutil.rmtree(folder)
    assert n >= 20, n


def test_a_power_loss_at_any_step_on_either_disk_leaves_the_old_step_or_the_new_one(monkeypatch):
    """One disk holds both sides; what was not synced is lost, kept, or lost in parts."""
    monkeypatch.setattr(CrashTier, "location", MemoryTier.location)  # the same after the restart
    start = MemoryTier()
    train(start.child("slow"), start.child("nvme"), 2)
    seen = set()
    for n in itertools.count():
        disk = CrashTier(start, crash_at=n, clock=ManualClock(wall_s=1e9))
        try:
            train(disk.child("slow"), disk.child("nvme"), 1)
        except BaseException:
            if not disk.crashed:
                raise
        for keep in ("none", "all", 1, 2):
            left = disk.after_power_loss(keep=keep)
            here = train(left.child("slow"), left.child("nvme"), 0)
            left = disk.after_power_loss(keep=keep)
            elsewhere = train(left.child("slow"), MemoryTier(), 0)
            assert elsewhere in (2, 3)
            assert here in (elsewhere, 3), (n, keep, disk.log[-5:])
            if keep == "none":
                seen.add((elsewhere, here))
        if not disk.crashed:
            break
    print(n, sorted(seen))
    assert seen == {(2, 2), (2, 3), (3, 3)}
