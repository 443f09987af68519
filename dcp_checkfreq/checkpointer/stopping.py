"""Stopping a job that was asked to end: one last save at a step that all ranks share, and out."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from dcp_checkfreq.errors import CheckFreqError
from dcp_checkfreq.format.torch_private import default_store
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.ranks.preemption import PreemptionWatch
from dcp_checkfreq.ranks.step_gate import Gate
from dcp_checkfreq.runtime.clock import Clock
from dcp_checkfreq.runtime.outcome import report

_log = logging.getLogger(__name__)

DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_SAVE_TAKES = 1.5  # times as long as the last one, at most: what is left must be enough for it


@dataclass(frozen=True, slots=True)
class FinalActions:
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

    @property
    def last_saved_step(self) -> int | None:
        """The last published step."""
        ...


class _Stepping(threading.local):
    """Those of this process that take steps, in the order of their first ones.

    By thread: who trains in threads of its own steps in no common order.
    """

    def __init__(self) -> None:
        self.all: list[Stopping] = []


class Stopping:
    """Listens for signals on behalf of one `Checkpointer`, and ends the process in its name.

    Args:
        gate: that the training thread passes.
        ranks: of this job.
        clock: for the deadline.
        signals: which say that the job will be ended.
        grace_s: how long the job may go on after one.
        key: the same on all ranks, and given once.
    """

    def __init__(
        self,
        gate: Gate,
        ranks: Ranks,
        clock: Clock,
        *,
        signals: Iterable[int],
        grace_s: float,
        key: str,
    ) -> None:
        self._gate, self._ranks, self._clock = gate, ranks, clock
        self._signals, self._grace_s, self._key = tuple(signals), grace_s, key
        self._watch: PreemptionWatch | None = None
        self._is_ordered = self._has_warned = False
        self._job: FinalActions | None = None  # once it has stopped
        self._code = 0
        self._among: list[Stopping] | None = None

    def _all(self) -> list[Stopping]:
        return list(self._among or [self])

    def deadline_s(self) -> float | None:
        """Return until when a last save must be done; None: nothing was heard here."""
        return None if self._watch is None else self._watch.deadline_s

    def watch(self, owner: Owner) -> None:
        """Watch for signals from now on, if that is not done yet."""
        if self._watch is not None:
            return
        watch = PreemptionWatch(
            self._gate,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            store=None if self._ranks.is_alone else default_store(),
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
            if self._is_ordered:
                watch.order("preempt()")

    def preempt(self) -> None:
        """On any thread: have all ranks stop, as a signal would."""
        self._is_ordered = True
        if self._watch is not None:
            self._watch.order("preempt()")

    def is_due(self, step: int) -> bool:
        """Tell whether to save now and stop; so do all ranks at the same step.

        Call it after every step. Of several in this process the one that stepped first leads: the
        others are due in their next step after it has stopped, so that what they save fits. All
        ranks make their calls in the same order.
        """
        if self._among is None:
            self._among = _stepping.all
            self._among.append(self)
        leader = self._among[0]
        if leader is self:
            return self._is_told(step)
        if self._is_told(step) and not leader._is_ordered:
            leader.preempt()  # on all ranks, at the same step
        return leader._job is not None

    def _is_told(self, step: int) -> bool:
        watch = self._watch
        return watch is not None and watch.stop_at is not None and step >= watch.stop_at

    def stop(self, step: int, job: FinalActions) -> None:
        """Save if there is time. End this process if all others in it have done that, too.

        All ranks call it after ``step``. One that comes again, because others have not come yet,
        is saved again.

        Raises:
            SystemExit: this was the last one, or there is no time to wait for others.
        """
        if self._watch is not None:
            self._watch.taken_up()
        waits_no_longer = False
        self._job = job
        try:
            job.settle()
            if job.saved() != step:
                if self._there_is_time(job.takes_s()):
                    job.save()
                else:
                    waits_no_longer = True
        except CheckFreqError as error:
            report(_log.error, "before stopping: %s", error)
            self._code = error.exit_code
        report(
            _log.warning,
            "stopping after step %d, as asked by a signal; the last published step is %s",
            step,
            job.saved(),
        )
        missing = sum(one._job is None for one in self._all())
        if missing and not waits_no_longer:
            report(
                _log.warning, "%d other Checkpointers in this process have to stop first", missing
            )
            return
        code = 0
        for one in self._all():
            code = code or one._code
            if one._job is not None:
                with contextlib.suppress(CheckFreqError):  # logged already
                    one._job.close()
        raise SystemExit(code)

    def compare_with_grace(self, took_s: float) -> None:
        """Warn, once, if a save that takes ``took_s`` does not fit into the time after a signal."""
        needs_s = _SAVE_TAKES * took_s
        if not self._signals or self._has_warned or needs_s <= self._grace_s:
            return
        self._has_warned = True
        _log.warning(
            "the last save took %.1f s, and grace_s=%g leaves no time for another one after a "
            "signal: set grace_s above %.0f, and let the launcher wait longer than that "
            "(torchrun: --shutdown-timeout)",
            took_s,
            self._grace_s,
            needs_s,
        )

    def why_no_time(self, last_took_s: float) -> str | None:
        """Return why a save that begins now would not end in time, after an error of the loop."""
        until_s = self.deadline_s()
        left_s = self._grace_s if until_s is None else until_s - self._clock.monotonic_s()
        needs_s = _SAVE_TAKES * last_took_s
        if left_s >= needs_s:
            return None
        return f"a save takes about {needs_s:.1f} s, {left_s:.1f} s of grace_s are left"

    def _there_is_time(self, last_took_s: float) -> bool:
        needs_s = _SAVE_TAKES * last_took_s
        deadlines_s = [one.deadline_s() for one in self._all()]
        until_s = min((one_s for one_s in deadlines_s if one_s is not None), default=0.0)
        left_s = until_s - self._clock.monotonic_s()
        enough = self._ranks.reduce_on_rank_0(left_s >= needs_s, all)
        if not enough:
            report(
                _log.warning,
                "%.1f s are left, a save takes about %.1f s: none is begun",
                left_s,
                needs_s,
            )
        return enough

    def close(self) -> None:
        """Give the signals back. May be called twice."""
        self._job = None
        if self._among is not None and self in self._among:
            self._among.remove(self)
        if self._watch is not None:
            self._watch.close()


_stepping = _Stepping()


def _in_child() -> None:
    _stepping.all = []  # those of the parent take no steps here


os.register_at_fork(after_in_child=_in_child)


def _said_of(owner: weakref.ref[Owner]) -> str:
    alive = owner()
    return "" if alive is None else f"The last published step is {alive.last_saved_step}"
