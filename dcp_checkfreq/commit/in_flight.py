"""Saves by `dcp.async_save`, as far as their writer hears of them."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from dcp_checkfreq.errors import SaveFailed
from dcp_checkfreq.runtime.process_end import watch
from dcp_checkfreq.storage.tier import SLOWEST_BYTES_PER_S

_POLL_S = 0.02
_BEGINS_WITHIN_S = 5.0  # DCP's thread takes up what was staged at once
GIVE_UP_AFTER_S = 1800.0  # without a sign of the storage; as the default of `timeout_s`

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
        self._moves = 0
        self.doing = ""  # what it asks the storage for now
        self.allowed_bytes = 0  # that one call may have to bring somewhere

    def moved(self, size_bytes: int) -> None:
        """Say that the storage has done something with a file of this size."""
        self._moves += 1
        self.allowed_bytes = max(self.allowed_bytes, size_bytes)

    def noted(self, pieces: Iterable[memoryview], size_bytes: int) -> Iterator[memoryview]:
        """Return the pieces of a file. That one is asked for says that the storage does something.

        See `Watchdog.noted`.
        """
        for piece in pieces:
            self.moved(size_bytes)
            yield piece
        self.moved(size_bytes)

    def taken_up(self, worker: threading.Thread) -> None:
        """Name the thread that carries it out."""
        self._worker = worker

    def end(self, problem: BaseException | None = None) -> None:
        """Say that this rank's part is done, or why it failed. The first word counts."""
        if not self._ended.is_set():
            self._problem = problem
            self._ended.set()

    @contextlib.contextmanager
    def asking(self, doing: str) -> Iterator[None]:
        """Say that in the body the storage is asked, and nobody else is waited for."""
        self.doing, self.allowed_bytes = doing, 0
        try:
            yield
        finally:
            self.doing = ""

    @property
    def is_under_way(self) -> bool:
        """Whether it may still come to a good end."""
        worker = self._worker
        return not self._ended.is_set() and (worker is None or worker.is_alive())

    def wait_at_exit(self) -> None:
        """Wait until it has ended, or its thread has, or it seems that none will come for it.

        Raises:
            SaveFailed: its storage does not come back.
        """
        left_s, still_s, seen = _BEGINS_WITHIN_S, 0.0, (0, "")
        while self.is_under_way and left_s > 0:
            self._ended.wait(_POLL_S)
            if self._worker is None:
                left_s -= _POLL_S
            now = (self._moves, self.doing)
            still_s = still_s + _POLL_S if now == seen and self.doing else 0.0
            seen = now
            if still_s >= GIVE_UP_AFTER_S + self.allowed_bytes / SLOWEST_BYTES_PER_S:
                at = f"it has been {self.doing}, without a sign for {still_s:.0f} s"
                raise SaveFailed(self._location, f"the storage does not come back: {at}")
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


def reporting(
    doing: str, *, ends: Callable[[Any], bool] = lambda writer: True
) -> Callable[[Callable[Concatenate[W, P], R]], Callable[Concatenate[W, P], R]]:
    """Report what a method does, and its errors; also its return, if it ends its rank's part."""

    def decorate(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
        @functools.wraps(method)
        def reported(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
            current = self.in_flight.current
            try:
                with contextlib.nullcontext() if current is None else current.asking(doing):
                    result = method(self, *args, **kwargs)
            except BaseException as error:
                if current is not None:
                    current.end(error)
                raise
            if current is not None and ends(self):
                current.end()
            return result

        return reported

    return decorate
