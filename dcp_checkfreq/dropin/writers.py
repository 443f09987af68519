"""What the methods of stock's `FileSystemWriter` do while the drop-in is on.

Each has stock's own function first. A save that began by ours ends by ours, and so with stock's.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future as ConcurrentFuture
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dcp_checkfreq.dropin.behind import behind_writer
from dcp_checkfreq.dropin.fitting import tell_once
from dcp_checkfreq.errors import UnsupportedState

_Stock = Callable[..., Any]


def storage_meta(stock: _Stock, writer: FileSystemWriter) -> StorageMeta:
    """Name the checkpoint and the attempt."""
    ours = behind_writer(writer).ours(writer)
    meta: StorageMeta = stock(writer) if ours is None else ours.storage_meta()
    return meta


# DCP passes rank and use_collectives only to a parameter that is named `kwargs`.
def set_up_storage_writer(
    stock: _Stock, writer: FileSystemWriter, is_coordinator: bool, *args: Any, **kwargs: Any
) -> None:
    """Decide whose save this is, and begin it."""
    stock(writer, is_coordinator, *args, **kwargs)
    behind = behind_writer(writer)
    behind.end()
    ours = behind.ours(writer)
    if ours is None:
        return
    if not kwargs.get("use_collectives", True):
        tell_once("saves with use_collectives=False are written by stock's FileSystemWriter")
        return
    behind.begin(ours)
    ours.set_up_storage_writer(is_coordinator, *args, **kwargs)
    writer.save_id = ours.save_id


def prepare_local_plan(stock: _Stock, writer: FileSystemWriter, plan: SavePlan) -> SavePlan:
    """Return the plan; stock's own code would look for a checkpoint that is there."""
    ours = behind_writer(writer).saving
    prepared: SavePlan = stock(writer, plan) if ours is None else ours.prepare_local_plan(plan)
    return prepared


def prepare_global_plan(
    stock: _Stock, writer: FileSystemWriter, plans: list[SavePlan]
) -> list[SavePlan]:
    """Return the plans with what stock stamps on them: planners keep them, for stock too."""
    ours = behind_writer(writer).saving
    if ours is not None:
        plans = ours.prepare_global_plan(plans)
    stamped: list[SavePlan] = stock(writer, plans)
    return stamped


def write_data(
    stock: _Stock, writer: FileSystemWriter, plan: SavePlan, planner: SavePlanner
) -> Future[list[WriteResult]]:
    """Write this rank's items."""
    behind = behind_writer(writer)
    ours = behind.saving
    if ours is None:
        try:
            written: Future[list[WriteResult]] = stock(writer, plan, planner)
            return written
        finally:
            behind.let_go()
    try:
        written = ours.write_data(plan, planner)
    except BaseException:
        behind.end()
        raise
    if not ours.rank_save.is_coordinator:
        behind.end()
    return written


def finish(
    stock: _Stock,
    writer: FileSystemWriter,
    metadata: Metadata,
    results: list[list[WriteResult]],
) -> None:
    """Publish the checkpoint."""
    behind = behind_writer(writer)
    ours = behind.saving
    if ours is None:
        stock(writer, metadata, results)
        return
    try:
        ours.finish(metadata, results)
    finally:
        behind.end()


def stage(
    stock: _Stock, writer: FileSystemWriter, state_dict: dict[str, Any]
) -> dict[str, Any] | ConcurrentFuture[dict[str, Any]]:
    """Copy the state; what our stager refuses, stock's copies."""
    ours = behind_writer(writer).ours(writer)
    if ours is not None:
        try:
            return ours.stage(state_dict)
        except UnsupportedState as why:
            tell_once(f"stock's stager copies this state: {why}")
    copied: dict[str, Any] = stock(writer, state_dict)
    return copied


def close(stock: _Stock, writer: FileSystemWriter) -> None:
    """Give the snapshot buffers back."""
    behind_writer(writer).let_go()
    stock(writer)


METHODS: dict[str, Callable[..., Any]] = {
    method.__name__: method
    for method in (
        storage_meta,
        set_up_storage_writer,
        prepare_local_plan,
        prepare_global_plan,
        write_data,
        finish,
        stage,
        close,
    )
}
