"""Checkpoints for torch.distributed.checkpoint that lose less work and can be trusted.

Names are resolved when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_checkfreq.checkpointer import Checkpointer as Checkpointer
    from dcp_checkfreq.errors import (
        BadLocation as BadLocation,
    )
    from dcp_checkfreq.errors import (
        BrokenMetadata as BrokenMetadata,
    )
    from dcp_checkfreq.errors import (
        BrokenShard as BrokenShard,
    )
    from dcp_checkfreq.errors import (
        CheckFreqError as CheckFreqError,
    )
    from dcp_checkfreq.errors import (
        CheckpointExists as CheckpointExists,
    )
    from dcp_checkfreq.errors import (
        DataStateError as DataStateError,
    )
    from dcp_checkfreq.errors import (
        DtypeDiffers as DtypeDiffers,
    )
    from dcp_checkfreq.errors import (
        ItemsMissing as ItemsMissing,
    )
    from dcp_checkfreq.errors import (
        LeftBehind as LeftBehind,
    )
    from dcp_checkfreq.errors import (
        LoadFailed as LoadFailed,
    )
    from dcp_checkfreq.errors import (
        NewerFormat as NewerFormat,
    )
    from dcp_checkfreq.errors import (
        NoValidCheckpoint as NoValidCheckpoint,
    )
    from dcp_checkfreq.errors import (
        PlanCacheStale as PlanCacheStale,
    )
    from dcp_checkfreq.errors import (
        PublishUnknown as PublishUnknown,
    )
    from dcp_checkfreq.errors import (
        RankFailed as RankFailed,
    )
    from dcp_checkfreq.errors import (
        RankLost as RankLost,
    )
    from dcp_checkfreq.errors import (
        RecoveryFailed as RecoveryFailed,
    )
    from dcp_checkfreq.errors import (
        ReplicasDiffer as ReplicasDiffer,
    )
    from dcp_checkfreq.errors import (
        RootDiffers as RootDiffers,
    )
    from dcp_checkfreq.errors import (
        SaveFailed as SaveFailed,
    )
    from dcp_checkfreq.errors import (
        SnapshotFailed as SnapshotFailed,
    )
    from dcp_checkfreq.errors import (
        StateMismatch as StateMismatch,
    )
    from dcp_checkfreq.errors import (
        StepNotFound as StepNotFound,
    )
    from dcp_checkfreq.errors import (
        StepsExist as StepsExist,
    )
    from dcp_checkfreq.errors import (
        TooManyFailures as TooManyFailures,
    )
    from dcp_checkfreq.errors import (
        UnsafePickle as UnsafePickle,
    )
    from dcp_checkfreq.errors import (
        UnsupportedOption as UnsupportedOption,
    )
    from dcp_checkfreq.errors import (
        UnsupportedState as UnsupportedState,
    )
    from dcp_checkfreq.errors import (
        WriteFailed as WriteFailed,
    )
    from dcp_checkfreq.latest import Found as Found
    from dcp_checkfreq.latest import find_latest_valid as find_latest_valid
    from dcp_checkfreq.loading import load_part as load_part
    from dcp_checkfreq.planner import CheckFreqLoadPlanner as CheckFreqLoadPlanner
    from dcp_checkfreq.planner import CheckFreqSavePlanner as CheckFreqSavePlanner
    from dcp_checkfreq.reader import CheckFreqReader as CheckFreqReader
    from dcp_checkfreq.restoring import Restored as Restored
    from dcp_checkfreq.save_record import SaveRecord as SaveRecord
    from dcp_checkfreq.state.per_rank import PerRank as PerRank
    from dcp_checkfreq.writer import CheckFreqWriter as CheckFreqWriter

_HOMES = {
    "Checkpointer": "checkpointer",
    "Restored": "restoring",
    "SaveRecord": "save_record",
    "PerRank": "state.per_rank",
    "CheckFreqWriter": "writer",
    "CheckFreqReader": "reader",
    "CheckFreqSavePlanner": "planner",
    "CheckFreqLoadPlanner": "planner",
    "find_latest_valid": "latest",
    "load_part": "loading",
    "Found": "latest",
} | dict.fromkeys(
    [
        "BadLocation",
        "BrokenMetadata",
        "BrokenShard",
        "CheckFreqError",
        "CheckpointExists",
        "DataStateError",
        "DtypeDiffers",
        "ItemsMissing",
        "LoadFailed",
        "NewerFormat",
        "NoValidCheckpoint",
        "PlanCacheStale",
        "PublishUnknown",
        "RecoveryFailed",
        "LeftBehind",
        "RankFailed",
        "RankLost",
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
