"""What tensors a state holds, found where DCP looks for them.

A look at a state is a `Survey`. Most of what it finds stays true for the next save: that part is
its `Inventory`, and the next survey recognises it rather than work it out again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_checkfreq.shards.boxes import check_as_stock_saves
from dcp_checkfreq.shards.codec import (
    check_not_sharded_tensor,
    check_storable,
    is_sharded_tensor,
    memory_of,
)
from dcp_checkfreq.shards.nesting import naming
from dcp_checkfreq.shards.self_described import describes_itself, description_of, memory_parts
from dcp_checkfreq.snapshot.optimizer_guard import Address, address_of

_Mark = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Structure:
    """What the plan of a save depends on: while it is unchanged, a plan made before still fits.

    Attributes:
        leaves: what `describe` says of every leaf, in order.
        nesting: of mappings and lists, with their keys; says which leaf is where.
    """

    leaves: list[tuple[object, ...]]
    nesting: object


def describe(key: str, value: object) -> tuple[object, ...]:
    """Return what a plan depends on: the key, and of a tensor all but its data.

    Raises:
        UnsupportedState: DCP would save something else than the tensor.
    """
    if isinstance(value, DTensor):
        check_as_stock_saves(value, key)
        return key, value.dtype, value.shape, value.placements, value.device_mesh
    if isinstance(value, torch.Tensor):
        if describes_itself(value):
            return key, value.dtype, value.shape, description_of(key, value)
        # ShardedTensor has no cheap description of its shards; its metadata object is one.
        shards = value.metadata() if is_sharded_tensor(value) else None  # type: ignore[attr-defined]
        return key, value.dtype, value.shape, shards
    return (key,)


@dataclass(frozen=True, slots=True)
class Piece:
    """Memory of this rank that holds one tensor of the state, or several that are the same."""

    paths: tuple[str, ...]  # as DCP's flat keys: everywhere it was found
    address: Address
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return self.address[1]


class Inventory:
    """What a state holds and where that is in memory. It keeps no tensor alive.

    Attributes:
        structure: by which a plan that fits is known.
        pieces: of memory, in the order they were found.
        paths: of the leaves, as DCP's flat keys.
        pieces_of: numbers of the pieces of every leaf, None for what is no tensor. It is one but
            for tensors that consist of several shards.
        first: where each piece was found first: number of the leaf, and which of its pieces it is.
        state_bytes: of all pieces.
    """

    def __init__(self, look: _Look) -> None:
        self.paths, self._marks = look.paths, look.marks
        self.structure = Structure([], look.tree)
        self.pieces_of: list[tuple[int, ...] | None] = []
        self.first: list[tuple[int, int]] = []
        numbers: dict[object, int] = {}
        paths: list[list[str]] = []
        for leaf, (path, value) in enumerate(zip(look.paths, look.values, strict=True)):
            self.structure.leaves.append(describe(path, value))
            if not isinstance(value, torch.Tensor):
                self.pieces_of.append(None)
                continue
            of_leaf = []
            check_not_sharded_tensor(value, path)
            for part, local in enumerate(look.locals_of(leaf)):
                check_storable(local, path)
                # Those without elements have no memory: others would seem to be the same.
                memory = memory_of(local) if local.nbytes else (path, part)
                number = numbers.setdefault(memory, len(numbers))
                if number == len(self.first):
                    self.first.append((leaf, part))
                    paths.append([])
                paths[number].append(path)
                of_leaf.append(number)
            self.pieces_of.append(tuple(of_leaf))
        self.pieces = [
            Piece(tuple(found), address_of(local), local.dtype, local.shape, local.device)
            for found, local in zip(paths, look.locals(self.first), strict=True)
        ]
        self.state_bytes = sum(piece.size_bytes for piece in self.pieces)

    def is_of(self, look: _Look) -> bool:
        """Tell whether another look has found the same."""
        return (
            self._marks == look.marks
            and self.paths == look.paths
            and self.structure.nesting == look.tree
        )


class _Look:
    """One walk through a state, which reads every container once. It is at work in every save."""

    def __init__(self, state: Mapping[str, object]) -> None:
        self.paths: list[str] = []
        self.values: list[object] = []
        self.marks: list[_Mark | None] = []  # of a tensor: all of it that matters but its data
        self._shards: dict[int, Sequence[torch.Tensor]] = {}  # of leaves that are not plain
        self.tree = {key: self._visit(value, str(key)) for key, value in state.items()}

    def _visit(self, value: object, path: str) -> Any:
        """Look where DCP looks: into mappings and lists. What else there is becomes a byte item."""
        if isinstance(value, torch.Tensor):
            try:
                self.marks.append(self._mark(value, path))
            except RuntimeError:  # sparse, say
                check_not_sharded_tensor(value, path)
                for local in self._shards.get(len(self.values), (value,)):
                    check_storable(local, path)
                raise
        elif isinstance(value, Mapping):
            return {key: self._visit(inner, f"{path}.{key}") for key, inner in value.items()}
        elif isinstance(value, list):
            return [self._visit(inner, f"{path}.{number}") for number, inner in enumerate(value)]
        else:
            self.marks.append(None)
        self.paths.append(path)
        self.values.append(value)
        return len(self.values) - 1

    def _mark(self, tensor: torch.Tensor, path: str) -> _Mark:
        if type(tensor) is torch.Tensor and not tensor.__dict__:  # nearly all, so first
            return type(tensor), *memory_of(tensor)
        if isinstance(tensor, DTensor):
            shard = tensor.to_local()
            self._shards[len(self.values)] = (shard,)
            layout = (tensor.shape, tensor.stride(), tensor.placements, tensor.device_mesh)
            return type(tensor), type(shard), layout, *memory_of(shard)
        if describes_itself(tensor):
            parts = self._shards[len(self.values)] = memory_parts(path, tensor)
            return type(tensor), *describe(path, tensor), *map(memory_of, parts)
        return type(tensor), *memory_of(tensor)

    def locals_of(self, leaf: int) -> Sequence[torch.Tensor]:
        """Return this rank's part of a tensor, or all its parts."""
        value = self.values[leaf]
        assert isinstance(value, torch.Tensor)
        return self._shards.get(leaf, (value,))

    def locals(self, places: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Return the parts at these numbers of leaf and part."""
        return [self.locals_of(leaf)[part] for leaf, part in places]

    def wholes(self, places: Sequence[tuple[int, int]]) -> dict[int, torch.Tensor]:
        """Return what the parts at these places are shards of, by number of the place."""
        if not self._shards:
            return {}
        values: Sequence[Any] = self.values
        return {
            number: values[leaf] for number, (leaf, _) in enumerate(places) if leaf in self._shards
        }


class Survey:
    """Every tensor of a state, in order.

    Args:
        state: to look at.
        known: inventories of earlier states; one may be that of this state.

    Attributes:
        inventory: one of ``known``, if that is what was found.
        tree: the state's nesting of mappings and lists, with numbers of leaves.
        paths: of all leaves.
        values: of them.
        locals: this rank's part of each piece, detached: an object of its own, which
            ``tensor.data = ...`` does not change.
        wholes: by number of the piece: the tensor that a piece is a shard of.

    Raises:
        UnsupportedState: a tensor that could not be written, or loaded again.
    """

    @torch.no_grad()
    def __init__(self, state: Mapping[str, object], known: Sequence[Inventory] = ()) -> None:
        with naming(lambda: state):
            look = _Look(state)
        recognised = next((one for one in known if one.is_of(look)), None)
        self.inventory = recognised or Inventory(look)
        self.tree: dict[str, Any] = look.tree
        self.paths, self.values = look.paths, look.values
        first = self.inventory.first
        self.locals: list[torch.Tensor] = [local.detach() for local in look.locals(first)]
        self.wholes: Mapping[int, torch.Tensor] = look.wholes(first)
