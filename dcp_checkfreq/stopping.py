"""Stopping a job that was told to end: one last save at a step that all ranks share, and out."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Iterable
from typing import NoReturn, Protocol

from dcp_checkfreq.agreement import Agreement
from dcp_checkfreq.clock import Clock
from dcp_checkfreq.errors import CheckFreqError
from dcp_checkfreq.format.torch_private import default_store
from dcp_checkfreq.gate import Gate
from dcp_checkfreq.preemption import PreemptionWatch

_log = logging.getLogger(__name__)

_SAVE_TAKES = 1.5  # times as long as the last one, at most: what is left must be enough for it


class Stoppable(Protocol):
    """What is stopped: a `Checkpointer`."""

    step: int
    last_saved_step: int | None

    def settle(self) -> None:
        """Wait for the save in flight, and act on its end."""
        ...

    def save(self, *, wait: bool) -> None:
        """Save the state as it is now."""
        ...

    def takes_s(self) -> float:
        """Return how long the last save took, from the copy to its publication."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


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

    def watch(self, owner: Stoppable) -> PreemptionWatch:
        """Return the watch for signals, started if this is the first call."""
        if self._watch is not None:
            return self._watch
        self._watch = PreemptionWatch(
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
        # Its threads must not keep alive what a script has dropped without closing it.
        weakref.finalize(owner, self._watch.close).atexit = False
        self._watch.start()
        return self._watch

    def stop_if_due(self, owner: Stoppable) -> None:
        """After a step: if it is the one to stop at, save once more and end this process.

        All ranks stop at the same step.

        Raises:
            SystemExit: it was.
        """
        watch = self.watch(owner)
        if watch.stop_at is not None and owner.step >= watch.stop_at:
            self._stop(owner, watch)

    def _stop(self, owner: Stoppable, watch: PreemptionWatch) -> NoReturn:
        watch.taken_up()
        code = 0
        try:
            owner.settle()
            if owner.last_saved_step != owner.step and self._there_is_time(owner, watch):
                owner.save(wait=True)
        except CheckFreqError as error:
            _log.error("before stopping: %s", error)
            code = error.exit_code
        _log.warning(
            "stopping after step %d, as asked by a signal; the last published step is %s",
            owner.step,
            owner.last_saved_step,
        )
        with contextlib.suppress(CheckFreqError):  # logged already
            owner.close()
        raise SystemExit(code)

    def _there_is_time(self, owner: Stoppable, watch: PreemptionWatch) -> bool:
        needs_s = _SAVE_TAKES * owner.takes_s()
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


def _said_of(owner: weakref.ref[Stoppable]) -> str:
    alive = owner()
    return "" if alive is None else f"The last published step is {alive.last_saved_step}"
