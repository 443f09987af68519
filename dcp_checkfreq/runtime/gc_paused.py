"""Holds back Python's cyclic garbage collector while very many small objects are made.

A plan of 10,000 items makes some 100,000 objects. They set off full collections that walk every
object of the process, 0.1 to 0.4 s each, and free nothing.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager

from dcp_checkfreq.runtime.process_setting import ProcessSetting


def collector_held() -> AbstractContextManager[None]:
    """Keep the collector off, in the whole process. Nests, also between threads."""
    return _collector.held()


def _switch_off() -> bool:
    was_enabled = gc.isenabled()
    gc.disable()
    return was_enabled


def _switch_on(was_enabled: bool) -> None:
    if was_enabled:
        gc.enable()


_collector = ProcessSetting(_switch_off, _switch_on)
