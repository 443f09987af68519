"""`Checkpointer`: the one object that a training loop holds."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Literal

from dcp_checkfreq.checkpointer.dropped import Holdings
from dcp_checkfreq.checkpointer.last_step import LastStep
from dcp_checkfreq.checkpointer.last_words import LastWords
from dcp_checkfreq.checkpointer.memory_forecast import MemoryForecast
from dcp_checkfreq.checkpointer.registered import Registered
from dcp_checkfreq.checkpointer.restorer import Restored, Restorer
from dcp_checkfreq.checkpointer.run import Snapshots, mode_of, open_run
from dcp_checkfreq.checkpointer.run_history import RunHistory
from dcp_checkfreq.checkpointer.save_loop import SaveLoop
from dcp_checkfreq.checkpointer.saver import Saver
from dcp_checkfreq.checkpointer.stopping import DEFAULT_SIGNALS, FinalActions, Stopping
from dcp_checkfreq.dcp.save_planner import CheckFreqSavePlanner
from dcp_checkfreq.errors import SaveFailed, SnapshotFailed
from dcp_checkfreq.policy.save_schedule import SaveSchedule
from dcp_checkfreq.policy.save_timings import SaveRecord
from dcp_checkfreq.policy.step_timer import StepTimer
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.ranks.step_gate import Gate, next_step
from dcp_checkfreq.recovery.retention import Retention
from dcp_checkfreq.recovery.scan import Depth
from dcp_checkfreq.runtime import options
from dcp_checkfreq.runtime.clock import Clock, SystemClock
from dcp_checkfreq.runtime.error_reports import text_of
from dcp_checkfreq.runtime.one_call import OneCall, one_at_a_time
from dcp_checkfreq.runtime.outcome import report
from dcp_checkfreq.runtime.process_end import close_at_exit
from dcp_checkfreq.snapshot.optimizer_guard import Guard
from dcp_checkfreq.staging.staged_tier import StagingDir
from dcp_checkfreq.state.app_state import AppState
from dcp_checkfreq.state.restoration import Selection
from dcp_checkfreq.storage.open import Location

_log = logging.getLogger(__name__)


class Checkpointer:
    """Saves a job's state in the background as often as the budget allows; restores the newest.

    ::

        with Checkpointer(root, {"model": model, "optim": optim}, max_overhead=0.035) as ckpt:
            ckpt.restore()
            for batch in loader:
                ...  # forward, backward, optim.step()
                ckpt.after_step()

    All ranks make it, and call its methods, at the same places. The first iterations are measured,
    then one save is; from both follows the interval k, which is adapted while the job runs. A save
    copies parameters and optimizer state while the next forward and backward run; a hook lets
    ``optim.step`` wait for the copy. Everything else is copied before `after_step` returns. At most
    one save is in flight, and it is never given up for a newer one: a crash loses at most 2k steps.
    A failed save leaves earlier checkpoints untouched and is reported by a next call.

    Parameters and optimizer state may change in ``optim.step`` only, or after `wait_for_snapshot`;
    nor may their memory be freed before (``storage.resize_``): such a save fails.

    Args:
        root: folder of the run: path, fsspec URL or `Tier`; the same for all ranks.
        state: name to module, optimizer, `Stateful` object (scheduler, sampler, ...), `PerRank` or
            plain value. Restored plain values are put back into this mapping.
        max_overhead: share of training time that saving may cost (p).
        every: save at multiples of this step instead.
        steps_per_epoch: of this job, if known: the profile is then about 1 % of an epoch.
        mtbf_s: mean time between failures of the whole job, if known: the interval is then the one
            of least expected waste, if that is longer than the budget asks for.
        snapshot: "auto": beside the training, in GPU memory or on the host, or "blocking" where
            that is cheaper. "cpu", "gpu" and "blocking" fix it.
        preempt_signals: on any rank make all ranks save once more and exit with code 0.
        grace_s: how long after such a signal the job may go on.
        keep_last: published checkpoints of this history to keep.
        keep_every: also keep steps that are multiples of this.
        keep_epochs: also keep the last checkpoint of every epoch, if ``steps_per_epoch`` is given.
        on_error: "log" goes on after a failed save, "raise" raises it, on all ranks at the same
            step.
        max_failures: this many failed saves in a row raise `TooManyFailures` in any case.
        threads: shard files that a rank writes or reads at once.
        allow_pickle: save and restore values whose unpickling runs code. Without it they are
            refused when they are saved.
        share_reads: `restore` reads from ``root`` once what several ranks need, and sends it to the
            others: for storages that are slower than the network between the ranks.
        staging_dir: folder on a local disk of every node. Saves are written there first and then
            copied to ``root``, as slow as that may be; a job that starts again on the same nodes
            resumes from there, and finishes what was being copied. See `docs/staged.md`.
        staging_bytes: what a rank may keep there; default: as long as 5 % of the disk stay free.
        storage_options: for the file system of a URL; see `CheckFreqWriter`.
        timeout_s: how long a rank waits for the others in a save or restore, and for a sign of life
            of the storage.
        clock: where time comes from.

    Raises:
        RootDiffers: the ranks do not see the same folder under ``root``.
    """

    def __init__(
        self,
        root: Location,
        state: MutableMapping[str, Any],
        *,
        max_overhead: float = 0.035,
        every: int | None = None,
        steps_per_epoch: int | None = None,
        mtbf_s: float | None = None,
        snapshot: Snapshots = "auto",
        preempt_signals: Iterable[int] = DEFAULT_SIGNALS,
        grace_s: float = 25.0,
        keep_last: int = 2,
        keep_every: int | None = None,
        keep_epochs: bool = True,
        on_error: Literal["log", "raise"] = "log",
        max_failures: int = 3,
        threads: int = 2,
        allow_pickle: bool = False,
        share_reads: bool = False,
        staging_dir: StagingDir | None = None,
        staging_bytes: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        timeout_s: float = 1800.0,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._ranks = Ranks(timeout_s=timeout_s, clock=self._clock)
        with self._ranks.making("a Checkpointer", self._give_back):
            options.check(options.CHECKPOINTER, locals())
            mode = mode_of(snapshot)
            given = locals()
            alike = {name: given[name] for name in options.ALIKE}
            self._ranks.same({**alike, "staged": staging_dir is not None})
            run = open_run(
                root,
                self._ranks,
                self._clock,
                threads=threads,
                storage_options=storage_options,
                staging_dir=staging_dir,
                staging_bytes=staging_bytes,
            )
            self._where = run.root.location
            self._calls = OneCall(self._where)
            self._lease = run.lease
            self._state = AppState(state, self._ranks.rank)
            epochs = steps_per_epoch if keep_epochs else None
            kept = Retention(
                keep_last=keep_last, keep_every=keep_every, keep_epochs_of_steps=epochs
            )
            self._run_history = RunHistory(run, kept)
            self._restorer = Restorer(
                run, self._state, share_reads=share_reads, allow_pickle=allow_pickle
            )
            self._planner = CheckFreqSavePlanner(allow_pickle=allow_pickle, clock=self._clock)
            self._parts = Registered(
                self._state, self._ranks, self._planner, allow_pickle=allow_pickle
            )
            self._parts.check()
            self._times = StepTimer(self._clock, gpu=self._state.gpu())
            self._guard = Guard(
                self._state.optimizers(),
                raise_errors=on_error == "raise" and self._ranks.is_alone,
                around_update=self._times,
            )
            self._schedule = SaveSchedule(
                run.root,
                self._ranks,
                self._state.describe,
                every=every,
                max_overhead=max_overhead,
                mtbf_s=mtbf_s,
                steps_per_epoch=steps_per_epoch,
                mode=mode,
            )
            self._gate = Gate()
            self._saver = Saver(
                run, self._gate, self._guard, self._planner, self._run_history, self._schedule
            )
            self._stopping = Stopping(
                self._gate,
                self._ranks,
                self._clock,
                signals=preempt_signals,
                grace_s=grace_s,
                key=f"checkfreq/{run.id}",
            )
            self._loop = SaveLoop(
                run,
                self._saver,
                self._schedule,
                self._times,
                self._parts,
                self._run_history,
                raise_errors=on_error == "raise",
                max_failures=max_failures,
                tell_time=self._stopping.compare_with_grace,
            )
            last = LastStep(self._state, self._guard)
            self._words = LastWords(run, last, self._loop, self._parts)
            self._closed = False
            self.step = 0
        self._pid = os.getpid()
        self._is_closed = close_at_exit(self, Checkpointer._close, place=run.place)
        self._holdings = Holdings(
            self._guard, self._stopping, self._saver, self._lease, self._ranks
        )
        self._if_dropped = self._holdings.if_dropped(self)

    @property
    def interval_steps(self) -> int | None:
        """Iterations from one save to the next (k); None while the job is being profiled."""
        return self._schedule.interval_steps

    @property
    def history(self) -> Sequence[SaveRecord]:
        """The last saves that have ended, oldest first."""
        return tuple(self._loop.history)

    @property
    def last_saved_step(self) -> int | None:
        """The last published step of this run, or the one that it was restored from."""
        return self._loop.last_step

    @property
    def failures_in_a_row(self) -> int:
        """How many saves have failed since the last published one."""
        return self._loop.failures_in_a_row

    @one_at_a_time
    def forecast(self) -> MemoryForecast:
        """Say what host and GPU memory a snapshot takes, on this rank and node; take none.

        All ranks call it at the same place. Waits for the save in flight, and reports it like
        `after_step`. Before the first step most optimizers have no state to be counted.
        """
        self._check_open()
        return self._loop.forecast()

    # --- restoring ---

    @one_at_a_time
    def restore(
        self,
        step: int | None = None,
        *,
        depth: Depth = "size",
        fresh_start: bool = False,
        only: Collection[str] | None = None,
        optional: Collection[str] = (),
        rename: Mapping[str, str] | None = None,
        strict: bool = True,
    ) -> Restored | None:
        """Put the newest whole checkpoint into the state, and resume from it.

        A checkpoint that turns out damaged while it is read is passed over for the next older one.
        All of it is read and compared before the first live value is touched; a restore that fails
        leaves them as they were.

        Args:
            step: this step instead of the newest. Newer ones are then an abandoned branch: this
                run, and those that resume from it, never come back to them.
            depth: "digest" reads and checks everything before choosing.
            fresh_start: start from nothing although checkpoints are there.
            only: names of parts to restore; the others keep what they have.
            optional: names of parts that keep what they have if the checkpoint lacks them.
            rename: what is called otherwise in the checkpoint, by its name here, up to a dot:
                ``{"ema": "model"}``, ``{"model.body": "model.encoder"}``.
            strict: tensors and values of a part that are missing in the checkpoint, that are not
                there any more, or that were saved with another dtype are an error. Otherwise they
                are logged, listed in `Restored.differences` and left out, or cast.

        Returns:
            What was restored, or None for a fresh start.

        Raises:
            StepNotFound: ``step`` is not there or not whole.
            NoValidCheckpoint: checkpoints are there, but none is whole.
            LoadFailed: the checkpoint does not fit the state; see the subclasses.
        """
        options.check(options.RESTORE, locals())
        self._check_open()
        self._saver.wait()
        self._loop.finish_in_flight()
        with contextlib.suppress(SnapshotFailed):  # reported with its save
            self._guard.wait()
        with self._ranks.region("restoring"):
            self._ranks.same({"step": step, "depth": depth, "fresh_start": fresh_start})
            choice, restored, unfinished = self._restorer.run(
                step,
                depth,
                fresh_start=fresh_start,
                selection=Selection(only, optional, rename or {}, strict),
            )
            self._run_history.go_on_from(choice)
            self._loop.last_step = None if restored is None else restored.step
            self.step = self.last_saved_step or 0
            self._gate.start_from(self.step)
            self._times.take()  # what came before was not training
            self._stopping.watch(self)
        if unfinished is not None:
            self._loop.begin_finishing(unfinished.record.step, self._restorer.finish(unfinished))
        return restored

    # --- training ---

    @one_at_a_time
    def after_step(self, step: int | None = None) -> None:
        """Say that a training step is done; starts a save when one is due.

        Args:
            step: number of the step that is done, not before the last; default: one more.

        Raises:
            SaveFailed: a background save failed (see ``on_error`` and ``max_failures``). It is
                logged when it happens, and raised on all ranks at the same step, soon after.
            RankLost: another rank has died, or did not answer in time.
            SystemExit: after a signal, once the last save is published; see ``preempt_signals``.
        """
        options.check(options.AFTER_STEP, locals())
        self._check_open()
        done = next_step(self.step, step)
        self._times.enter()
        self._stopping.watch(self)
        self._gate.pass_step(done)
        self.step = done
        try:
            self._loop.step_done(done)
            if self._stopping.is_due(done):
                self._stop()
            self._loop.save_if_due(done)
            self._words.mark(done)
        finally:
            self._times.exit(is_loaded=self._saver.is_running, is_copying=self._saver.is_copying)

    @one_at_a_time
    def save(self, *, wait: bool = False, check_replicas: bool = False) -> None:
        """Save the state as it is now, as the current step, unless that is published already.

        Waits for the save before, copies the state or starts to, and returns while it is being
        written.

        Args:
            wait: return only when the checkpoint is published, and raise if it is not.
            check_replicas: compare tensors of which only one rank's copy is kept between ranks, as
                the first save does; a difference fails this save, and those after it until one
                passes, with `ReplicasDiffer`. Small tensors and other values are always compared.
        """
        options.check(options.SAVE, locals())
        self._check_open()
        self._times.pause()
        try:
            if check_replicas:
                self._planner.check_tensors_once()
            self._loop.save(self.step, wait=wait)
        finally:
            self._times.resume(is_loaded=self._saver.is_running, is_copying=self._saver.is_copying)

    def wait_for_snapshot(self) -> None:
        """Return once parameters and optimizer state may change outside of ``optimizer.step``.

        Raises:
            SnapshotFailed: the copy failed; the step that was being saved will not be.
        """
        self._guard.wait()
        self._guard.has_stepped = True  # as far as one knows from now on

    @one_at_a_time
    def wait(self) -> None:
        """Wait until the save in flight is published, and report it like `after_step`.

        On rank 0 until the checkpoints that are not to be kept are removed, too.
        """
        self._saver.wait()
        self._loop.finish_in_flight()

    # --- stopping ---

    def preempt(self) -> None:
        """Have all ranks save once more and exit, as after a signal. Any thread of any rank may.

        For train functions outside of the main thread, where Python allows no signal handlers.
        """
        self._stopping.preempt()

    def _stop(self) -> None:
        job = FinalActions(
            settle=self._loop.finish_in_flight,
            save=lambda: self.save(wait=True),
            takes_s=self._loop.last_took_s,
            saved=lambda: self.last_saved_step,
            close=self.close,
        )
        self._calls.hand_on()
        self._stopping.stop(self.step, job)

    @one_at_a_time
    def close(self) -> None:
        """Wait for the save in flight and give everything back. May be called twice.

        Raises:
            SaveFailed: the last save failed: unlike `after_step`, whatever ``on_error`` says.
        """
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._is_closed()
        self._if_dropped.detach()
        if self._pid != os.getpid():  # a forked child: all of it is the parent's
            self._guard.close()
            return
        try:
            self._loop.finish_in_flight(must_raise=True)
        finally:
            self._holdings.close()

    @one_at_a_time
    def _last_words(self, error: BaseException) -> None:
        self._words.speak(error, self.step, self._stopping.why_no_time)

    def _check_open(self) -> None:
        if self._closed:
            raise SaveFailed(self._where, "this Checkpointer is closed")

    def _give_back(self) -> None:
        """Undo a constructor that has failed, on this rank or another."""
        if hasattr(self, "_guard"):
            self._guard.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if error is not None and not self._closed:
                self._last_words(error)
            self.close()
        except Exception as failed:
            if error is None:
                raise
            # Of whatever class it is, the user's own error must come out.
            report(_log.error, "while leaving because of another error: %s", text_of(failed))
