"""What is to be loaded of a checkpoint, and room of its own for it.

Nothing is read into live tensors: what fails on the way leaves them as they were. The room is of
the dtype and shape that were saved; of a tensor that is sharded here it holds this rank's shard.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from dcp_checkfreq.shards.boxes import Box, Boxed, Layout, layout_of, whole
from dcp_checkfreq.shards.codec import is_same
from dcp_checkfreq.shards.self_described import parts_of
from dcp_checkfreq.state.saved import Leaf


class WantedTensor:
    """A tensor of the checkpoint, or this rank's shard of it.

    Args:
        leaf: that was saved.
        like: a tensor of the same shape that is sharded as this one shall be.
        name: of its place in the plan.
        chunk: the part of it to load; default: the part that ``like`` has, or all.

    Attributes:
        device: to move it to when it is put in place; None: the host.
    """

    def __init__(
        self,
        leaf: Leaf,
        like: DTensor | Boxed | None,
        name: str,
        chunk: ChunkStorageMetadata | None = None,
    ) -> None:
        kept = leaf.kept
        assert isinstance(kept, TensorStorageMetadata)
        self.leaf, self.kept, self.name = leaf, kept, name
        self._like = like.source if isinstance(like, Boxed) else like
        self.device: torch.device | None = None
        if chunk is not None:
            box = Box(tuple(chunk.offsets), (0,) * len(chunk.sizes), tuple(chunk.sizes))
            self._layout = Layout(tuple(kept.size), box.sizes, (box,))
        elif isinstance(like, Boxed):
            self._layout = like.held
        else:
            self._layout = whole(kept.size) if like is None else layout_of(like)
        self.tensor = torch.empty(self._layout.local, dtype=kept.properties.dtype)

    def items(self) -> list[ReadItem]:
        """Return the items to be read."""
        chunks, here = self.kept.chunks, self._layout.boxes
        is_whole = len(here) == 1 and here[0].sizes == self.kept.size
        if is_whole and len(chunks) == 1 and chunks[0].sizes == self.kept.size:
            origin = chunks[0].offsets
            source = MetadataIndex(self.leaf.key, origin, 0)
            target = MetadataIndex(self.name, origin, 0)
            tensor = LoadItemType.TENSOR
            return [ReadItem(tensor, target, origin, source, origin, self.kept.size)]
        items = create_read_items_for_chunk_list(
            self.leaf.key, self.kept, [box.chunk for box in here]
        )
        if self.name == self.leaf.key:
            return items
        return [
            dataclasses.replace(
                item, dest_index=dataclasses.replace(item.dest_index, fqn=self.name)
            )
            for item in items
        ]

    def box(self, offset: Sequence[int] | None) -> torch.Tensor:
        """Return the room for the box at an offset in the whole tensor."""
        boxes = self._layout.boxes
        if len(boxes) == 1:
            return self.tensor
        (found,) = (box for box in boxes if box.offset == tuple(offset or ()))
        return found.of(self.tensor)

    def made(self) -> torch.Tensor:
        """Return the loaded tensor on its device, sharded if it is to be."""
        like = self._like
        if like is None:
            return self.tensor if self.device is None else self.tensor.to(self.device)
        return DTensor.from_local(
            self.tensor.to(like.to_local().device),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )


class WantedShards:
    """The part of a tensor that one here says it holds; see `shards/self_described`.

    Args:
        live: that tensor.
        shards: one for each part of it, in order.
    """

    def __init__(self, live: torch.Tensor, shards: list[WantedTensor]) -> None:
        self._live, self._shards = live, shards
        self.leaf = shards[0].leaf

    def put(self, live: torch.Tensor) -> None:
        """Fill the parts of a tensor that describes itself as the one here."""
        for part, shard in zip(parts_of(self.leaf.key, live), self._shards, strict=True):
            part.tensor.copy_(shard.tensor)

    def is_in(self, live: torch.Tensor) -> bool:
        """Tell whether a tensor holds what was loaded, bit for bit."""
        parts = parts_of(self.leaf.key, live)
        pairs = zip(parts, self._shards, strict=True)
        return all(is_same(part.tensor, shard.tensor) for part, shard in pairs)

    def made(self) -> torch.Tensor:
        """Return a tensor like the one here that holds what was loaded."""
        made = copy.deepcopy(self._live)
        self.put(made)
        return made


@dataclasses.dataclass(slots=True)
class WantedValue:
    """A byte item of the checkpoint."""

    leaf: Leaf
    name: str
    value: Any = None


class Wanted:
    """All that one rank loads of a checkpoint."""

    def __init__(self) -> None:
        self.tensors: dict[str, WantedTensor] = {}
        self.values: dict[str, WantedValue] = {}

    def tensor(self, leaf: Leaf, like: torch.Tensor | None = None) -> WantedTensor:
        """Have a tensor loaded; in whole, unless ``like`` is a DTensor or has boxes."""
        sharded = like if isinstance(like, (DTensor, Boxed)) else None
        wanted = WantedTensor(leaf, sharded, self._free(leaf.key))
        self.tensors[wanted.name] = wanted
        return wanted

    def shard(self, leaf: Leaf, chunk: ChunkStorageMetadata) -> WantedTensor:
        """Have a part of a tensor loaded."""
        wanted = WantedTensor(leaf, None, self._free(leaf.key), chunk)
        self.tensors[wanted.name] = wanted
        return wanted

    def shards(self, leaf: Leaf, live: torch.Tensor) -> WantedShards:
        """Have the parts loaded that a tensor says it holds."""
        parts = parts_of(leaf.key, live)
        return WantedShards(live, [self.shard(leaf, part.data.chunk) for part in parts])

    def value(self, leaf: Leaf) -> WantedValue:
        """Have a byte item loaded."""
        wanted = WantedValue(leaf, self._free(leaf.key))
        self.values[wanted.name] = wanted
        return wanted

    def either(self, leaf: Leaf) -> WantedTensor | WantedValue:
        """Ask for a whole leaf: a tensor, or a byte item."""
        return self.tensor(leaf) if leaf.is_tensor else self.value(leaf)

    def _free(self, key: str) -> str:
        """Return a name: the key, or another one if that is wanted already for another place."""
        name, number = key, 1
        while name in self.tensors or name in self.values:
            number += 1
            name = f"{key}#{number}"
        return name


AnyWanted = WantedTensor | WantedShards | WantedValue


def loaded(wanted: AnyWanted) -> Any:
    """Return what was loaded."""
    return wanted.value if isinstance(wanted, WantedValue) else wanted.made()
