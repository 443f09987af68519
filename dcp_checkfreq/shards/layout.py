"""From a save plan to items in files, and the report of a rank that goes to the coordinator."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from dcp_checkfreq.errors import UnsupportedState
from dcp_checkfreq.format.envelope import Envelopes
from dcp_checkfreq.format.value_checks import serialised
from dcp_checkfreq.shards.assign import Placement, assign_files, place
from dcp_checkfreq.shards.codec import Item, byte_item, memory_of, tensor_item


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank wrote. Parallel columns, one entry per item: cheap to pickle."""

    files: dict[str, int]  # name: size in bytes
    indices: list[MetadataIndex]
    file_name: list[str]
    start: list[int]  # of the item, bytes from the start of the file
    item_bytes: list[int]
    payload_offset: list[int]
    payload_bytes: list[int]
    block_bytes: list[int]
    digests: list[list[int]]


def resolve(
    plan: SavePlan,
    planner: SavePlanner,
    envelopes: Envelopes,
    check: Callable[[WriteItem, io.BytesIO], None] | None = None,
) -> list[Item]:
    """Ask the planner for every item of the plan, in order.

    Items that are the very same memory (tied weights) are marked, so that it is written once.

    Args:
        plan: of this rank.
        planner: that knows the state.
        envelopes: made before.
        check: looks at every byte item.

    Raises:
        UnsupportedState: an item cannot be written or loaded again.
    """
    items: list[Item] = []
    at_address: dict[int, int] = {}
    for write_item in plan.items:
        data = _resolved(write_item, planner)
        if isinstance(data, io.BytesIO):
            if check is not None:
                check(write_item, data)
            items.append(byte_item(data))
            continue
        item = tensor_item(data, write_item.index.fqn, envelopes)
        if item.payload_bytes:
            first = at_address.setdefault(data.data_ptr(), len(items))
            if first < len(items) and _is_same(items[first].source, data):
                item.same_as = first
        items.append(item)
    return items


def _resolved(write_item: WriteItem, planner: SavePlanner) -> torch.Tensor | io.BytesIO:
    key = write_item.index.fqn
    try:
        return planner.resolve_data(write_item)
    except RecursionError:
        why = "it is nested too deep, or holds itself"
        raise UnsupportedState(key, "value without a pickle", why) from None
    except UnsupportedState:
        raise
    except Exception:  # whatever a value of the user's raises when the planner pickles it
        if write_item.type is WriteItemType.BYTE_IO:
            value = value_of(write_item, planner)
            serialised(value, key)  # raises by the key of the part, if it is that
        raise


def value_of(write_item: WriteItem, planner: SavePlanner) -> object:
    """Return the value that an item stands for; None if this planner does not tell."""
    look_up = getattr(planner, "lookup_object", None)  # DCP's planners and those made of them
    return None if look_up is None else look_up(write_item.index)


def _is_same(one: torch.Tensor | memoryview, other: torch.Tensor) -> bool:
    return isinstance(one, torch.Tensor) and memory_of(one) == memory_of(other)


def lay_out(items: Sequence[Item], max_files: int) -> list[Placement]:
    """Spread the items over files. Items that are the same memory as another get no place."""
    own = [position for position, item in enumerate(items) if item.same_as is None]
    extents = [item.extent for item in items]
    groups = assign_files([items[position].payload_bytes for position in own], max_files)
    return [place([own[member] for member in group], extents) for group in groups]


def lay_out_each(items: Sequence[Item]) -> list[Placement]:
    """Give every item a file of its own, but for those that are the same memory as another."""
    extents = [item.extent for item in items]
    return [place([n], extents) for n, item in enumerate(items) if item.same_as is None]


def report(
    plan: SavePlan, items: Sequence[Item], placements: Sequence[Placement], names: Sequence[str]
) -> RankReport:
    """Say where every item of the plan is, after all of them were written."""
    where: dict[int, tuple[str, int]] = {}
    for name, placement in zip(names, placements, strict=True):
        for position, start in zip(placement.items, placement.starts, strict=True):
            where[position] = (name, start)
    made = RankReport(
        {name: placement.size_bytes for name, placement in zip(names, placements, strict=True)},
        [write_item.index for write_item in plan.items],
        *([], [], [], [], [], [], []),
    )
    for position, item in enumerate(items):
        written = position if item.same_as is None else item.same_as
        name, start = where[written]
        made.file_name.append(name)
        made.start.append(start)
        prefix_bytes = len(item.envelope.prefix)
        made.item_bytes.append(prefix_bytes + item.payload_bytes + len(item.envelope.suffix))
        made.payload_offset.append(start + prefix_bytes)
        made.payload_bytes.append(item.payload_bytes)
        made.block_bytes.append(item.block)
        made.digests.append(items[written].digests)
    return made
