"""A signal that says this job will be ended: all ranks agree on the step at which they stop.

What each part does, and why it is in a thread of its own:

- The handler runs in the training thread, between any two instructions. It sets attributes.
- The watching thread holds the gate and keeps the time. It never waits for the store.
- The asking thread talks to the other ranks. A call of the store can hang, as when the process
  that serves it is stopped; then only this thread hangs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from dcp_checkfreq.ranks.signal_handlers import Signals
from dcp_checkfreq.ranks.step_gate import Gate
from dcp_checkfreq.runtime.clock import Clock

_log = logging.getLogger(__name__)

_AGREE_POLL_S = 0.05  # while the gate is held
_JOIN_S = 2.0


class Store(Protocol):
    """What is used of a process group's store. None of it waits for another rank."""

    def set(self, key: str, value: str, /) -> object:
        """Write a key."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all keys are there."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is there."""
        ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write a key that is not there, if ``expected`` is empty; return what is there then."""
        ...


class PreemptionWatch:
    """Turns a signal on any rank into one step at which all ranks stop.

    `stop_at` is one more than the last step that has passed the gate on any rank, so that every
    rank still has it before it. The training thread takes no part in the agreement, and there is
    no collective. With ``store=None`` the process is alone. Used once: `start`, then `close`.

    Args:
        gate: which the training thread passes first thing in every step.
        rank: of this process.
        world_size: processes in the job.
        store: shared by all ranks, used by nobody else at the same time (`default_store`).
        key: before every key in the store; the same on all ranks, another one for every watch.
        signals: which to handle.
        grace_s: from the signal until this process gives up on a last save.
        clock: for the deadline and the timeout.
        describe: says what is saved already; for the log if there is no last save.
        agree_timeout_s: a rank that has not answered by then makes an agreement impossible, and
            the gate is released. Default: 10 s, or a third of ``grace_s`` if that is less. The
            gate is held for ``grace_s`` at most, if the store hangs after this rank's answer.
        poll_s: how often signals and the store are looked at.

    Raises:
        ValueError: several ranks and no store; a duration is not positive.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        rank: int = 0,
        world_size: int = 1,
        store: Store | None = None,
        key: str = "checkfreq/preemption",
        signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1),
        grace_s: float,
        clock: Clock,
        describe: Callable[[], str] = lambda: "",
        agree_timeout_s: float | None = None,
        poll_s: float = 0.2,
    ) -> None:
        if world_size > 1 and store is None:
            raise ValueError(f"{world_size} ranks cannot agree without a store")
        if agree_timeout_s is None:
            agree_timeout_s = min(10.0, grace_s / 3)
        if not min(grace_s, agree_timeout_s, poll_s) > 0:
            raise ValueError("grace_s, agree_timeout_s and poll_s must be positive")
        self.stop_at: int | None = None  # set while the gate is held; read without a lock
        self._gate, self._rank, self._clock = gate, rank, clock
        self._grace_s, self._poll_s = grace_s, poll_s
        self._describe = describe
        self._deadline_s: float | None = None
        self._taken_up = False
        self._closing = threading.Event()
        self._signals = Signals(signals)
        self._others: _Others | None = None
        if store is not None and world_size > 1:
            self._others = _Others(
                store, key, rank, world_size, clock, agree_timeout_s, grace_s, poll_s, self._closing
            )
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._order: str | None = None

    @property
    def deadline_s(self) -> float | None:
        """Until when a last save must be done, on the monotonic clock; None before a signal.

        ``grace_s`` after the signal was noticed, or after this rank heard of another's.
        """
        return self._deadline_s

    def start(self) -> None:
        """Install the handlers and watch. In the main thread, or without handlers of its own.

        Raises:
            RuntimeError: no thread can be had. It is closed.
        """
        if self._thread is not None or self._closing.is_set():
            return
        if threading.current_thread() is threading.main_thread():
            self._signals.install()
        else:
            _log.warning(
                "signals cannot be handled outside of the main thread: this process will stop "
                "at the signal of another rank only, or when preempt() is called"
            )
        thread = threading.Thread(target=self._watch, name="checkfreq-preempt", daemon=True)
        try:
            thread.start()
            self._thread = thread
            if self._others is not None:
                self._others.start()
        except RuntimeError:  # no thread can be had
            self.close()
            raise

    def order(self, cause: str) -> None:
        """On any thread: have all ranks stop as if a signal had come.

        Unlike after a signal nothing ends the process if no step takes it up.
        """
        self._order = cause

    def taken_up(self) -> None:
        """On the training thread: `stop_at` was seen, the deadline is the caller's from now on."""
        self._taken_up = True

    def close(self) -> None:
        """Restore the handlers and end the threads."""
        self._closing.set()
        self._signals.pass_on = True  # if the handlers must stay: they do what the old ones did
        self._signals.restore()
        if self._thread is None or self._pid != os.getpid():
            return
        if self._thread is not threading.current_thread():  # which may have collected the owner
            self._thread.join(_JOIN_S)
        if self._others is not None:
            self._others.join()

    def _watch(self) -> None:
        try:
            cause = self._wait_for_cause()
            if cause is None:
                return
            counted = min(1, self._signals.look())  # more of them are reported below
            self._deadline_s = self._clock.monotonic_s() + self._grace_s
            _log.warning("%s: this job will be ended", cause)
            passed = self._gate.hold()
            try:
                self._ranks(passed, cause)
            finally:
                self._gate.release()
            self._wait_for_deadline(counted)
        finally:
            if not self._closing.is_set():
                self._signals.pass_on = True  # nobody looks any more

    def _wait_for_cause(self) -> str | None:
        """Return whose signal it is, or None if the watch was closed."""
        while not self._closing.wait(self._poll_s):
            if self._signals.look():
                return f"{self._signals.name} on rank {self._rank}"
            if self._order is not None:
                return f"{self._order} on rank {self._rank}"
            if self._others is not None and self._others.heard is not None:
                return self._others.heard
        return None

    def _ranks(self, passed: int, cause: str) -> None:
        if self._others is None:
            self.stop_at = passed + 1
        else:
            text = self._others.agree(passed, cause)
            if text.isdecimal():
                self.stop_at = int(text)
            elif not self._closing.is_set():
                _log.error(
                    "the ranks cannot agree on a step to stop at, there will be no last save: "
                    "%s. %s",
                    text,
                    self._describe(),
                )
        if self.stop_at is not None:
            _log.warning("stopping at step %d; the last one here was %d", self.stop_at, passed)

    def _wait_for_deadline(self, counted: int) -> None:
        """Log further signals; end the process if nobody stops it although it was asked to."""
        assert self._deadline_s is not None
        while not self._closing.wait(self._poll_s):
            if self._signals.look() > counted:
                counted = self._signals.look()
                _log.warning("%s: already stopping, this changes nothing", self._signals.name)
            if not counted or self._taken_up or self._clock.monotonic_s() < self._deadline_s:
                continue  # a rank that only heard of it is left to the launcher
            _log.error(
                "no step took up the order to stop within %g s: this process ends as it would "
                "have without a watch. %s",
                self._grace_s,
                self._describe(),
            )
            self._signals.raise_again(self._closing)
            return


