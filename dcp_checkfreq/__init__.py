"""Checkpoints for torch.distributed.checkpoint that lose less work and can be trusted.

Names are resolved when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_checkfreq.errors import (
        BadLocation as BadLocation,
    )
    from dcp_checkfreq.planner import CheckFreqLoadPlanner as CheckFreqLoadPlanner
    from dcp_checkfreq.planner import CheckFreqSavePlanner as CheckFreqSavePlanner
    from dcp_checkfreq.reader import CheckFreqReader as CheckFreqReader
    from dcp_checkfreq.writer import CheckFreqWriter as CheckFreqWriter

_HOMES = {
    "CheckFreqReader": "reader",
    "CheckFreqWriter": "writer",
    "CheckFreqLoadPlanner": "planner",
    "CheckFreqSavePlanner": "planner",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
