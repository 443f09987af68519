"""What is to be loaded of a checkpoint, and room of its own for it.

Nothing is read into live tensors: what fails on the way leaves them as they were. The room is of
the dtype and shape that were saved; of a tensor that is sharded here it holds this rank's shard.
"""

from __future__ import annotations

import dataclasses
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

from dcp_checkfreq.state.saved import Leaf


class WantedTensor:
    """A tensor of the checkpoint, or this rank's shard of it.

    Args:
        leaf: that was saved.
        like: a tensor of the same shape that is sharded as this one shall be.
        name: of its place in the plan.
    """

    def __init__(self, leaf: Leaf, like: DTensor | None, name: str) -> None:
        kept = leaf.kept
        assert isinstance(kept, TensorStorageMetadata)
        self.leaf, self.kept, self.name = leaf, kept, name
        self._like = like
        if like is None:
            self.chunk = ChunkStorageMetadata(torch.Size([0] * len(kept.size)), kept.size)
        else:
            (self.chunk,) = like.__create_chunk_list__()  # type: ignore[no-untyped-call]
        self.tensor = torch.empty(self.chunk.sizes, dtype=kept.properties.dtype)

    def items(self) -> list[ReadItem]:
        """Return what is to be read."""
        chunks = self.kept.chunks
        if len(chunks) == 1 and chunks[0].sizes == self.kept.size == self.chunk.sizes:
            origin = chunks[0].offsets
            source = MetadataIndex(self.leaf.key, origin, 0)
            target = MetadataIndex(self.name, origin, 0)
            tensor = LoadItemType.TENSOR
            return [ReadItem(tensor, target, origin, source, origin, self.kept.size)]
        items = create_read_items_for_chunk_list(self.leaf.key, self.kept, [self.chunk])
        if self.name == self.leaf.key:
            return items
        return [
            dataclasses.replace(
                item, dest_index=dataclasses.replace(item.dest_index, fqn=self.name)
            )
            for item in items
        ]

    def made(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the loaded tensor on a device, sharded if it is to be."""
        like = self._like
        if like is None:
            return self.tensor if device is None else self.tensor.to(device)
        return DTensor.from_local(
            self.tensor.to(like.to_local().device),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )


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
        """Have a tensor loaded; in whole, unless ``like`` is a DTensor."""
        sharded = like if isinstance(like, DTensor) else None
        wanted = WantedTensor(leaf, sharded, self._free(leaf.key))
        self.tensors[wanted.name] = wanted
        return wanted

    def value(self, leaf: Leaf) -> WantedValue:
        """Have a byte item loaded."""
        wanted = WantedValue(leaf, self._free(leaf.key))
        self.values[wanted.name] = wanted
        return wanted

    def either(self, leaf: Leaf) -> WantedTensor | WantedValue:
        """Have a leaf loaded as what it was saved as, in whole."""
        return self.tensor(leaf) if leaf.is_tensor else self.value(leaf)

    def _free(self, key: str) -> str:
        """Return a name: the key, or another one if that is wanted for somebody else already."""
        name, number = key, 1
        while name in self.tensors or name in self.values:
            number += 1
            name = f"{key}#{number}"
        return name


def loaded(wanted: WantedTensor | WantedValue) -> Any:
    """Return what was loaded."""
    return wanted.value if isinstance(wanted, WantedValue) else wanted.made()
