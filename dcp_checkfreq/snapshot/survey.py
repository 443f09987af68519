"""What tensors a state holds, found where DCP looks for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from dcp_checkfreq.errors import UnsupportedState
from dcp_checkfreq.shards.codec import check_storable, is_sharded_tensor, memory_of

Structure = list[tuple[object, ...]]


def describe(key: str, value: object) -> tuple[object, ...]:
    """Return what a plan depends on: the key, and of a tensor all but its data."""
    if isinstance(value, DTensor):
        return key, value.dtype, value.shape, value.placements, value.device_mesh
    if isinstance(value, torch.Tensor):
        # ShardedTensor has no cheap description of its shards; its metadata object is one.
        shards = value.metadata() if is_sharded_tensor(value) else None  # type: ignore[attr-defined]
        return key, value.dtype, value.shape, shards
    return (key,)


@dataclass(frozen=True, slots=True)
class Found:
    """One tensor of the state, and this rank's part of it."""

    path: str  # as DCP's flat keys
    tensor: torch.Tensor
    local: torch.Tensor  # detached: an object of its own, which `tensor.data = ...` does not change
    memory: tuple[object, ...]  # equal for tensors that are the same elements of memory


class Survey:
    """Every tensor of a state, in order.

    Attributes:
        found: one entry per tensor object, at the first place it was found.
        structure: every leaf of the state. While it is unchanged, a plan made before still fits.

    Raises:
        UnsupportedState: a tensor that could not be written, or loaded again.
    """

    def __init__(self, state: Mapping[str, object]) -> None:
        self.found: list[Found] = []
        self.structure: Structure = []
        self.paths: dict[int, list[str]] = {}  # id of a tensor object: everywhere it was found
        self._visit(state, "")

    def _visit(self, value: object, path: str) -> None:
        """Look where DCP looks: into mappings and lists. What else there is becomes a byte item."""
        if isinstance(value, Mapping):
            for key, inner in value.items():
                self._visit(inner, f"{path}.{key}" if path else str(key))
            return
        if isinstance(value, list):
            for number, inner in enumerate(value):
                self._visit(inner, f"{path}.{number}")
            return
        self.structure.append(describe(path, value))
        if isinstance(value, torch.Tensor):
            known = self.paths.setdefault(id(value), [])
            if not known:
                self.found.append(_found(value, path))
            known.append(path)

    @property
    def state_bytes(self) -> int:
        """Bytes of all distinct tensor memory that this rank holds."""
        return sum({one.memory: one.local.nbytes for one in self.found}.values())


def _found(tensor: torch.Tensor, path: str) -> Found:
    if is_sharded_tensor(tensor):
        raise UnsupportedState(
            path,
            "ShardedTensor",
            "only DTensor shards can be staged. Give FSDP a device_mesh, use fully_shard, "
            "or save with dcp.save",
        )
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    check_storable(local, path)
    return Found(path, tensor, local, memory_of(local) if local.nbytes else (id(tensor),))
