"""A setting of the whole process that several threads need changed at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

_Before = TypeVar("_Before")


class ProcessSetting(Generic[_Before]):
    """Counts who needs it: the first changes it, the last puts it back. Thread-safe.

    Args:
        change: sets it, and returns what ``put_back`` is given.
        put_back: undoes that.
    """

    def __init__(self, change: Callable[[], _Before], put_back: Callable[[_Before], None]) -> None:
        self._change, self._put_back = change, put_back
        self._lock = threading.Lock()
        self._holders = 0
        self._before: _Before

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep it changed. Nests, also between threads."""
        with self._lock:
            if not self._holders:
                self._before = self._change()
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self._put_back(self._before)
