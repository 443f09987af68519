# The public names, each written once: `__init__.py` reads this file.

from .checkpointer.checkpointer import Checkpointer as Checkpointer
from .checkpointer.load_part import load_part as load_part
from .checkpointer.restorer import Restored as Restored
from .dcp.find_latest import (
    Found as Found,
)
from .dcp.find_latest import (
    find_latest_valid as find_latest_valid,
)
from .dcp.planner import (
    CheckFreqLoadPlanner as CheckFreqLoadPlanner,
)
from .dcp.planner import (
    CheckFreqSavePlanner as CheckFreqSavePlanner,
)
from .dcp.reader import CheckFreqReader as CheckFreqReader
from .dcp.writer import CheckFreqWriter as CheckFreqWriter
from .errors import (
    BadLocation as BadLocation,
)
from .errors import (
    BrokenMetadata as BrokenMetadata,
)
from .errors import (
    BrokenShard as BrokenShard,
)
from .errors import (
    CheckFreqError as CheckFreqError,
)
from .errors import (
    CheckpointExists as CheckpointExists,
)
from .errors import (
    DataStateError as DataStateError,
)
from .errors import (
    DtypeDiffers as DtypeDiffers,
)
from .errors import (
    ItemsMissing as ItemsMissing,
)
from .errors import (
    LeftBehind as LeftBehind,
)
from .errors import (
    LoadFailed as LoadFailed,
)
from .errors import (
    NewerFormat as NewerFormat,
)
from .errors import (
    NoValidCheckpoint as NoValidCheckpoint,
)
from .errors import (
    PlanCacheStale as PlanCacheStale,
)
from .errors import (
    PublishUnknown as PublishUnknown,
)
from .errors import (
    RankFailed as RankFailed,
)
from .errors import (
    RankLost as RankLost,
)
from .errors import (
    RecoveryFailed as RecoveryFailed,
)
from .errors import (
    ReplicasDiffer as ReplicasDiffer,
)
from .errors import (
    RootDiffers as RootDiffers,
)
from .errors import (
    SaveFailed as SaveFailed,
)
from .errors import (
    SnapshotFailed as SnapshotFailed,
)
from .errors import (
    StateMismatch as StateMismatch,
)
from .errors import (
    StepNotFound as StepNotFound,
)
from .errors import (
    StepsExist as StepsExist,
)
from .errors import (
    TooManyFailures as TooManyFailures,
)
from .errors import (
    UnsafePickle as UnsafePickle,
)
from .errors import (
    UnsupportedOption as UnsupportedOption,
)
from .errors import (
    UnsupportedState as UnsupportedState,
)
from .errors import (
    WriteFailed as WriteFailed,
)
from .policy.save_record import SaveRecord as SaveRecord
from .state.per_rank import PerRank as PerRank
