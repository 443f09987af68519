"""The only place that touches names which torch does not promise to keep.

| name | why there is no way round it |
|---|---|
| `filesystem._StorageInfo` | stock readers look an item up by it: it is what `.metadata` holds |
| `filesystem._StoragePrefix` | stock plans carry it, and old checkpoints may hold it |
| `metadata._MEM_FORMAT_ENCODING` | part of every pickled `TensorProperties` |
| `serialization._get_layout` | how torch pickles `torch.strided` |
| `distributed_c10d._get_default_store` | there is no public way to the store of all ranks |
| `DataLoader._iterator` | persistent workers can't be ended in any other way than with the loader |
| `_MultiProcessingDataLoaderIter._index_queues` | workers that hear nothing from it do not end |
| `state_dict_saver._save_state_dict`, `state_dict_loader._load_state_dict` | `save` and \
`load` warn in every job of one process, which is an error under `python -W error`; and no warning \
can be silenced for one thread only |
| `_async_thread_executor._ThreadBasedAsyncCheckpointExecutor`, \
`_async_process_executor._ProcessBasedAsyncCheckpointExecutor` | nothing else hears of a save that \
`async_save` starts, however a script came by that function |
| `_fsspec_filesystem` | before torch 2.15 stock's classes for URLs have no other home |
| `Module._load_state_dict_*_hooks`, and those of `Optimizer` | whether user code runs in a load |
| `Tensor._version` | the only sign that a tensor was changed in place while it was being copied |

`tests/format/test_torch_private.py` notices when one of them goes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._async_process_executor import (
    _ProcessBasedAsyncCheckpointExecutor as ProcessExecutor,
)
from torch.distributed.checkpoint._async_thread_executor import (
    _ThreadBasedAsyncCheckpointExecutor as ThreadExecutor,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.filesystem import _StoragePrefix as StoragePrefix
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat
from torch.distributed.distributed_c10d import _get_default_store as get_default_store
from torch.serialization import _get_layout as get_layout

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from torch._C._distributed_c10d import ProcessGroup, Store
    from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
    from torch.utils.data import DataLoader

__all__ = [
    "MemoryFormat",
    "ProcessExecutor",
    "StorageInfo",
    "StoragePrefix",
    "ThreadExecutor",
    "dcp_load",
    "dcp_save",
    "default_store",
    "end_workers",
    "fsspec_file_system",
    "fsspec_storage",
    "get_default_store",
    "get_layout",
    "is_initialised",
    "keep_queues",
    "load_hooks_of",
    "versions_of",
]


def default_store() -> Store:
    """Return the store of the default process group, with a connection of its own.

    The group's own connection has one lock: a training thread that waits in it, as for the
    ranks' first meeting in a new group, would keep another thread out for as long.

    Raises:
        ValueError: there is no process group.
    """
    own: Store = get_default_store().clone()  # type: ignore[attr-defined]  # not in the stubs
    return own


def end_workers(loader: DataLoader[Any]) -> None:
    """Let a loader with persistent workers begin its next epoch with new ones."""
    loader._iterator = None


def keep_queues(batches: object) -> None:
    """Let the workers of an iterator over a `DataLoader` end as soon as it is gone.

    The collector closes the queues of an iterator in a cycle before the iterator asks its workers
    through them to end. Then it waits 5 s for each worker, in whatever thread the collector runs,
    and kills it. An error of a worker is such a cycle, and so is a trainer whose parts know it.
    What is referred to from here is no garbage, so it is not closed yet.

    Args:
        batches: the iterator. One without workers has no queues.
    """
    queues = getattr(batches, "_index_queues", None)
    if queues is not None:
        _queues_of[batches] = queues


_queues_of: WeakKeyDictionary[object, list[Any]] = WeakKeyDictionary()


def fsspec_storage() -> ModuleType:
    """Return the module of stock's `FsspecWriter` and `FsspecReader`."""
    home = "torch.distributed.checkpoint"
    try:
        return importlib.import_module(f"{home}.fsspec_filesystem")
    except ModuleNotFoundError:
        return importlib.import_module(f"{home}._fsspec_filesystem")  # in 2.15 it warns


def fsspec_file_system() -> type:
    """Return the class of their attribute ``fs``, which has the file system of fsspec as ``fs``."""
    home = fsspec_storage()
    found: type = getattr(home, "_FileSystem", None) or home.FileSystem
    return found


def dcp_save(
    state: dict[str, Any],
    *,
    storage_writer: StorageWriter,
    planner: SavePlanner,
    process_group: ProcessGroup | None,
    no_dist: bool,
) -> None:
    """Call `dcp.save`, which with ``no_dist`` does not warn."""
    quiet = getattr(state_dict_saver, "_save_state_dict", None)
    if no_dist and quiet is not None:
        quiet(state_dict=state, storage_writer=storage_writer, planner=planner, no_dist=True)
        return
    state_dict_saver.save(
        state,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    )


def dcp_load(
    state: dict[str, Any],
    *,
    storage_reader: StorageReader,
    planner: LoadPlanner,
    process_group: ProcessGroup | None,
    no_dist: bool,
) -> None:
    """Do the same with `dcp.load`. No value of ``state`` is `Stateful`."""
    quiet = getattr(state_dict_loader, "_load_state_dict", None)
    if no_dist and quiet is not None:
        quiet(state_dict=state, storage_reader=storage_reader, planner=planner, no_dist=True)
        return
    state_dict_loader.load(
        state,
        storage_reader=storage_reader,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    )


def is_initialised(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether `Optimizer.__init__` has run: wrappers may hand all on and leave it out."""
    return "_optimizer_step_pre_hooks" in vars(optimizer)


def load_hooks_of(owner: torch.nn.Module | torch.optim.Optimizer) -> list[object]:
    """Return the functions that decide what a state dict has, or run when one is loaded."""
    names = (
        ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks")
        if isinstance(owner, torch.nn.Module)
        else (
            "_optimizer_load_state_dict_pre_hooks",
            "_optimizer_load_state_dict_post_hooks",
        )
    )
    hooks = [hook for name in names for hook in getattr(owner, name, {}).values()]
    # Torch wraps a module's hook that wants the module; a bound method has its function inside.
    bare = (getattr(hook, "hook", hook) for hook in hooks)
    return [getattr(hook, "__func__", hook) for hook in bare]


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return numbers that in-place changes of the tensors raise; 0 where torch counts none."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # tensors that were made in inference mode have none
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


# The layout of tensors in oneDNN's own order; None where torch was built without it.
MKLDNN_LAYOUT: torch.layout | None = getattr(torch, "_mkldnn", None)
