"""Work that does not return is logged: once a minute, with rank, phase and place.

A save or restore says what it begins and when it is done (`Watchdog.doing`). A thread
looks now and then whether something has been going on for long. Nothing is ended by it; but it
knows whether calls to the storage come back, and so a thread that waits for them can give up.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from dcp_checkfreq.runtime.clock import Clock
from dcp_checkfreq.storage.tier import SLOWEST_BYTES_PER_S

_log = logging.getLogger(__name__)

WARN_AFTER_S = 60.0
_POLL_S = 1.0
_JOIN_S = 1.0


@dataclass(slots=True)
class _Work:
    phase: str
    where: str
    since_s: float
    thread: int
    in_storage: bool = False  # calls to the storage, and nothing else that takes long
    told: int = 0  # times

    def text(self, now_s: float) -> str:
        at = f" {self.where}" if self.where else ""
        return f"has been {self.phase}{at} for {now_s - self.since_s:.0f} s"


class Watchdog:
    """Knows what this rank is doing since when.

    Args:
        rank: of this process.
        clock: by which work takes long.
        note: called with what this rank has been at for long, for the other ranks to read; with
            an empty text when that is over.
        others: returns what other ranks have noted.
        after_s: so long is long; logged again after as long.

    Attributes:
        limit_s: a storage from which nothing comes back for so long is given up; see `stuck`.
    """

    limit_s: float = math.inf

    def __init__(
        self,
        rank: int,
        clock: Clock,
        *,
        note: Callable[[str], None] | None = None,
        others: Callable[[], Mapping[int, str]] | None = None,
        after_s: float = WARN_AFTER_S,
    ) -> None:
        self.rank, self._clock = rank, clock
        self._note, self._others = note, others
        self._after_s = after_s
        self._numbers = itertools.count()
        self._at_work: dict[int, _Work] = {}  # in the order it began; changed without a lock
        self._is_noted = False
        self._moves = self._moves_seen = 0  # the first by any thread: that it changes is enough
        self._still_s = 0.0  # nothing has moved
        self._extra_s = 0.0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def doing(self, phase: str, where: str = "", *, in_storage: bool = False) -> Iterator[None]:
        """Say that this thread is at something, as in "has been writing /runs/step_3".

        Args:
            phase: what it does.
            where: and where.
            in_storage: it asks the storage for something, and calls `moved` if that may take long.
        """
        number = next(self._numbers)
        work = _Work(phase, where, self._clock.monotonic_s(), threading.get_ident(), in_storage)
        if in_storage:
            self._extra_s = 0.0
            self.moved()
        self._at_work[number] = work
        try:
            yield
        finally:
            del self._at_work[number]
            if in_storage:
                self._extra_s = 0.0
                self.moved()

    def moved(self) -> None:
        """Say that the storage has done something. On any thread, as often as you like."""
        self._moves += 1

    def noted(self, pieces: Iterable[memoryview], size_bytes: int) -> Iterator[memoryview]:
        """Return the pieces of a file. That one is asked for says that the storage does something.

        Its last call may have all of the ``size_bytes`` to bring somewhere.
        """
        self._extra_s = max(self._extra_s, size_bytes / SLOWEST_BYTES_PER_S)
        for piece in pieces:
            self.moved()
            yield piece
        self.moved()

    def stuck(self) -> str | None:
        """Return what this rank has been at without an answer for `limit_s`, or None."""
        # What has moved since the last look was not still: as when work begins after a long pause.
        if self._moves != self._moves_seen or self._still_s < self.limit_s + self._extra_s:
            return None
        late = [work for work in self._innermost() if work.in_storage]
        now_s, still_s = self._clock.monotonic_s(), self._still_s
        texts = [f"{work.text(now_s)}, without a sign for {still_s:.0f} s" for work in late]
        return "; ".join(texts) or None

    def _innermost(self) -> Iterable[_Work]:
        return {work.thread: work for work in list(self._at_work.values())}.values()

    def connect(self, note: Callable[[str], None], others: Callable[[], Mapping[int, str]]) -> None:
        """Name the way to the other ranks, once there is one; see the arguments."""
        self._note, self._others = note, others

    def start(self) -> None:
        """Look now and then, in a thread, until `close`."""
        self._thread = threading.Thread(target=self._watch, name="checkfreq-watch", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            _log.warning("work that does not return will not be logged: %s", error)

    def close(self) -> None:
        """End the thread. May be called twice, and from any thread."""
        self._closing.set()
        thread = self._thread
        # A process aborts if its end finds a thread in a call of torch's, such as of the store.
        if thread is not None and thread is not threading.current_thread():
            with contextlib.suppress(RuntimeError):  # it was not started, or not by this process
                thread.join(_JOIN_S)

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_S):
            self.look()

    def look(self) -> None:
        """Tell what has been going on for long. Called every second."""
        # Counted, and not looked up: a process that was stopped for a while has seen nothing.
        is_still, self._moves_seen = self._moves == self._moves_seen, self._moves
        self._still_s = self._still_s + _POLL_S if is_still else 0.0
        now_s = self._clock.monotonic_s()
        late = [w for w in self._innermost() if now_s - w.since_s >= self._after_s]
        is_news = False
        for work in late:
            times = int((now_s - work.since_s) // self._after_s)
            if times > work.told:
                work.told, is_news = times, True
                _log.warning("rank %d %s%s", self.rank, work.text(now_s), self._of_others())
        if self._note is not None and (is_news or (self._is_noted and not late)):
            self._note("; ".join(work.text(now_s) for work in late))
            self._is_noted = bool(late)

    def _of_others(self) -> str:
        others = {} if self._others is None else self._others()
        return "".join(f"; rank {rank} {text}" for rank, text in sorted(others.items()))