class _Others:
    """What the other ranks say, through the store.

    Every rank writes which step passed last, rank 0 writes the decision. A rank that waits too long
    writes that there is none. The first decision counts: all ranks read the same one.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        rank: int,
        world_size: int,
        clock: Clock,
        timeout_s: float,
        grace_s: float,
        poll_s: float,
        closing: threading.Event,
    ) -> None:
        self.heard: str | None = None  # the signal of another rank
        self._store, self._rank = store, rank
        self._announced, self._decision = f"{key}/announced", f"{key}/decision"
        self._passed = [f"{key}/passed/{rank}" for rank in range(world_size)]
        self._clock, self._timeout_s, self._grace_s = clock, timeout_s, grace_s
        self._poll_s, self._closing = poll_s, closing
        self._orders: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._answer: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._talk, name="checkfreq-preempt-ask", daemon=True
        )

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def agree(self, passed: int, cause: str) -> str:
        """Return the step to stop at, in digits, or why there is none."""
        self._orders.put((passed, cause))
        with contextlib.suppress(concurrent.futures.TimeoutError):
            return self._answer.result(1.5 * self._timeout_s)
        # If this rank's step was written, the others may stop by it, so that it must not pass
        # another one before it knows.
        if not self._answer.cancel():
            with contextlib.suppress(concurrent.futures.TimeoutError):
                return self._answer.result(max(0.0, self._grace_s - 1.5 * self._timeout_s))
        return "the store does not answer"

    def join(self) -> None:
        """End the thread, unless it hangs in the store. After ``closing`` was set."""
        self._orders.put(None)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _talk(self) -> None:
        try:
            order = self._listen()
            if not self._answer.set_running_or_notify_cancel():
                return  # nobody waits any more, nothing was written
            text = self._decide(*order) if order else "closed"
        except RuntimeError as error:  # torch's DistError and c10::Error
            text = f"the store failed: {error}"
            if not self._closing.is_set():
                _log.warning("the other ranks are not heard any more: %s", error)
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # nobody waits any more
            self._answer.set_result(text)

    def _listen(self) -> tuple[int, str] | None:
        while True:
            if self.heard is None and self._store.check([self._announced]):
                self.heard = self._store.get(self._announced).decode()
            try:
                return self._orders.get(timeout=self._poll_s)
            except queue.Empty:
                continue

    def _decide(self, passed: int, cause: str) -> str:
        self._store.set(self._passed[self._rank], str(passed))
        if self.heard is None:
            self._store.set(self._announced, cause)
        until_s = self._clock.monotonic_s() + self._timeout_s
        while not self._closing.wait(min(self._poll_s, _AGREE_POLL_S)):
            if self._store.check([self._decision]):
                return self._store.get(self._decision).decode()
            text = ""
            if self._rank == 0 and self._store.check(self._passed):
                text = str(1 + max(int(self._store.get(key)) for key in self._passed))
            elif self._clock.monotonic_s() >= until_s:
                text = self._who_is_missing()
            if text:
                return self._store.compare_set(self._decision, "", text).decode()
        return "closed"

    def _who_is_missing(self) -> str:
        missing = [rank for rank, key in enumerate(self._passed) if not self._store.check([key])]
        if missing:
            return f"no answer from ranks {missing} within {self._timeout_s:g} s"
        return f"no decision by rank 0 within {self._timeout_s:g} s"
