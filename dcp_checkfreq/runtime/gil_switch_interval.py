"""Shortens how long the training thread waits for the GIL while a save runs in the background.

A thread that asks for the GIL gets it only after a switch interval, 5 ms by default, when another
runs Python code all the time. A training step lets go of the GIL often (torch does whenever a
tensor dies, or the host waits for the device), and then waits so long each time.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager

from dcp_checkfreq.runtime.process_setting import ProcessSetting

INTERVAL_S = 0.0005
_RESOLUTION_S = 1e-6


def quick_switching() -> AbstractContextManager[None]:
    """Let threads wait for each other 0.5 ms at most, in the whole process. Nests, as for threads.

    An interval that is shorter already stays, and so does one that is set in the meantime.
    """
    return _interval.held()


def _shorten() -> float:
    before_s = sys.getswitchinterval()
    if before_s > INTERVAL_S:
        _set(INTERVAL_S)
    return before_s


def _put_back(before_s: float) -> None:
    if abs(sys.getswitchinterval() - INTERVAL_S) < _RESOLUTION_S:  # nobody has set another one
        _set(before_s)


def _set(interval_s: float) -> None:
    # Python cuts off what is below a microsecond, and with it a whole one for some values.
    sys.setswitchinterval(interval_s + _RESOLUTION_S / 2)


_interval = ProcessSetting(_shorten, _put_back)
