# The public names, each written once: `__init__.py` reads this file.

from .checkpointer.checkpointer import Checkpointer as Checkpointer
from .checkpointer.load_part import load_part as load_part
from .checkpointer.memory_forecast import MemoryForecast as MemoryForecast
from .checkpointer.restorer import Restored as Restored
from .convert.from_files import import_files as import_files
from .convert.to_safetensors import (
    Exported as Exported,
    export_safetensors as export_safetensors,
)
from .convert.to_torch_save import export_torch_save as export_torch_save
from .dcp.find_latest import (
    Found as Found,
    find_latest_valid as find_latest_valid,
)
from .dcp.load_planner import (
    CheckFreqLoadPlanner as CheckFreqLoadPlanner,
)
from .dcp.reader import CheckFreqReader as CheckFreqReader
from .dcp.save_planner import (
    CheckFreqSavePlanner as CheckFreqSavePlanner,
)
from .dcp.writer import CheckFreqWriter as CheckFreqWriter
from .errors import (
    BadLocation as BadLocation,
    BrokenMetadata as BrokenMetadata,
    BrokenShard as BrokenShard,
    CheckFreqError as CheckFreqError,
    CheckpointExists as CheckpointExists,
    DataStateError as DataStateError,
    DtypeDiffers as DtypeDiffers,
    ItemsMissing as ItemsMissing,
    LeftBehind as LeftBehind,
    LoadFailed as LoadFailed,
    NewerFormat as NewerFormat,
    NoValidCheckpoint as NoValidCheckpoint,
    PlanCacheStale as PlanCacheStale,
    PublishUnknown as PublishUnknown,
    RankFailed as RankFailed,
    RankLost as RankLost,
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
from .opened.lazy import (
    LazyTensor as LazyTensor,
    LazyValue as LazyValue,
)
from .opened.open_checkpoint import (
    OpenedCheckpoint as OpenedCheckpoint,
    open_checkpoint as open_checkpoint,
)
from .policy.save_timings import SaveRecord as SaveRecord
from .state.per_rank import PerRank as PerRank
