"""The power of a real ext4 is cut during and after saves: what had returned is all there."""

import itertools
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq import CheckFreqReader, CheckFreqWriter, find_latest_valid
from dcp_checkfreq.dcp import unsettled
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import at_disk_call

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from powercut import PowerCutDisk, Unavailable  # noqa: E402
from saver import blank_like, is_state_of, state_of  # noqa: E402

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    try:
        with PowerCutDisk(tmp_path_factory.mktemp("powercut")) as made:
            yield made
    except Unavailable as error:
        pytest.skip(f"no disk to cut off: {error}")


@pytest.fixture
def root(disk):
    path = disk.mount / "run"
    yield path
    shutil.rmtree(path, ignore_errors=True)
    os.sync()


@pytest.fixture(scope="module")
def saver():
    with Saver() as made:
        yield made


class Saver:
    """The child process that saves, see saver.py."""

    def __enter__(self):
        self._child = subprocess.Popen(
            [sys.executable, str(HERE / "saver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"
        return self

    def __exit__(self, *_):
        self._child.__exit__(None, None, None)  # closes its stdin and waits: it ends by itself
        assert self._child.returncode == 0

    def begin(self, kind, root, step):
        self._child.stdin.write(f"{kind} {step} {folder(root, step)}\n")
        self._child.stdin.flush()
        assert self._answer() == "saving"

    def outcome(self):
        return self._answer()

    def save(self, kind, root, step):
        self.begin(kind, root, step)
        return self.outcome()

    def _answer(self):
        line = self._child.stdout.readline()
        assert line, "the saving process died"
        return line.strip()


def folder(root, step):
    return root / f"step_{step:08d}"


def loads_exactly(reader, step):
    state = blank_like(step)
    dcp.load(state, storage_reader=reader)
    return is_state_of(state, step)


def check(root, saved, begun):
    """What a restart must find: every step whose save had returned, and nothing half made."""
    found = find_latest_valid(root, depth="digest")
    if found is None:
        assert not saved, f"saves of {saved} had returned, nothing was found"
        return None
    assert found.step in begun
    assert found.step >= max(saved, default=0)
    assert loads_exactly(CheckFreqReader(found), found.step)
    for step in saved:
        assert loads_exactly(CheckFreqReader(folder(root, step)), step)
    return found.step


@pytest.mark.parametrize("turn", range(4))
def test_a_save_that_returned_survives_a_cut_right_after_it(disk, root, saver, turn):
    saved = []
    for step in range(1, 2 + turn):
        assert saver.save("ours", root, step) == "saved"
        saved.append(step)
    disk.cut()
    disk.restart()
    assert check(root, saved, saved) == saved[-1]


def test_cuts_at_random_moments_of_a_save_lose_nothing_that_had_returned(disk, root, saver):
    chance = random.Random(20_261_130)
    saved, begun, outcomes = [1, 2], [1, 2], []
    assert saver.save("ours", root, 1) == "saved"
    began_s = time.monotonic()
    assert saver.save("ours", root, 2) == "saved"
    usual_s = time.monotonic() - began_s
    for step in range(3, 15):
        begun.append(step)
        saver.begin("ours", root, step)
        time.sleep(chance.uniform(0, 1) * usual_s)  # the moment of a power loss is not an event
        disk.cut()
        outcome = saver.outcome()
        disk.restart()
        if outcome == "saved":
            saved.append(step)
        newest = check(root, saved, begun)
        # What was reported as failed for certain must not come to light later.
        assert outcome == "saved" or newest != step or "PublishUnknown" in outcome, outcome
        outcomes.append((outcome.split()[0], newest))
    print("cut at random moments, (outcome, newest found):", outcomes)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cut_at_each_call_to_the_disk_leaves_the_old_step_or_the_new_one(disk, root, when):
    dcp.save(state_of(1), storage_writer=CheckFreqWriter(folder(root, 1), threads=1))
    seen = []
    for n in itertools.count():
        step = n + 2
        with at_disk_call(n, when, lambda _call: disk.cut()) as calls:
            try:
                dcp.save(state_of(step), storage_writer=CheckFreqWriter(folder(root, step)))
                returned = True
            except CheckpointException:
                returned = False
        if calls.stopped_at is None:
            break
        disk.restart()
        newest = check(root, [1, step] if returned else [1], [1, step])
        seen.append((calls.stopped_at, "returned" if returned else "failed", newest == step))
        shutil.rmtree(folder(root, step), ignore_errors=True)
        unsettled.sweep_up(LocalTier(folder(root, step)))  # or the next save does, by more calls
        os.sync()  # or the next cut brings it back
    assert returned
    print(f"cut {when} each call to the disk, (outcome, found):", *seen, sep="\n  ")
    assert f"{when} os.link" in {moment for moment, _, _ in seen}
    if when == "after":
        assert seen[-1] == ("after os.fsync", "returned", True)
    assert not all(found for _, _, found in seen)


def test_what_stock_dcp_loses_in_the_same_cuts(disk, root, saver):
    """For information: nothing is asserted about stock DCP."""
    lost = []
    for step in range(1, 7):
        assert saver.save("stock", root, step) == "saved"
        disk.cut()
        disk.restart()
        try:
            whole = loads_exactly(dcp.FileSystemReader(folder(root, step)), step)
            why = "" if whole else "loads other values"
        except (CheckpointException, OSError) as error:
            whole, why = False, type(error).__name__
        if not whole:
            lost.append((step, why or "?", sorted(_names(folder(root, step)))))
    print(
        f"stock FileSystemWriter lost {len(lost)} of 6 saves that had returned:", *lost, sep="\n  "
    )


def _names(path):
    return os.listdir(path) if path.is_dir() else ["(no folder)"]
