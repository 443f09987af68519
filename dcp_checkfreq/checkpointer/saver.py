"""One save, from the live state to what all ranks know of it.

On the training thread `begin` agrees with the other ranks on what is copied, and takes the snapshot
or starts it. In the background it is written and published by DCP; then the ranks *meet*: each
holds its training loop at the gate for a moment, they exchange what happened and what it cost, and
rank 0 decides what comes next. `Ended.at` is a step that no rank has reached yet, so all of them
act on it at the same one.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dcp_checkfreq.checkpointer.background_save import (
    BackgroundWork,
    Ended,
    SaveInFlight,
    ends_of,
    save_failed,
    write_and_publish,
)
from dcp_checkfreq.checkpointer.memory_forecast import MemoryForecast
from dcp_checkfreq.checkpointer.run import Run
from dcp_checkfreq.checkpointer.run_history import RunHistory
from dcp_checkfreq.checkpointer.save_meeting import meet
from dcp_checkfreq.checkpointer.save_start import SaveStart
from dcp_checkfreq.dcp.save_planner import CheckFreqSavePlanner
from dcp_checkfreq.dcp.writer import CheckFreqWriter
from dcp_checkfreq.errors import (
    PublishUnknown,
    SaveFailed,
)
from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.observation import Iteration
from dcp_checkfreq.policy.save_schedule import SaveSchedule
from dcp_checkfreq.policy.save_timings import SaveTimings
from dcp_checkfreq.ranks.patience import give_up_if_stuck, wait_for
from dcp_checkfreq.ranks.step_gate import Gate
from dcp_checkfreq.runtime.crew import Crew, Task
from dcp_checkfreq.runtime.error_reports import (
    as_ours,
    text_of,
)
from dcp_checkfreq.runtime.gil_switch_interval import quick_switching
from dcp_checkfreq.runtime.outcome import (
    fate,
    outcome_of,
    report,
)
from dcp_checkfreq.runtime.process_end import lost, watch
from dcp_checkfreq.snapshot.optimizer_guard import Guard

_log = logging.getLogger(__name__)


class Saver:
    """Carries out one save at a time.

    Args:
        run: whose saves they are. The group of its ranks is used by the background thread during a
            save; the training thread may use it only when none is in flight. Its lease is renewed
            in the background before a save is written.
        gate: that the training thread passes.
        guard: of the optimizers.
        planner: kept over all saves.
        run_history: removes old checkpoints on rank 0, in the background, when the save has ended
            already: the next one may begin, but is written later.
        schedule: decides on rank 0 at the end of a save; keeps what it learned as checkpoints are
            removed.
    """

    def __init__(
        self,
        run: Run,
        gate: Gate,
        guard: Guard,
        planner: CheckFreqSavePlanner,
        run_history: RunHistory,
        schedule: SaveSchedule,
    ) -> None:
        self._ranks, self._clock, self._lease = run.ranks, run.clock, run.lease
        self._gate, self._run_history, self._schedule = gate, run_history, schedule
        self._save_start = SaveStart(run.ranks, guard, planner, run.clock)
        self._crew = Crew(1, "checkfreq-save")  # one: collectives must not interleave
        self._job: BackgroundWork | None = None
        self._running: Task[None] | None = None
        self._cleaning: Task[None] | None = None
        self._retiring: Task[None] | None = None
        self._gave_up = False
        self._pid = os.getpid()
        planner.expect_ranks(run.ranks.world_size)
        watch(self)

    # --- on the training thread ---

    @property
    def is_busy(self) -> bool:
        """Whether a save was begun that `take_result` has not returned yet."""
        return self._job is not None

    @property
    def is_running(self) -> bool:
        """Whether something is going on in the background now."""
        tasks = (self._running, self._cleaning, self._retiring)
        return any(task is not None and not task.is_done for task in tasks)

    @property
    def is_copying(self) -> bool:
        """Whether a snapshot is being copied now."""
        job = self._job
        return job is not None and job.snapshot is not None and not job.snapshot.is_done

    def begin(
        self,
        timings: SaveTimings,
        capture: Callable[[], Mapping[str, Any]],
        open_writer: Callable[[], CheckFreqWriter],
        *,
        profile: bool,
        iterations: Callable[[], Sequence[Iteration]],
    ) -> None:
        """Save what ``capture`` returns through a writer, which is closed at the end.

        All ranks call it at the same step, with no save in flight.

        Args:
            timings: say which step it is and how to copy.
            capture: returns the live state.
            open_writer: returns the writer of this step's folder.
            profile: measure for later saves: have new memory ready before the copy starts, and
                try the GPU if there is one.
            iterations: called in the background when the save has ended: those before it.

        Raises:
            CheckFreqError: nothing was begun, on any rank.
        """
        assert self._job is None
        begun_s = self._clock.monotonic_s()
        agreed = self._save_start.agree(timings, capture, open_writer, profile=profile)
        timings = replace(timings, call_s=self._clock.monotonic_s() - begun_s)
        try:
            job, stopped = self._save_start.copy(
                agreed, timings, profile=profile, iterations=iterations
            )
            self._start(job, functools.partial(self._write, job))
        except BaseException:
            if self._job is None:
                agreed.writer.close()  # also after Ctrl-C, whose traceback may keep all alive
            raise
        if stopped is not None:
            raise stopped  # `KeyboardInterrupt`, say; the other ranks hear of it in the save

    def forecast(
        self,
        mode: Mode,
        capture: Callable[[], Mapping[str, Any]],
        without_state: Callable[[], tuple[str, ...]],
        *,
        profile: bool,
    ) -> MemoryForecast:
        """Say what a save takes. All ranks call it, with no save in flight."""
        assert self._job is None
        return self._save_start.forecast(mode, capture, without_state, profile=profile)

    def begin_finishing(self, timings: SaveTimings, finish: Callable[[], None]) -> None:
        """Publish a step, which an earlier process has saved, by calling ``finish``.

        All ranks call it, with no save in flight; it is one from then on. ``finish`` may use the
        ranks' group.
        """
        assert self._job is None
        job, wrap = BackgroundWork(timings, None), save_failed(timings.step)

        def work() -> None:
            begun_s = self._clock.monotonic_s()
            self._ranks.together("finishing a save", finish, wrap=wrap)
            job.timings = replace(timings, persist_s=self._clock.monotonic_s() - begun_s)

        self._start(job, work)

    def _start(self, job: BackgroundWork, work: Callable[[], None]) -> None:
        running = Task(functools.partial(self._run, job, work))
        # In this order: wherever this is interrupted, the save is known only if somebody does it.
        self._running = running
        self._job = job
        self._crew.take(running)
        if running.is_nobodys:
            _log.warning("step %d is saved before training goes on: no thread can be had", job.step)
            running.run()

    def take_result(self, step: int) -> Ended | None:
        """Return how the save in flight has ended, or None; it is in flight no more then.

        Args:
            step: all ranks act on it at the same one, so it may be too early.

        Raises:
            SaveFailed: the storage of this rank does not come back.
        """
        self._check_process()
        job = self._job
        if job is None:
            return None
        if job.ended is None:
            give_up_if_stuck(self._ranks.watchdog, self._give_up)
        if job.ended is None or step < job.ended.at:
            return None
        self._job = self._running = None
        return job.ended

    def wait_result(self) -> Ended | None:
        """Wait for the end of the save in flight, and return it; None if there is no save.

        Raises:
            SaveFailed: the storage of this rank does not come back.
        """
        self._check_process()
        job = self._job
        if job is None:
            return None
        self._wait_for(self._running)
        if job.ended is None:
            give_up_if_stuck(self._ranks.watchdog, self._give_up)
            return None
        self._job = self._running = None
        return job.ended

    def wait(self) -> None:
        """Return once nothing goes on in the background; `take_result` tells how the save ended."""
        self._check_process()
        self._wait_for(self._running)
        try:
            self._wait_for(self._cleaning)
        except SaveFailed as error:  # what was saved is saved
            report(_log.error, "checkpoints that are not kept stay for now: %s", error.why)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            why = "a forked child cannot use what its parent saves with: let it make its own"
            raise SaveFailed(f"process {os.getpid()}", why)

    def _wait_for(self, task: Task[None] | None) -> None:
        if task is not None:
            wait_for(task, self._ranks.watchdog, self._give_up)
            task.result()

    def _give_up(self, why: str) -> SaveFailed:
        """Give up what is going on in the background; return what the training thread raises."""
        if not self._gave_up:
            self._ranks.tell_stuck()
        self._gave_up = True
        job = self._job
        if job is None:
            return SaveFailed("what comes next", why)
        job.is_given_up = True
        if isinstance(job, SaveInFlight) and job.writer.rank_save.give_up(why):
            return PublishUnknown(job.writer.checkpoint_id, why)
        return SaveFailed(f"step {job.step}", why)

    def close(self) -> None:
        """Wait for the save in flight and end the thread. May be called twice."""
        self.wait()
        if not self.has_given_up:
            self._crew.close()

    # --- when nobody calls any more ---

    @property
    def has_given_up(self) -> bool:
        """Whether what is going on in the background will hardly come to an end."""
        return self._gave_up and self._ranks.watchdog.stuck() is not None

    @property
    def is_under_way(self) -> bool:
        """Whether the process must not end now, or has not heard that a save has failed."""
        if self._job is not None and self._job.is_given_up:
            return False
        return self.is_busy or (self.is_running and not self.has_given_up)

    def wait_at_exit(self) -> None:
        """Wait like `wait`, and until what `retire` was given is done."""
        self.wait()
        self._wait_for(self._retiring)

    def problem(self) -> BaseException | None:
        """Return why the save failed that `take_result` has not returned."""
        job = self._job
        ended = None if job is None or job.is_given_up else job.ended
        return None if ended is None else ended.error

    def retire(self, then: Callable[[], None]) -> None:
        """Call ``then`` in the background when what is under way has ended; nobody will ask."""
        self._retiring = self._crew.start(functools.partial(self._retire, then))
        if self._retiring.is_nobodys:
            self._retiring.run()

    def _retire(self, then: Callable[[], None]) -> None:
        problem = self.problem()
        if problem is not None:
            lost(problem)
        self._job = None
        then()

    # --- in the background ---

    def _run(self, job: BackgroundWork, work: Callable[[], None]) -> None:
        with quick_switching():  # the training loop runs during all of this
            self._work_and_meet(job, work)

    def _work_and_meet(self, job: BackgroundWork, work: Callable[[], None]) -> None:
        # Whatever raises before the meeting is part of the outcome: the other ranks wait there.
        error = outcome_of(work, *ends_of(job))
        if error is None and self._ranks.rank == 0:  # it begins when this is through
            error = outcome_of(lambda: self._begin_cleaning(job.step))
        if error is not None:
            job.timings = replace(job.timings, failed=True)
            # Now, not only when the loop comes to ask: it may never come.
            report(_log.error, "step %d %s: %s", job.step, fate(error), text_of(error))
        try:
            meet(job, error, self._ranks, self._gate, self._schedule.decide)
        except BaseException as failed:  # noqa: BLE001
            job.ended = Ended(job.timings, 0, as_ours(error or failed, save_failed(job.step)))

    def _write(self, job: SaveInFlight) -> None:
        write_and_publish(job, self._ranks, self._clock, self._lease.renew_quietly)

    def _begin_cleaning(self, step: int) -> None:
        self._cleaning = self._crew.start(functools.partial(self._clean_up, step))

    def _clean_up(self, step: int) -> None:
        try:
            with self._ranks.asking("removing what is not kept"):
                self._run_history.apply_retention(step)
                self._schedule.store()
        except Exception:  # noqa: BLE001  nothing of it concerns the training
            report(_log.exception, "step %d is saved; cleaning up after it failed", step)
