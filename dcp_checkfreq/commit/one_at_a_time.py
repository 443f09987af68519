"""One save at a time through one writer, also when the next one is started before its end."""

from __future__ import annotations

import threading

_POLL_S = 0.2  # how often a waiting thread looks whether the holder's thread has died


class Turn:
    """Held by the thread that carries out a save. Thread-safe.

    DCP tells a writer when a save begins, but not that it failed on another rank: a holder whose
    thread has ended, or that comes again, is done.
    """

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        self._holder: threading.Thread | None = None

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        return Turn, ()  # threads do not go to another process

    def wait(self) -> None:
        """Wait until no other thread holds the turn."""
        while not self._free.wait(_POLL_S):
            holder = self._holder
            if holder is None or holder is threading.current_thread() or not holder.is_alive():
                return

    def take(self) -> threading.Thread:
        """Wait, and hold the turn in this thread, which is returned."""
        if self._holder is not threading.current_thread():
            self.wait()
        self._holder = threading.current_thread()
        self._free.clear()
        return self._holder

    def give_back(self) -> None:
        """Let the next save begin."""
        self._holder = None
        self._free.set()
