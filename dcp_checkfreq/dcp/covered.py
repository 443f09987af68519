"""Nothing that is to be loaded stays as it was: each target of a plan is filled, or an error.

DCP reads what chunks there are. Where some are missing it says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from dcp_checkfreq.errors import BrokenMetadata, StateMismatch
from dcp_checkfreq.shards.codec import is_sharded_tensor
from dcp_checkfreq.shards.coverage import TooTangled, uncovered
from dcp_checkfreq.shards.self_described import describes_itself, parts_of


def check_covered(plan: LoadPlan, planner: LoadPlanner, metadata: Metadata, where: str) -> None:
    """Make sure that a plan fills all of every tensor that it is to fill. Reads nothing.

    Tensors that the plan leaves out are looked at if the planner has a ``state_dict``, as DCP's
    has, and the checkpoint knows them: a planner may leave them out, but not for lack of chunks.

    Raises:
        BrokenMetadata: chunks of a tensor are missing in the checkpoint.
        StateMismatch: they are there, the plan leaves them out.
    """
    saved = metadata.state_dict_metadata
    planned: set[str] = set()
    parts: dict[tuple[str, Any], list[ReadItem]] = {}
    for item in plan.items:
        if item.type is not LoadItemType.TENSOR:
            continue
        index = item.dest_index
        planned.add(index.fqn)
        kept = saved.get(item.storage_index.fqn)
        if not isinstance(kept, TensorStorageMetadata) or item.lengths != kept.size:
            parts.setdefault((index.fqn, index.offset), []).append(item)
    for (key, _), items in parts.items():
        target = _size_of_target(planner, items[0])
        source = items[0].storage_index.fqn
        if (
            target is None
        ):  # a planner with targets of its own: then at least the saved one is whole
            _check_saved(source, saved.get(source), where)
            continue
        missing = _missing(
            key, target, [(item.dest_offsets, item.lengths) for item in items], where
        )
        if missing:
            _check_saved(source, saved.get(source), where)
            raise StateMismatch(
                where,
                f"{key!r}: what the planner reads leaves {missing} of {math.prod(target)} elements "
                "as they are",
            )
    state = getattr(planner, "state_dict", None)
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if key not in planned and isinstance(value, torch.Tensor) and _elements_here(key, value):
            _check_saved(key, saved.get(key), where)


def _check_saved(key: str, kept: object, where: str) -> None:
    if not isinstance(kept, TensorStorageMetadata):
        return
    chunks = [(chunk.offsets, chunk.sizes) for chunk in kept.chunks]
    missing = _missing(key, kept.size, chunks, where)
    if missing:
        raise BrokenMetadata(
            where, f"{missing} of the {kept.size.numel()} elements of {key!r} are in no chunk of it"
        )


def _missing(key: str, size: Any, boxes: list[Any], where: str) -> int:
    try:
        return uncovered(size, boxes)
    except TooTangled as error:
        raise BrokenMetadata(where, f"{key!r}: {error}") from error


def _size_of_target(planner: LoadPlanner, item: ReadItem) -> torch.Size | None:
    """Return the size of the part of a tensor that an item goes to a part of.

    None if it is not known: a planner that says itself where an item goes may want parts only.
    """
    look_up = getattr(planner, "lookup_tensor", None)
    if look_up is None or _resolves(planner) is not _resolves(DefaultLoadPlanner):
        return None
    target = look_up(item.dest_index)
    return target.shape if isinstance(target, torch.Tensor) else None


def _resolves(planner: Any) -> object:
    method = getattr(planner, "resolve_tensor", None)
    return getattr(method, "__func__", method)


def _elements_here(key: str, value: torch.Tensor) -> int:
    if isinstance(value, DTensor):
        return value.to_local().numel()
    if is_sharded_tensor(value):
        shards: Any = value
        return sum(shard.tensor.numel() for shard in shards.local_shards())
    if describes_itself(value):
        return sum(part.tensor.numel() for part in parts_of(key, value))
    return value.numel()
