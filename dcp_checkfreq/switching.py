"""Shortens how long the training thread waits for the GIL while a save runs in the background.

A thread that asks for the GIL gets it only after a switch interval, 5 ms by default, when another
runs Python code all the time. A training step lets go of the GIL often (torch does whenever a
tensor dies, or the host waits for the device), and then waits so long each time.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_S = 0.0005
_RESOLUTION_S = 1e-6

_lock = threading.Lock()
_holders = 0
_before_s = INTERVAL_S


@contextmanager
def quick_switching() -> Iterator[None]:
    """Let threads wait for each other 0.5 ms at most, in the whole process. Nests, as for threads.

    An interval that is shorter already stays, and so does one that is set in the meantime.
    """
    global _holders, _before_s
    with _lock:
        if not _holders:
            _before_s = sys.getswitchinterval()
            if _before_s > INTERVAL_S:
                _set(INTERVAL_S)
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            is_ours = abs(sys.getswitchinterval() - INTERVAL_S) < _RESOLUTION_S
            if not _holders and is_ours:
                _set(_before_s)


def _set(interval_s: float) -> None:
    # Python cuts off what is below a microsecond, and with it a whole one for some values.
    sys.setswitchinterval(interval_s + _RESOLUTION_S / 2)
