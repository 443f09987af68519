"""A setting of the whole process that several threads need changed at the same time."""

from __future__ import annotations

import os
import threading
import weakref
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
        mine = weakref.ref(self)

        def in_child() -> None:
            # Threads of the parent that needed it are not in the child; nor is their lock.
            if (setting := mine()) is not None:
                setting._lock = threading.Lock()
                if setting._holders:
                    setting._holders = 0
                    setting._put_back(setting._before)

        os.register_at_fork(after_in_child=in_child)

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
                self._holders = max(0, self._holders - 1)  # 0 already in a forked child
                if not self._holders:
                    self._put_back(self._before)
