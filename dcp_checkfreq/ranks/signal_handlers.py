"""The signal handlers of this process: a signal is noted, and somebody else looks for it.

There is one registry per process: it keeps the handler that was there first, and gives it back when
the last one who listened is gone, in whatever order they go.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

_log = logging.getLogger(__name__)

_HANDLER_S = 5.0  # within this time a training thread that is not stuck runs its handler
_DEFAULTS = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)


class Signals:
    """Listens for signals. Every method says from which thread it is called.

    A Python handler runs when the training thread comes back to the interpreter, which can take
    as long as a collective hangs. The interpreter writes to the wakeup pipe at once. Neither
    counts every signal: the pipe may be another library's, the handler may run once for two.
    """

    def __init__(self, signals: Iterable[int]) -> None:
        self._wanted = tuple(dict.fromkeys(signals))
        self.pass_on = False  # from now on a signal does what it did before
        self.handled = self.woken = 0
        self.last: int = 0

    @property
    def name(self) -> str:
        """Which signal came last."""
        return signal.Signals(self.last).name

    def install(self) -> None:
        """Take over the signals. In the main thread."""
        _registry.add(self, self._wanted)

    def look(self) -> int:
        """Return how many signals were noticed so far. In the watching thread."""
        _registry.look()
        return max(self.handled, self.woken)

    def restore(self) -> None:
        """Listen no longer. May be called twice.

        In the main thread signals that nobody listens for any more are given back at once; else the
        next one that comes does that.
        """
        _registry.remove(self)

    def raise_again(self, closing: threading.Event) -> None:
        """Let the last signal do to this process what it did before `install`."""
        signum = self.last
        default = _registry.give_up(signum) == signal.SIG_DFL
        self.pass_on = True
        os.kill(os.getpid(), signum)  # only the training thread can restore: by the handler
        if not closing.wait(_HANDLER_S) and default and _registry.has(signum):
            # It is stuck outside of the interpreter. This is the exit code of a shell whose
            # command died by the signal.
            os._exit(128 + signum)


class _Registry:
    """What is installed in this process, and who listens.

    Without locks: handlers run between any two instructions of the main thread, and objects are
    collected there. What threads share is replaced as a whole.
    """

    def __init__(self) -> None:
        self._old: dict[int, Any] = {}  # what was there first
        self._listeners: dict[int, tuple[Signals, ...]] = {}
        self._pipe: tuple[int, int] | None = None
        self._pipe_is = (0, 0)  # device and inode
        self._given_up: frozenset[int] = frozenset()

    def has(self, signum: int) -> bool:
        """Tell whether the handler is ours."""
        return signum in self._old

    def add(self, listener: Signals, wanted: Iterable[int]) -> None:
        """Install the handlers that are not installed yet. In the main thread."""
        taken = []
        for signum in wanted:
            old = signal.getsignal(signum)
            if old is None:
                _log.warning(
                    "%s has a handler that is not Python's: left alone, so it is not noticed here",
                    signal.Signals(signum).name,
                )
                continue
            if old != _on_signal:
                if old not in _DEFAULTS:
                    _log.warning(
                        "%s has the handler %r: replaced until the end of the watch",
                        signal.Signals(signum).name,
                        old,
                    )
                try:
                    signal.signal(signum, _on_signal)
                except (OSError, ValueError):
                    self.remove(listener)
                    raise
                self._old[signum] = old
                self._given_up -= {signum}
            self._listeners[signum] = (*self._listeners.get(signum, ()), listener)
            taken.append(signum)
        if taken and self._pipe is None:
            self._open_pipe()

    def remove(self, listener: Signals) -> None:
        """Give back what nobody listens for any more, if this is the main thread."""
        for signum, listeners in list(self._listeners.items()):
            rest = tuple(one for one in listeners if one is not listener)
            if len(rest) < len(listeners):
                self._listeners[signum] = rest
            if not rest and threading.current_thread() is threading.main_thread():
                self.give_back(signum)

    def give_back(self, signum: int) -> None:
        """Put back the handler that was there first. In the main thread."""
        self._listeners.pop(signum, None)
        if signum in self._old:
            old = self._old.pop(signum)
            if signal.getsignal(signum) == _on_signal:  # else another library's by now
                signal.signal(signum, old)
        if not self._old and self._pipe is not None:
            pipe, self._pipe = self._pipe, None
            present = signal.set_wakeup_fd(-1)
            if present not in (pipe[1], -1):
                signal.set_wakeup_fd(present)
            for end in pipe:
                if self._is_ours(end):
                    os.close(end)

    def give_up(self, signum: int) -> Any:
        """Let the next such signal do what it did before, listeners or not; return its handler."""
        self._given_up |= {signum}
        return self._old.get(signum)

    def look(self) -> None:
        """Read the pipe, and tell who listens. On any thread."""
        pipe = self._pipe
        if pipe is None or not self._is_ours(pipe[0]):
            return
        try:
            came = os.read(pipe[0], 4096)
        except OSError:  # nothing is there, or it was closed just now
            return
        for signum in came:
            for listener in self._listeners.get(signum, ()):
                listener.woken += 1
                listener.last = signum

    def came(self, signum: int) -> None:
        """In the main thread, between any two instructions: take note, or pass it on."""
        active = [one for one in self._listeners.get(signum, ()) if not one.pass_on]
        if signum in self._given_up or not active:
            self.give_back(signum)
            os.kill(os.getpid(), signum)
            return
        for listener in active:
            listener.last = signum
            listener.handled += 1

    def in_child(self) -> None:
        """In a forked child: have the handlers of before, and let the parent's pipe be."""
        # Forked DataLoader workers must die by SIGTERM, and not wake their parent by it.
        for signum in list(self._old):
            self.give_back(signum)

    def _is_ours(self, fd: int) -> bool:
        """Tell whether a descriptor is still the pipe: others may have closed it and taken it."""
        try:
            info = os.fstat(fd)
        except OSError:
            return False
        return (info.st_dev, info.st_ino) == self._pipe_is

    def _open_pipe(self) -> None:
        pipe = os.pipe()
        info = os.fstat(pipe[0])  # that of both ends
        self._pipe_is = info.st_dev, info.st_ino
        for end in pipe:
            os.set_blocking(end, False)
        present = signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
        if present != -1:
            signal.set_wakeup_fd(present)  # an event loop's: it needs it more
        self._pipe = pipe


def _on_signal(signum: int, frame: FrameType | None) -> None:
    _registry.came(signum)


# Process-wide, as handlers are.
_registry = _Registry()
os.register_at_fork(after_in_child=_registry.in_child)
