"""Which boxes of a whole tensor a rank holds, where that is not one box, and tensors made of them.

DCP takes each DTensor's shard for one box. With a strided placement (packed qkv weights) it is
several; a rank that is not in the mesh has none.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.metadata import TensorProperties as Properties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Placement

from dcp_checkfreq.errors import UnsupportedState
from dcp_checkfreq.shards.self_described import Shards

_Runs = list[tuple[int, int]]  # half-open, in the order in which the shard has them


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor that is one box both in the whole and in this rank's shard."""

    offset: tuple[int, ...]  # in the whole tensor
    at: tuple[int, ...]  # in the shard
    sizes: tuple[int, ...]

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        """Return this part of a shard."""
        for dim, (start, size) in enumerate(zip(self.at, self.sizes, strict=True)):
            if size != shard.shape[dim]:
                shard = shard.narrow(dim, start, size)
        return shard

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """What DCP calls it."""
        return ChunkStorageMetadata(torch.Size(self.offset), torch.Size(self.sizes))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a shard belongs."""

    size: tuple[int, ...]  # of the whole tensor
    local: tuple[int, ...]  # of the shard
    boxes: tuple[Box, ...]


def whole(size: Sequence[int]) -> Layout:
    """Return the layout of a tensor that is in one piece."""
    size = tuple(size)
    return Layout(size, size, (Box((0,) * len(size), (0,) * len(size), size),))


def sharded_dim(placement: Placement) -> int | None:
    """Return the dimension along which a placement cuts, None if it does not."""
    if placement.is_replicate() or placement.is_partial():
        return None
    dim: int = placement.dim  # type: ignore[attr-defined]  # Shard's, and of what is like it
    return dim


def _stride_factor(placement: Placement) -> int:
    """Return into how many pieces a placement cuts first; 1 for `Shard`."""
    return int(getattr(placement, "split_factor", 1))


def is_odd(tensor: DTensor) -> bool:
    """Tell whether DCP may have a wrong idea of where the shard belongs."""
    strided = any(
        sharded_dim(placement) is not None and _stride_factor(placement) != 1
        for placement in tensor.placements
    )
    return strided or tensor.device_mesh.get_coordinate() is None


@functools.lru_cache(maxsize=1024)
def are_usual(placements: tuple[Placement, ...]) -> bool:
    """Tell whether all placements are such that ranks in the mesh have one box each."""
    return not any(
        one.is_partial() or (sharded_dim(one) is not None and _stride_factor(one) != 1)
        for one in placements
    )


def check_placements(tensor: DTensor, key: str) -> None:
    """Make sure that ranks hold elements, rather than summands of them.

    Raises:
        UnsupportedState: a placement is `Partial`.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedState(
            key,
            "DTensor with Partial placements",
            "each rank holds a summand of its elements. Add them up before it is saved: "
            "`tensor.redistribute(placements=[Replicate()])`",
        )


def check_as_stock_saves(tensor: DTensor, key: str) -> None:
    """Make sure that DCP itself knows where the shard belongs.

    Raises:
        UnsupportedState: it does not; or see `check_placements`.
    """
    check_placements(tensor, key)
    if any(_stride_factor(one) != 1 for one in tensor.placements) and (
        len(layout_of(tensor).boxes) > 1
    ):
        raise UnsupportedState(
            key,
            "DTensor with strided shards",
            "DCP takes each for one piece of the whole, and they are several. `Checkpointer` saves "
            "it; for `dcp.save` use `tensor.redistribute(placements=[Shard(dim)])` first",
        )


def layout_of(tensor: DTensor) -> Layout:
    """Return where this rank's shard of a DTensor belongs."""
    return layout_at(
        tuple(tensor.shape),
        tensor.placements,
        tuple(tensor.device_mesh.shape),
        tensor.device_mesh.get_coordinate(),
    )


def layout_at(
    size: tuple[int, ...],
    placements: Sequence[Placement],
    mesh: Sequence[int],
    coordinate: Sequence[int] | None,
) -> Layout:
    """Return where the shard at a coordinate of a mesh belongs. None: it is not in the mesh."""
    if coordinate is None:
        return Layout(size, (0,), ())
    held: list[_Runs] = [[(0, length)] for length in size]
    for place, ranks, rank in zip(placements, mesh, coordinate, strict=True):
        dim = sharded_dim(place)
        if dim is not None:
            held[dim] = _cut(held[dim], ranks, rank, _stride_factor(place))
    boxes = []
    for runs in itertools.product(*map(_with_places, held)):
        offset, at, sizes = zip(*runs, strict=True) if runs else ((), (), ())
        if 0 not in sizes or 0 in size:  # an empty one may seem to be where another rank's is
            boxes.append(Box(offset, at, sizes))
    local = tuple(sum(stop - start for start, stop in runs) for runs in held)
    return Layout(size, local, tuple(boxes))


def _cut(runs: _Runs, ranks: int, rank: int, factor: int) -> _Runs:
    """Return what one rank gets of runs: of each of ``factor`` pieces its share."""
    length = sum(stop - start for start, stop in runs)
    found: _Runs = []
    for piece_start, piece_stop in _chunks(length, factor):
        shares = _chunks(piece_stop - piece_start, ranks)
        start, stop = shares[rank]
        found += _between(runs, piece_start + start, piece_start + stop)
    merged: _Runs = []
    for start, stop in found:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged or [(0, 0)]


def _chunks(length: int, count: int) -> _Runs:
    """Cut as `torch.chunk` does; the last ones may be empty."""
    step = -(-length // count)
    return [(min(n * step, length), min((n + 1) * step, length)) for n in range(count)]


def _between(runs: _Runs, start: int, stop: int) -> _Runs:
    """Return elements ``[start, stop)`` of all that is in the runs."""
    found: _Runs = []
    for first, end in runs:
        begin, until = first + max(start, 0), min(end, first + stop)
        if begin < until:
            found.append((begin, until))
        start, stop = start - (end - first), stop - (end - first)
    return found


def _with_places(runs: _Runs) -> list[tuple[int, int, int]]:
    """Return offset, place in the shard and size of each run."""
    places = itertools.accumulate((stop - start for start, stop in runs), initial=0)
    return [(start, at, stop - start) for (start, stop), at in zip(runs, places, strict=False)]


class Boxed(Shards):
    """This rank's boxes of a tensor, as DCP's planners take them."""

    held: Layout
    source: DTensor | None  # of which they are


def boxed(local: torch.Tensor, layout: Layout, source: DTensor | None = None) -> Boxed:
    """Return a shard with what DCP is to be told about it."""
    properties = Properties.create_from_tensor(local)
    items = [
        WriteItem(
            index=MetadataIndex("", torch.Size(box.offset)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=box.chunk, properties=properties, size=torch.Size(layout.size)
            ),
        )
        for box in layout.boxes
    ]
    made = Boxed.of(layout.size, local.dtype, items, [box.of(local) for box in layout.boxes])
    made.held, made.source = layout, source
    return made
