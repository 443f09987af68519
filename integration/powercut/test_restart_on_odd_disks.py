"""A restart on a disk that is full, has no inodes left, or is read-only: it restores."""

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_checkfreq import CheckFreqReader, Checkpointer, find_latest_valid
from dcp_checkfreq.errors import BadLocation, SaveFailed
from dcp_checkfreq.storage.local import abilities

sys.path.insert(0, str(Path(__file__).parent))

from powercut import Unavailable
from small_disk import fill, run, small_disk, take_all_inodes

HERE = Path(__file__).parent

pytestmark = pytest.mark.crash

HOWS = ["full", "no inodes", "read-only"]


def state_of(step, size=40):
    model = torch.nn.Linear(size, size)
    torch.nn.init.constant_(model.weight, float(step))
    return {"model": model, "note": f"at {step}"}


def train(root, steps, **options):
    """Save a step each; return what was restored and the Checkpointer, for the caller to close."""
    state = state_of(-1)
    ckpt = Checkpointer(root, state, **{"every": 1, "preempt_signals": ()} | options)
    restored = ckpt.restore()
    for _ in range(steps):
        at = ckpt.step + 1
        torch.nn.init.constant_(state["model"].weight, float(at))
        state["note"] = f"at {at}"
        ckpt.after_step()
        ckpt.wait()
    return restored, ckpt


@pytest.fixture(scope="module")
def dead_run(tmp_path_factory):
    """A root with three steps, and one of them with its staging disk, of processes that died."""
    work = tmp_path_factory.mktemp("dead")
    code = f"""
import os, sys
sys.path.insert(0, {str(HERE)!r})
from test_restart_on_odd_disks import train
train({str(work / "run")!r}, 3)
os._exit(7)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    return work / "run"


@pytest.fixture(params=HOWS)
def how(request):
    return request.param


@pytest.fixture
def disk(tmp_path, how):
    try:
        with small_disk(tmp_path, inodes=64 if how == "no inodes" else 0) as mount:
            abilities.forget()  # loop devices get the numbers of those that are gone
            yield mount
    except Unavailable as error:
        pytest.skip(f"no small disk: {error}")


def spoil(disk, how):
    if how == "full":
        fill(disk)
    elif how == "no inodes":
        take_all_inodes(disk)
    else:
        run("mount", "-o", "remount,ro", str(disk))


def mend(disk, how):
    if how == "read-only":
        run("mount", "-o", "remount,rw", str(disk))
    for path in [*disk.glob("filler-*"), *disk.glob("inode-*")]:
        path.unlink()


@pytest.mark.parametrize("every", [1, None], ids=["every step", "tuned"])
def test_the_newest_checkpoint_is_restored_and_the_save_says_what_is_wrong(
    dead_run, disk, how, caplog, every
):
    root = disk / "run"
    shutil.copytree(dead_run, root)
    spoil(disk, how)
    caplog.set_level(logging.INFO)
    found = find_latest_valid(root, depth="digest")
    target = {"model.weight": torch.zeros(40, 40)}
    dcp.load(target, storage_reader=CheckFreqReader(found))
    assert bool((target["model.weight"] == 3).all())
    state = state_of(-1)
    ckpt = Checkpointer(root, state, every=every, on_error="raise", preempt_signals=())
    assert ckpt.restore().step == 3
    assert state["note"] == "at 3"
    assert bool((state["model"].weight == 3).all())
    assert ckpt.restore(step=2).step == 2
    told = [r for r in caplog.records if "restore()" in r.getMessage()]
    assert len(told) == 1
    assert told[0].levelno == (logging.INFO if how == "read-only" else logging.WARNING)
    assert str(root) in told[0].getMessage()
    code = errno.EROFS if how == "read-only" else errno.ENOSPC
    assert os.strerror(code) in told[0].getMessage()
    ckpt.step = 9
    with pytest.raises(SaveFailed, match=os.strerror(code)) as caught:
        ckpt.save(wait=True)
    assert "step_00000009" in str(caught.value)
    ckpt.close()
    mend(disk, how)
    restored, ckpt = train(root, 1)
    assert restored.step in (2, 3)
    ckpt.close()
    assert find_latest_valid(root).step == restored.step + 1


def test_with_a_staging_disk_in_front_it_is_the_same(dead_run, disk, how, tmp_path):
    root, staging = disk / "run", tmp_path / "nvme"
    shutil.copytree(dead_run, root)
    train(root, 1, staging_dir=staging)[1].close()
    spoil(disk, how)
    state = state_of(-1)
    with Checkpointer(root, state, every=1, staging_dir=staging) as ckpt:
        assert ckpt.restore().step == 4
    assert state["note"] == "at 4"
    # and on a node that knows nothing of this root
    with Checkpointer(root, state, every=1, staging_dir=tmp_path / "other node") as ckpt:
        assert ckpt.restore().step == 4


@pytest.mark.parametrize("how", ["full", "no inodes"], indirect=True)
def test_a_staging_disk_that_is_full_is_passed_by_in_a_restart(disk, how, tmp_path):
    train(tmp_path / "run", 3, staging_dir=disk)[1].close()
    for area in ("known", "new"):
        spoil(disk, how)
        if area == "new":
            for path in disk.glob("run-*/root-id"):
                path.unlink()
            spoil(disk, how)
        restored, ckpt = train(tmp_path / "run", 1, staging_dir=disk, on_error="raise")
        ckpt.close()
        assert restored.step == {"known": 3, "new": 4}[area]
        assert find_latest_valid(tmp_path / "run").step == restored.step + 1


@pytest.mark.parametrize("how", ["full", "no inodes"], indirect=True)
def test_what_a_dead_save_left_is_removed_before_anything_needs_room(dead_run, disk, how):
    """The disk is full of leftovers only: the restart makes the room that the next save needs."""
    root = disk / "run"
    shutil.copytree(dead_run, root)
    step = root / "step_00000004"
    step.mkdir()
    for number in range(1000):
        path = step / f"__0_{number}_0123456789ab.distcp"
        try:
            with open(path, "wb") as file:
                file.write(bytes(1 << 20 if how == "full" else 0))
        except OSError:
            break
        os.utime(path, (1, 1))
    else:
        pytest.fail("the disk is not full")
    os.utime(path, (1, 1)) if path.exists() else None
    spoil(disk, how)
    restored, ckpt = train(root, 2, on_error="raise")
    ckpt.close()
    assert restored.step == 3
    assert find_latest_valid(root).step == 5


def test_an_empty_root_that_cannot_be_written_to_is_refused_at_once(disk, how):
    (disk / "run").mkdir()
    spoil(disk, how)
    for root in (disk / "run", disk / "none"):
        with pytest.raises(BadLocation, match="cannot be written to"):
            Checkpointer(root, state_of(1), every=1)


@pytest.mark.parametrize("how", ["read-only"], indirect=True)
def test_a_disk_that_becomes_read_only_in_mid_run_does_not_break_close(disk, how):
    root = disk / "run"
    _, ckpt = train(root, 2, max_failures=100)
    spoil(disk, how)
    ckpt.after_step()
    with pytest.raises(SaveFailed, match="Read-only"):
        ckpt.close()
    assert find_latest_valid(root).step == 2
