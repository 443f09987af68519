"""Checkpoints for torch.distributed.checkpoint that lose less work and can be trusted.

Names are resolved when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_checkfreq.app_state import PerRank as PerRank
    from dcp_checkfreq.checkpointer import Checkpointer as Checkpointer
    from dcp_checkfreq.checkpointer import Restored as Restored
    from dcp_checkfreq.errors import (
        BadLocation as BadLocation,
        BrokenMetadata as BrokenMetadata,
        BrokenShard as BrokenShard,
        CheckFreqError as CheckFreqError,
        CheckpointExists as CheckpointExists,
        DtypeDiffers as DtypeDiffers,
        ItemsMissing as ItemsMissing,
        LoadFailed as LoadFailed,
        NewerFormat as NewerFormat,
        NoValidCheckpoint as NoValidCheckpoint,
        PlanCacheStale as PlanCacheStale,
        PublishUnknown as PublishUnknown,
        RecoveryFailed as RecoveryFailed,
        ReplicasDiffer as ReplicasDiffer,
        RootDiffers as RootDiffers,
        SaveFailed as SaveFailed,
        SnapshotFailed as SnapshotFailed,
        StateMismatch as StateMismatch,
        StepNotFound as StepNotFound,
        StepsExist as StepsExist,
        TooManyFailures as TooManyFailures,
        UnsafePickle as UnsafePickle,
        UnsupportedOption as UnsupportedOption,
        UnsupportedState as UnsupportedState,
        WriteFailed as WriteFailed,
    )
    from dcp_checkfreq.latest import Found as Found
    from dcp_checkfreq.latest import find_latest_valid as find_latest_valid
    from dcp_checkfreq.planner import CheckFreqLoadPlanner as CheckFreqLoadPlanner
    from dcp_checkfreq.planner import CheckFreqSavePlanner as CheckFreqSavePlanner
    from dcp_checkfreq.reader import CheckFreqReader as CheckFreqReader
    from dcp_checkfreq.writer import CheckFreqWriter as CheckFreqWriter

_HOMES = {
    "Checkpointer": "checkpointer",
    "Restored": "checkpointer",
    "PerRank": "app_state",
    "CheckFreqWriter": "writer",
    "CheckFreqReader": "reader",
    "CheckFreqSavePlanner": "planner",
    "CheckFreqLoadPlanner": "planner",
    "find_latest_valid": "latest",
    "Found": "latest",
} | dict.fromkeys(
    [
        "BadLocation",
        "BrokenMetadata",
        "BrokenShard",
        "CheckFreqError",
        "CheckpointExists",
        "DtypeDiffers",
        "ItemsMissing",
        "LoadFailed",
        "NewerFormat",
        "NoValidCheckpoint",
        "PlanCacheStale",
        "PublishUnknown",
        "RecoveryFailed",
        "ReplicasDiffer",
        "RootDiffers",
        "SaveFailed",
        "SnapshotFailed",
        "StateMismatch",
        "StepNotFound",
        "StepsExist",
        "TooManyFailures",
        "UnsafePickle",
        "UnsupportedOption",
        "UnsupportedState",
        "WriteFailed",
    ],
    "errors",
)

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
