"""Saving in a training loop: when a save is due it is begun, and its end is acted on and kept."""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dcp_checkfreq.checkpointer.background_save import Ended
from dcp_checkfreq.checkpointer.memory_forecast import MemoryForecast
from dcp_checkfreq.checkpointer.registered import Registered
from dcp_checkfreq.checkpointer.run import Run
from dcp_checkfreq.checkpointer.run_history import RunHistory
from dcp_checkfreq.checkpointer.saver import Saver
from dcp_checkfreq.errors import RankLost, TooManyFailures
from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.save_schedule import SaveSchedule
from dcp_checkfreq.policy.save_timings import SaveTimings
from dcp_checkfreq.policy.step_timer import StepTimer
from dcp_checkfreq.runtime.error_reports import text_of
from dcp_checkfreq.snapshot.pool import drop_device_pools

_log = logging.getLogger(__name__)

_HISTORY = 1000  # saves that are remembered


class SaveLoop:
    """Begins the saves of a run and acts on their ends, on all ranks at the same step.

    All ranks make the same calls, on the thread that trains.

    Args:
        run: whose saves they are.
        saver: carries saves out.
        schedule: says when one is due, and how to copy.
        times: of the iterations between them.
        parts: what is saved.
        run_history: says where.
        raise_errors: raise the error of every save that failed.
        max_failures: this many failures in a row are raised in any case.
        tell_time: on rank 0, gets the seconds that each published save took.

    Attributes:
        history: the last saves that have ended, oldest first.
        last_step: the last published one, or the one that the run resumes from.
        failures_in_a_row: since the last published one.
    """

    def __init__(
        self,
        run: Run,
        saver: Saver,
        schedule: SaveSchedule,
        times: StepTimer,
        parts: Registered,
        run_history: RunHistory,
        *,
        raise_errors: bool,
        max_failures: int,
        tell_time: Callable[[float], None],
    ) -> None:
        self._saver, self._schedule, self._times = saver, schedule, times
        self._parts, self._run_history = parts, run_history
        self._run, self._clock = run, run.clock
        self._raise_errors, self._max_failures = raise_errors, max_failures
        self._tell_time = tell_time
        self._blocked_s = 0.0  # by the last save
        self.history: deque[SaveTimings] = deque(maxlen=_HISTORY)
        self.last_step: int | None = None
        self.failures_in_a_row = 0

    # --- from step to step ---

    def step_done(self, step: int) -> None:
        """Count an iteration, and act on the end of a save that all ranks know of by ``step``.

        Raises:
            CheckFreqError: see `finish_in_flight`.
        """
        self._schedule.step_done()
        if not self._saver.is_busy:
            self._parts.check_optimizers_once()
        ended = self._saver.take_result(step)
        if ended is not None:
            self._act_on(ended)

    def save_if_due(self, step: int) -> None:
        """Save ``step`` if the schedule says so, after the save before."""
        if not self._schedule.is_due(step):
            return
        begun_s = self._clock.monotonic_s()
        self.finish_in_flight()  # which may have changed the interval
        if self._schedule.is_due(step):
            self._begin(step, begun_s)
        else:
            self._times.add_save_wait()

    def save(self, step: int, *, wait: bool) -> None:
        """Save ``step`` now, after the save before.

        Args:
            step: that is done.
            wait: return only when it is published, and raise if it is not.
        """
        begun_s = self._clock.monotonic_s()
        self.finish_in_flight()
        self._begin(step, begun_s)
        if wait:
            self._times.start_wait()
            self._saver.wait()
            self._blocked_s = self._clock.monotonic_s() - begun_s
            self.finish_in_flight(must_raise=True)

    def save_last(self, step: int, capture: Callable[[], Mapping[str, Any]]) -> None:
        """Save what ``capture`` returns as ``step``; nothing comes after it. No save is in flight.

        The copy takes no GPU memory, of which there may be none left, and nothing is learned of it.

        Raises:
            SaveFailed: it is not published.
        """
        self._schedule.learns = False
        timings = replace(self._schedule.next_save(step), mode=Mode.BLOCKING)
        self._hand_over(timings, capture, profile=False)
        self.finish_in_flight(must_raise=True)

    def finish_in_flight(self, *, must_raise: bool = False) -> None:
        """Wait for the save in flight, if there is one, and act on its end.

        Args:
            must_raise: raise its error, whatever is done with the errors of others.

        Raises:
            SaveFailed: it failed, and that is raised.
            TooManyFailures: so did those before it.
            RankLost: another rank has died.
        """
        ended = self._saver.wait_result()
        if ended is not None:
            self._act_on(ended, must_raise=must_raise)

    def forecast(self) -> MemoryForecast:
        """Say what the next snapshot takes, after the save in flight. All ranks call it."""
        self.finish_in_flight()
        return self._saver.forecast(
            self._schedule.mode,
            self._parts.capture,
            self._parts.without_state,
            profile=self._schedule.wants_profile,
        )

    @property
    def begun(self) -> int:
        """Saves so far."""
        return self._schedule.saves

    def last_took_s(self) -> float:
        """Return how long the last save took, from the copy to its publication."""
        last = self.history[-1] if self.history else None
        return 0.0 if last is None else last.copy_s + last.persist_s

    # --- one save ---

    def _begin(self, step: int, begun_s: float) -> None:
        if self.last_step == step:
            return
        timings, profile = self._schedule.next_save(step), self._schedule.wants_profile
        if profile:
            used_bytes, total_bytes = self._parts.gpu_memory_bytes()
            timings = replace(timings, gpu_used_bytes=used_bytes, gpu_total_bytes=total_bytes)
        self._hand_over(timings, self._parts.capture, profile=profile)
        self._schedule.save_started()
        self._blocked_s = self._clock.monotonic_s() - begun_s

    def _hand_over(
        self, timings: SaveTimings, capture: Callable[[], Mapping[str, Any]], *, profile: bool
    ) -> None:
        laps = self._times.take()
        self._saver.begin(
            timings,
            capture,
            lambda: self._run_history.writer(timings.step),
            profile=profile,
            # what is in flight does not keep this object alive
            iterations=functools.partial(self._times.resolve, laps),
        )

    def begin_finishing(self, step: int, finish: Callable[[], None]) -> None:
        """Have ``finish`` publish, in the background, what an earlier process has saved."""
        self._blocked_s = 0.0
        self._saver.begin_finishing(SaveTimings(step=step, mode=self._schedule.mode), finish)

    def _act_on(self, ended: Ended, *, must_raise: bool = False) -> None:
        self._schedule.apply(ended.decision)
        if self._schedule.mode is not Mode.GPU:
            drop_device_pools()  # in which the profile has tried a copy
        error, decision = ended.error, ended.decision
        timings = replace(
            ended.timings,
            blocked_s=self._blocked_s,
            waited_s=self._times.waited_s(),
            overhead=None if decision is None else decision.overhead_seen,
            error=None if error is None else text_of(error),
        )
        self.history.append(timings)
        if error is None:
            if self._run.ranks.rank == 0:
                _log.info("step %d saved: %s", timings.step, timings)
                self._tell_time(self.last_took_s())
            self.last_step = timings.step
            self.failures_in_a_row = 0
            return
        self.failures_in_a_row += 1
        if self._raise_errors or must_raise or isinstance(error, RankLost):
            raise error
        if self.failures_in_a_row >= self._max_failures:
            raise TooManyFailures(
                self._run.root.location,
                f"the last {self.failures_in_a_row} saves failed; last published step: "
                f"{self.last_step}; last error: {text_of(error)}",
            ) from error
