"""What of a state is copied, and the place in leased memory that each part has."""

from __future__ import annotations

import threading
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_checkfreq.errors import SnapshotFailed
from dcp_checkfreq.shards.assign import next_place
from dcp_checkfreq.snapshot.guard import Address
from dcp_checkfreq.snapshot.lanes import Lane
from dcp_checkfreq.snapshot.pool import Lease
from dcp_checkfreq.snapshot.survey import Inventory, Piece


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece of memory is copied to, and when.

    Attributes:
        offset: in the buffer.
        device: of the buffer; None: host.
        overlaps: with training, as nobody changes it before the guard's word.
    """

    offset: int
    device: torch.device | None
    overlaps: bool

    def part_of(self, memory: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return the tensor in the buffer that the copy goes into."""
        flat = memory[self.offset : self.offset + piece.size_bytes]
        return flat.view(piece.dtype).view(piece.shape)


class CopyPlan:
    """What is copied, when, and where to. It keeps no tensor alive, and serves many snapshots.

    Args:
        inventory: of the state.
        only: flat keys of the tensors that this rank writes; None: all of them.
        guarded: where the tensors are that nobody changes before the guard's word.
        on_gpu: copy guarded CUDA tensors into GPU memory.
        overlap_from_bytes: copy all CPU tensors at once if fewer bytes of them are guarded.

    Attributes:
        places: of every piece; None: not copied.
    """

    def __init__(
        self,
        inventory: Inventory,
        only: AbstractSet[str] | None,
        guarded: AbstractSet[Address],
        *,
        on_gpu: bool,
        overlap_from_bytes: int = 0,
    ) -> None:
        self.inventory = inventory
        self._asked = (only, guarded, on_gpu, overlap_from_bytes)
        wanted = [
            piece if only is None or not only.isdisjoint(piece.paths) else None
            for piece in inventory.pieces
        ]
        held_up = [p for p in wanted if p is not None and p.device.type == "cpu"]
        host_overlaps = overlap_from_bytes <= sum(
            piece.size_bytes for piece in held_up if piece.address in guarded
        )
        sizes: dict[torch.device | None, int] = {}
        self.places: list[Place | None] = []
        for piece in wanted:
            if piece is None:
                self.places.append(None)
                continue
            overlaps = piece.address in guarded and (host_overlaps or piece.device.type != "cpu")
            device = piece.device if on_gpu and overlaps and piece.device.type == "cuda" else None
            # As in the file, so that large parts can be written from where they lie.
            offset = next_place(sizes.get(device, 0), piece.size_bytes)
            sizes[device] = offset + piece.size_bytes
            self.places.append(Place(offset, device, overlaps))
        self.host_bytes = sizes.pop(None, 0)
        self.gpu_bytes = {device: size for device, size in sizes.items() if device is not None}
        self.copied_bytes = sum(piece.size_bytes for piece in wanted if piece is not None)

    def is_for(
        self,
        inventory: Inventory,
        only: AbstractSet[str] | None,
        guarded: AbstractSet[Address],
        *,
        on_gpu: bool,
        overlap_from_bytes: int = 0,
    ) -> bool:
        """Tell whether a plan made of these would be this one."""
        asked = (only, guarded, on_gpu, overlap_from_bytes)
        return inventory is self.inventory and asked == self._asked


@dataclass(slots=True)
class Kept:
    """Tensors that a snapshot made of a lease's memory, for the next one with the same plan.

    It also keeps them alive: torch lets go of the GIL whenever a tensor dies, so that a thread
    which drops a snapshot of 800 tensors waits for seconds.
    """

    plan: CopyPlan
    parts: dict[int, torch.Tensor] = field(default_factory=dict)  # by piece
    wrapped: dict[int, DTensor] = field(default_factory=dict)  # by leaf
    absent: dict[int, torch.Tensor] = field(default_factory=dict)  # by piece


class Leases:
    """What one snapshot holds: memory, and the lanes that write into it."""

    def __init__(self, host: Lease) -> None:
        self.host = host
        self.on_device: dict[torch.device, Lease] = {}
        self.lanes: list[Lane] = []
        self.at_once_s = 0.0

    def of(self, device: torch.device | None) -> Lease:
        """Return the memory on this device; None: of the host."""
        return self.host if device is None else self.on_device[device]

    def handed_to(self, worker: threading.Thread) -> None:
        """Name the thread whose end ends the leases."""
        for lease in (self.host, *self.on_device.values()):
            lease.worker = worker

    def release(self) -> None:
        """Give the memory back, once nothing writes into it any more."""
        for lane in self.lanes:
            try:
                lane.wait()
            except SnapshotFailed:
                continue  # raised where the snapshot is used
        for lease in (self.host, *self.on_device.values()):
            lease.release()


class Parts:
    """Tensors that are parts of the buffers: those of the snapshot before, if the plan is the same.

    Each lease keeps those of its own memory, so that none outlives it.
    """

    def __init__(self, plan: CopyPlan, leases: Leases) -> None:
        self._plan = plan
        self._leases = leases
        for lease in (leases.host, *leases.on_device.values()):
            if not isinstance(lease.kept, Kept) or lease.kept.plan is not plan:
                lease.kept = Kept(plan)

    def _kept(self, device: torch.device | None) -> Kept:
        kept = self._leases.of(device).kept
        assert isinstance(kept, Kept)
        return kept

    def part(self, number: int, place: Place) -> torch.Tensor:
        """Return the tensor that a piece is copied into."""
        parts = self._kept(place.device).parts
        if number not in parts:
            memory = self._leases.of(place.device).memory
            parts[number] = place.part_of(memory, self._plan.inventory.pieces[number])
        return parts[number]

    def absent(self, number: int) -> torch.Tensor:
        """Return a meta tensor that stands for a piece which another rank writes."""
        absent = self._kept(None).absent
        if number not in absent:
            piece = self._plan.inventory.pieces[number]
            absent[number] = torch.empty(piece.shape, dtype=piece.dtype, device="meta")
        return absent[number]

    def of_leaf(self, leaf: int, value: torch.Tensor) -> torch.Tensor:
        """Return what stands for a tensor of the state: a part, or a DTensor of one."""
        number = self._plan.inventory.piece_of[leaf]
        assert number is not None
        place = self._plan.places[number]
        local = self.absent(number) if place is None else self.part(number, place)
        if not isinstance(value, DTensor):
            return local
        wrapped = self._kept(None if place is None else place.device).wrapped
        if leaf not in wrapped:
            # Not `from_local`: it would move the shard to the device of the mesh.
            wrapped[leaf] = _with_local(value, local)
        return wrapped[leaf]


def _with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    names, context = tensor.__tensor_flatten__()  # type: ignore[no-untyped-call]
    inner = {name: getattr(tensor, name) for name in names}  # the shard; since 2.13 also its mesh
    inner = {key: local if isinstance(part, torch.Tensor) else part for key, part in inner.items()}
    unflatten: Any = DTensor.__tensor_unflatten__
    made: torch.Tensor = unflatten(inner, context, tensor.shape, tensor.stride())
    detached = made.detach()
    assert isinstance(detached, DTensor)
    return detached
