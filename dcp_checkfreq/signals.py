"""The signal handlers of this process: a signal is noted, and somebody else looks for it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

_log = logging.getLogger(__name__)

_HANDLER_S = 5.0  # within this time a training thread that is not stuck runs its handler
_DEFAULTS = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)


class Signals:
    """Takes over signals, and gives them back. Every method says from which thread it is called.

    A Python handler runs when the training thread comes back to the interpreter, which can take
    as long as a collective hangs. The interpreter writes to the wakeup pipe at once. Neither
    counts every signal: the pipe may be another library's, the handler may run once for two.
    """

    def __init__(self, signals: Iterable[int]) -> None:
        self._wanted = tuple(dict.fromkeys(signals))
        self.pass_on = False  # from now on a signal does what it did before
        self._old: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._handled = self._woken = 0
        self._last: int = 0
        self._restored = False

    @property
    def name(self) -> str:
        """Which signal came last."""
        return signal.Signals(self._last).name

    def install(self) -> None:
        """Take over the signals. In the main thread."""
        for signum in self._wanted:
            old = signal.getsignal(signum)
            if old is None:
                _log.warning(
                    "%s has a handler that is not Python's: left alone, so it is not noticed here",
                    signal.Signals(signum).name,
                )
                continue
            if old not in _DEFAULTS:
                _log.warning(
                    "%s has the handler %r: replaced until the end of the watch",
                    signal.Signals(signum).name,
                    old,
                )
            try:
                signal.signal(signum, self._on_signal)
            except (OSError, ValueError):
                self.restore()
                raise
            self._old[signum] = old
        if self._old:
            self._open_pipe()
        itself = weakref.ref(self)  # the hook below can never be taken away

        def in_child() -> None:
            # Forked DataLoader workers must die by SIGTERM, and not wake their parent by it.
            if (signals := itself()) is not None:
                signals.restore()

        os.register_at_fork(after_in_child=in_child)

    def look(self) -> int:
        """Return how many signals were noticed so far. In the watching thread."""
        if self._pipe is not None:
            try:
                came = [n for n in os.read(self._pipe[0], 4096) if n in self._old]
            except BlockingIOError:
                came = []
            if came:
                self._woken += len(came)
                self._last = came[-1]
        return max(self._handled, self._woken)

    def restore(self) -> None:
        """Give the signals back. In the main thread; may be called twice."""
        old, self._old = self._old, {}
        for signum, handler in old.items():
            if signal.getsignal(signum) == self._on_signal:  # else another library's by now
                signal.signal(signum, handler)
        if self._pipe is not None and not self._restored:
            present = signal.set_wakeup_fd(-1)
            if present != self._pipe[1] and present != -1:
                signal.set_wakeup_fd(present)
        self._restored = True

    def raise_again(self, closing: threading.Event) -> None:
        """Let the last signal do to this process what it did before `install`."""
        signum = self._last
        default = self._old.get(signum) == signal.SIG_DFL
        self.pass_on = True
        os.kill(os.getpid(), signum)  # only the training thread can restore: by the handler
        if not closing.wait(_HANDLER_S) and default and not self._restored:
            # It is stuck outside of the interpreter. This is the exit code of a shell whose
            # command died by the signal.
            os._exit(128 + signum)

    def close(self) -> None:
        """Close the pipe, unless a handler may still write to it."""
        if self._pipe is not None and self._restored:
            for end in self._pipe:
                os.close(end)
            self._pipe = None

    def _open_pipe(self) -> None:
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        present = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        if present != -1:
            signal.set_wakeup_fd(present)  # an event loop's: it needs it more

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.pass_on:
            self.restore()
            os.kill(os.getpid(), signum)
            return
        self._last = signum
        self._handled += 1
