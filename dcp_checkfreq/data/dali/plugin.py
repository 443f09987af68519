"""DALI where it is installed; a plain word where it is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Plugin:
    """What is used of DALI's plugin for torch."""

    version: str
    DALIGenericIterator: Any
    LastBatchPolicy: Any


def import_plugin(what: str) -> Plugin:
    """Return DALI's plugin for torch.

    Raises:
        ImportError: DALI is not installed.
    """
    try:
        import nvidia.dali
        from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy
    except ImportError as error:
        raise ImportError(f"{what} needs DALI: pip install 'dcp-checkfreq[dali]'") from error
    return Plugin(nvidia.dali.__version__, DALIGenericIterator, LastBatchPolicy)
