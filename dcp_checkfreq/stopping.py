"""Stopping a job that was told to end: one last save at a step that all ranks share, and out."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn, Protocol

from dcp_checkfreq.agreement import Agreement
from dcp_checkfreq.clock import Clock
from dcp_checkfreq.errors import CheckFreqError
from dcp_checkfreq.format.torch_private import default_store
from dcp_checkfreq.gate import Gate
from dcp_checkfreq.preemption import PreemptionWatch

_log = logging.getLogger(__name__)

_SAVE_TAKES = 1.5  # times as long as the last one, at most: what is left must be enough for it


@dataclass(frozen=True, slots=True)
class Job:
    """What can be done with the training at its end.

    Attributes:
        settle: waits for the save in flight, and acts on its end.
        save: saves the state as it is now, and returns when that is published.
        takes_s: returns how long the last save took, from the copy to its publication.
        saved: returns the last published step.
        close: gives everything back.
    """

    settle: Callable[[], None]
    save: Callable[[], None]
    takes_s: Callable[[], float]
    saved: Callable[[], int | None]
    close: Callable[[], None]


class Owner(Protocol):
    """What knows how far the job is: a `Checkpointer`."""

    last_saved_step: int | None


class Stopping:
    """Listens for signals on behalf of one `Checkpointer`, and ends the process in its name.

    Args:
        gate: that the training thread passes.
        agree: of the ranks.
        clock: for the deadline.
        signals: which say that the job will be ended.
        grace_s: how long the job may go on after one.
        key: the same on all ranks, and given once.
    """

    def __init__(
        self,
        gate: Gate,
        agree: Agreement,
        clock: Clock,
        *,
        signals: Iterable[int],
        grace_s: float,
        key: str,
    ) -> None:
        self._gate, self._agree, self._clock = gate, agree, clock
        self._signals, self._grace_s, self._key = tuple(signals), grace_s, key
        self._watch: PreemptionWatch | None = None

    def watch(self, owner: Owner) -> None:
        """Watch for signals from now on, if that is not done yet."""
        if self._watch is not None:
            return
        watch = PreemptionWatch(
            self._gate,
            rank=self._agree.rank,
            world_size=self._agree.world_size,
            store=None if self._agree.is_alone else default_store(),
            key=self._key,
            signals=self._signals,
            grace_s=self._grace_s,
            clock=self._clock,
            describe=functools.partial(_said_of, weakref.ref(owner)),
        )
        try:
            watch.start()
        except RuntimeError as error:
            _log.warning("signals are not noticed before the next step: %s", error)
        else:
            self._watch = watch

    def is_due(self, step: int) -> bool:
        """Tell whether to stop after this step; so do all ranks at the same one."""
        watch = self._watch
        return watch is not None and watch.stop_at is not None and step >= watch.stop_at

    def stop(self, step: int, job: Job) -> NoReturn:
        """Save once more if there is time, and end this process. All ranks call it after ``step``.

        Raises:
            SystemExit: always.
        """
        watch = self._watch
        assert watch is not None
        watch.taken_up()
        code = 0
        try:
            job.settle()
            if job.saved() != step and self._there_is_time(watch, job.takes_s()):
                job.save()
        except CheckFreqError as error:
            _log.error("before stopping: %s", error)
            code = error.exit_code
        _log.warning(
            "stopping after step %d, as asked by a signal; the last published step is %s",
            step,
            job.saved(),
        )
        with contextlib.suppress(CheckFreqError):  # logged already
            job.close()
        raise SystemExit(code)

    def _there_is_time(self, watch: PreemptionWatch, last_took_s: float) -> bool:
        needs_s = _SAVE_TAKES * last_took_s
        left_s = (watch.deadline_s or 0.0) - self._clock.monotonic_s()
        enough = self._agree.consult(left_s >= needs_s, all)
        if not enough:
            _log.warning(
                "%.1f s are left, a save takes about %.1f s: none is begun", left_s, needs_s
            )
        return enough

    def close(self) -> None:
        """Give the signals back. May be called twice."""
        if self._watch is not None:
            self._watch.close()


def _said_of(owner: weakref.ref[Owner]) -> str:
    alive = owner()
    return "" if alive is None else f"The last published step is {alive.last_saved_step}"
