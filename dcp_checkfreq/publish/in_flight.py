"""Saves by `dcp.async_save`, as far as their writer hears of them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from dcp_checkfreq.errors import SaveFailed
from dcp_checkfreq.leaving import watch

_POLL_S = 0.02
_BEGINS_WITHIN_S = 5.0  # DCP's thread takes up what was staged at once

P = ParamSpec("P")
R = TypeVar("R")


class AsyncSave:
    """One, from the snapshot to the end of this rank's part. Thread-safe.

    DCP tells a writer neither that a save has failed before its writing, nor that it did on another
    rank, nor that another process carries it out: then nothing is known of its end here.

    Args:
        location: of the checkpoint.
    """

    def __init__(self, location: str) -> None:
        self._location = location
        self._worker: threading.Thread | None = None
        self._ended = threading.Event()
        self._problem: BaseException | None = None

    def taken_up(self, worker: threading.Thread) -> None:
        """Name the thread that carries it out."""
        self._worker = worker

    def end(self, problem: BaseException | None = None) -> None:
        """Say that this rank's part is done, or why it failed. The first word counts."""
        if not self._ended.is_set():
            self._problem = problem
            self._ended.set()

    @property
    def is_under_way(self) -> bool:
        """Whether it may still come to a good end."""
        worker = self._worker
        return not self._ended.is_set() and (worker is None or worker.is_alive())

    def wait_at_exit(self) -> None:
        """Wait until it has ended, or its thread has, or it seems that none will come for it."""
        left_s = _BEGINS_WITHIN_S
        while self.is_under_way and left_s > 0:
            self._ended.wait(_POLL_S)
            if self._worker is None:
                left_s -= _POLL_S
        if self._worker is not None:
            self._worker.join(_BEGINS_WITHIN_S)  # the other ranks hear of it in this thread

    def problem(self) -> BaseException | None:
        """Return why it failed; None if it has not, or nothing is known."""
        if self._ended.is_set() or self._worker is None:
            return self._problem
        return SaveFailed(self._location, "the save ended before this rank had written its part")

    def staged_by(self, staged: Future[R], release: Callable[[], None]) -> Future[R]:
        """Take note if the snapshot fails, and ``release`` it: this ends the save.

        Returns:
            ``staged``.
        """

        def look(done: Future[R]) -> None:
            if (error := done.exception()) is not None:
                self.end(error)
                release()

        staged.add_done_callback(look)
        return staged


class InFlight:
    """The saves of one writer: the one that waits for its turn, and the one that has it."""

    def __init__(self) -> None:
        self._waiting: AsyncSave | None = None
        self.current: AsyncSave | None = None

    def __reduce__(self) -> tuple[type[InFlight], tuple[()]]:
        return InFlight, ()  # threads do not go to another process

    def next(self, location: str) -> AsyncSave:
        """Say that a state is staged for the next save."""
        self._waiting = AsyncSave(location)
        watch(self._waiting)
        return self._waiting

    def taken_up(self, worker: threading.Thread) -> None:
        """Say that this thread saves what was staged; if nothing was, the save is no async one."""
        self.current, self._waiting = self._waiting, None
        if self.current is not None:
            self.current.taken_up(worker)


class _Writer(Protocol):
    in_flight: InFlight


W = TypeVar("W", bound=_Writer)


def told(
    *, ends: Callable[[Any], bool] = lambda writer: True
) -> Callable[[Callable[Concatenate[W, P], R]], Callable[Concatenate[W, P], R]]:
    """Tell of errors of a method, and if it ends the part of its rank, of its return."""

    def decorate(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
        @functools.wraps(method)
        def telling(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
            current = self.in_flight.current
            try:
                result = method(self, *args, **kwargs)
            except BaseException as error:
                if current is not None:
                    current.end(error)
                raise
            if current is not None and ends(self):
                current.end()
            return result

        return telling

    return decorate
