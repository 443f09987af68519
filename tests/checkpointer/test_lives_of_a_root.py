"""Random lives of a root, against a small model of what a user expects.

Two jobs at a time live in one root: they save, restore the newest step or an older one or nothing,
are closed, or killed at any call to the storage; somebody saves with stock DCP and with the plain
writer, and removes steps by hand. After every event the root holds exactly the checkpoints that the
model says, and each restore gives the state that the model says.

A failure names its seed: ``LIFE=17 pytest ...`` plays that life alone. ``LIVES=5000`` plays more.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import shutil
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dcp_checkfreq import (
    CheckFreqWriter,
    Checkpointer,
    CheckpointExists,
    LeftBehind,
    find_latest_valid,
)
from dcp_checkfreq.format.names import step_folder
from dcp_checkfreq.recovery import root_watch
from dcp_checkfreq.testing import ManualClock, MemoryTier
from dcp_checkfreq.testing.forwarding_tier import ForwardingTier

LIVES = int(os.environ.get("LIVES", "60"))
KEEP_LAST = 2


# --- what a user expects ---


@dataclass(eq=False)
class Saved:
    """A checkpoint."""

    step: int
    value: float
    by: History | None  # None: not by a Checkpointer
    commit: bytes  # its ``.metadata``


@dataclass(eq=False)
class History:
    """What one restore began."""

    number: int
    base: list[Saved]  # its past: what it went on from, and before
    seen: set[Saved]  # all that was there then
    known: set[History]  # all histories that had begun then
    own: list[Saved] = field(default_factory=list)

    def leaves(self, one: Saved) -> bool:
        """Whether ``one`` does not count any more once this history has saved."""
        if one.by is self or one in self.base:
            return False
        first = max((past.step for past in self.base), default=-1) + 1
        before = {past.by for past in self.base if past.by is not None}
        return (
            one in self.seen
            or (one.by in self.known and (one.step >= first or one.by not in before))
            or any(history.leaves(one) for history in before)
        )


class Model:
    """The checkpoints of a root."""

    def __init__(self):
        self.there: dict[int, Saved] = {}
        self.histories: list[History] = []

    def alive(self, without=()):
        """Return the checkpoints that count. Later histories have their say first."""
        have_a_say = []
        for history in reversed([h for h in self.histories if h not in without]):
            if any(self.counts(s, have_a_say) for s in self.there.values() if s.by is history):
                have_a_say.append(history)
        theirs = [s for s in self.there.values() if s.by not in without]
        return [s for s in theirs if self.counts(s, have_a_say)]

    @staticmethod
    def counts(one, histories):
        return not any(history.leaves(one) for history in histories)

    def newest(self):
        return max(self.alive(), key=lambda s: s.step, default=None)

    def begin(self, resumed):
        """Return the history that goes on from ``resumed``; None: from nothing."""
        base = []
        if resumed is not None:
            who_left_it = [h for h in self.histories if h.leaves(resumed)]
            base = [s for s in self.alive(who_left_it) if s.step <= resumed.step]
        history = History(len(self.histories), base, set(self.there.values()), set(self.histories))
        self.histories.append(history)
        return history

    def would_be_left(self, history, step):
        coming = Saved(step, 0.0, history, b"")
        self.there[-1] = coming
        try:
            return coming not in self.alive()
        finally:
            del self.there[-1]

    def may_go(self, history):
        """Return what retention lets go."""
        kept = sorted(
            (s for s in history.base + history.own if self.there.get(s.step) is s),
            key=lambda s: s.step,
        )
        return kept[:-KEEP_LAST]


# --- what plays it ---


class Killed(BaseException):
    """The process is gone."""


class Process(ForwardingTier):
    """What one process sees of the root. After its death it does nothing there."""

    def __init__(self, inner):
        super().__init__(inner)
        self.calls_left: int | None = None
        self.is_dead = False

    def around(self, verb, name, call):
        if self.is_dead:  # what this test's own process still holds of it cannot do anything
            raise OSError(errno.EIO, "this process is dead")
        if self.calls_left is not None:
            if self.calls_left <= 0:
                raise Killed(f"{verb} {name}")
            self.calls_left -= 1
        return call()


@dataclass(eq=False)
class Job:
    """A live process with its Checkpointer."""

    process: Process
    model: nn.Linear
    ckpt: Checkpointer
    history: History | None = None


def weights(value=0.0):
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, value)
    return module


class Life:
    """One life of a root."""

    def __init__(self, seed, folder):
        self.chance = random.Random(seed)
        self.folder = folder
        self.clock = ManualClock()
        self.root = MemoryTier(clock=self.clock)
        self.model = Model()
        self.jobs: list[Job | None] = [None, None]
        self.values = iter(range(1, 10_000))
        self.told: list[str] = []

    def live(self, events):
        try:
            for _ in range(events):
                event = self.chance.choice(
                    [self.save] * 8
                    + [self.restore] * 4
                    + [self.close, self.kill, self.kill, self.kill_restoring]
                    + [self.save_plainly, self.save_plainly, self.remove_by_hand]
                )
                event()
                self.clock.advance(1000.0)
                self.compare()
        finally:
            for job in self.jobs:
                if job is not None:
                    self.end(job, killed=True)

    def tell(self, text):
        self.told.append(text)

    # what is there

    def commits(self):
        return {
            int(path.split("/")[0].removeprefix("step_")): content
            for path, content in self.root.files().items()
            if path.endswith("/.metadata")
        }

    def compare(self):
        wanted = {step: saved.commit for step, saved in self.model.there.items()}
        found = self.commits()
        assert sorted(found) == sorted(wanted), f"on storage {sorted(found)}, not {sorted(wanted)}"
        assert found == wanted
        newest, latest = self.model.newest(), find_latest_valid(self.root)
        assert (latest and latest.step) == (newest and newest.step)

    # events

    def restore(self):
        slot = self.chance.randrange(2)
        job, other = self.jobs[slot], self.jobs[1 - slot]
        if other is not None and not self.is_known(other.history):
            return
        how = self.chance.choice(["newest", "newest", "step", "fresh"])
        wanted, options = self.model.newest(), {}
        if how == "step" and self.model.there:
            wanted = self.chance.choice([*self.model.there.values()])
            options = {"step": wanted.step}
        elif how == "fresh":
            wanted, options = None, {"fresh_start": True}
        self.tell(f"job {slot} restores {options}, wants {wanted and wanted.step}")
        if job is None:
            process, model = Process(self.root), weights()
            job = Job(process, model, self.checkpointer(process, model))
            self.jobs[slot] = job
        restored = job.ckpt.restore(**options)
        assert (restored and restored.step) == (wanted and wanted.step)
        if wanted is not None:
            assert job.model.weight.item() == wanted.value
        job.history = self.model.begin(wanted)

    def checkpointer(self, process, model):
        return Checkpointer(
            process,
            {"model": model},
            every=1,
            keep_last=KEEP_LAST,
            on_error="raise",
            max_failures=10**6,
            preempt_signals=(),
            clock=self.clock,
        )

    def is_known(self, history):
        """Whether a new job can know of ``history``: it has saved, or its lease is there."""
        lease = self.root.files().get(".checkfreq/lease.json", b"").decode()
        run_of = [job.ckpt._lease._run_id for job in self.jobs if job is not None]
        saved = any(one.by is history for one in self.model.there.values())
        return saved or any(
            job is not None and job.history is history and run in lease
            for job, run in zip([j for j in self.jobs if j is not None], run_of, strict=True)
        )

    def saving(self):
        """Return a job that has restored, and the value and step that it saves next."""
        job = self.chance.choice([job for job in self.jobs if job is not None] or [None])
        if job is None:
            return None, 0.0, 0
        value = float(next(self.values))
        nn.init.constant_(job.model.weight, value)
        return job, value, job.ckpt.step + 1

    def save(self):
        job, value, step = self.saving()
        if job is None:
            return
        in_the_way = self.model.there.get(step)
        error: type[Exception] | None = None
        if self.model.would_be_left(job.history, step):
            error = LeftBehind
        elif in_the_way is not None and not job.history.leaves(in_the_way):
            error = CheckpointExists
        self.tell(f"job {self.jobs.index(job)} saves {step}, wants {error}")
        with pytest.raises(error) if error else contextlib.nullcontext():
            job.ckpt.after_step()
            job.ckpt.wait()
        if error is None:
            self.published(job, value, step)
            for old in self.model.may_go(job.history):
                del self.model.there[old.step]

    def published(self, job, value, step):
        saved = Saved(step, value, job.history, self.commits()[step])
        self.model.there[step] = saved
        job.history.own.append(saved)

    def kill(self):
        """Kill a job at any call of its next save or of the retention after it."""
        job, value, step = self.saving()
        if job is None:
            return
        before = self.commits()
        job.process.calls_left = self.chance.randrange(40)
        self.tell(f"job {self.jobs.index(job)} dies saving {step}, {job.process.calls_left} calls")
        with contextlib.suppress(Exception, Killed):
            job.ckpt.after_step()
            job.ckpt.wait()
        self.end(job, killed=True)
        after = self.commits()
        if after.get(step) not in (None, before.get(step)):
            in_the_way = self.model.there.get(step)
            assert in_the_way is None or job.history.leaves(in_the_way)
            assert not self.model.would_be_left(job.history, step)
            self.published(job, value, step)
            for old in self.model.may_go(job.history):
                if old.step not in after:
                    del self.model.there[old.step]

    def kill_restoring(self):
        """Kill a job at any call of its start or its restore: no checkpoint changes."""
        free = [slot for slot in range(2) if self.jobs[slot] is None]
        if not free:
            return
        process = Process(self.root)
        process.calls_left = self.chance.randrange(25)
        self.tell(f"a job dies restoring, {process.calls_left} calls")
        options = self.chance.choice([{}, {"fresh_start": True}])
        with contextlib.suppress(Killed):
            ckpt = self.checkpointer(process, weights())
            self.jobs[free[0]] = job = Job(process, weights(), ckpt)
            with contextlib.suppress(Killed):
                ckpt.restore(**options)
            self.end(job, killed=True)

    def close(self):
        job = self.chance.choice([job for job in self.jobs if job is not None] or [None])
        if job is not None:
            self.tell(f"job {self.jobs.index(job)} is closed")
            self.end(job, killed=False)

    def end(self, job, *, killed):
        job.process.is_dead = killed
        with contextlib.suppress(Killed, *([Exception] if killed else [])):
            job.ckpt.close()
        self.jobs[self.jobs.index(job)] = None
        lease = self.root.files().get(".checkfreq/lease.json")
        if killed and lease is not None and job.ckpt._lease._run_id.encode() in lease:
            # The dead process is this one, which lives: let it look like one that does not.
            dead = lease.replace(b'"started": "', b'"started": "before ')
            self.root.poke(".checkfreq/lease.json", dead)

    def save_plainly(self):
        top = max(self.model.there, default=0)
        step = max(0, top + self.chance.randint(-3, 3))
        stock = self.chance.random() < 0.5
        value = float(next(self.values))
        self.tell(f"somebody saves {step} with {'stock DCP' if stock else 'the plain writer'}")
        self.remove(step)
        folder = self.root.child(step_folder(step))
        state = {"model": weights(value).state_dict()}
        if stock:
            made = self.folder / "stock"
            dcp.save(state, storage_writer=dcp.FileSystemWriter(made, sync_files=False))
            for path in sorted(made.iterdir(), reverse=True):
                self.root.poke(f"{step_folder(step)}/{path.name}", path.read_bytes())
            shutil.rmtree(made)
        else:
            dcp.save(state, storage_writer=CheckFreqWriter(folder, clock=self.clock))
        self.model.there[step] = Saved(step, value, None, self.commits()[step])

    def remove_by_hand(self):
        if self.model.there:
            step = self.chance.choice(sorted(self.model.there))
            self.tell(f"somebody removes {step}")
            self.remove(step)

    def remove(self, step):
        folder = self.root.child(step_folder(step))
        for entry in folder.list():
            folder.delete(entry.name)
        folder.remove()
        self.model.there.pop(step, None)


def play(seed, folder):
    life = Life(seed, folder)
    try:
        life.live(events=30)
    except BaseException as error:
        error.add_note(f"LIFE={seed}: " + "; ".join(life.told))
        raise
    return life


@pytest.mark.slow
@pytest.mark.usefixtures("_quiet")
def test_whatever_happens_to_a_root_a_user_finds_what_was_saved_last(tmp_path):
    seeds = [int(os.environ["LIFE"])] if "LIFE" in os.environ else range(LIVES)
    played = [play(seed, tmp_path) for seed in seeds]
    events = sum(len(life.told) for life in played)
    print(f"{len(played)} lives, {events} events")
    assert len(played) == len(seeds)
    assert events >= 10 * len(seeds)


@pytest.fixture
def _quiet(monkeypatch):
    # Memory knows no times of folders: what others replace is seen at once, not in turn.
    monkeypatch.setattr(root_watch, "_LOOKS_AGAIN", 100)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
