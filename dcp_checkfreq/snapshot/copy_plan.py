"""What of a state is copied, and the place in leased memory that each part has."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from dcp_checkfreq.shards.assign import next_place
from dcp_checkfreq.shards.self_described import describes_itself, stand_in
from dcp_checkfreq.snapshot.background_copy import PendingCopy
from dcp_checkfreq.snapshot.inventory import Inventory, Piece
from dcp_checkfreq.snapshot.optimizer_guard import Address
from dcp_checkfreq.snapshot.pool import Lease


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a piece of memory is copied to.

    Attributes:
        offset: in the buffer.
        device: of the buffer; None: host.
    """

    offset: int
    device: torch.device | None

    def part_of(self, memory: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return the tensor in the buffer that the copy goes into."""
        flat = memory[self.offset : self.offset + piece.size_bytes]
        return flat.view(piece.dtype).view(piece.shape)


class Asked(NamedTuple):
    """How a state is to be copied.

    Attributes:
        only: flat keys of the tensors that this rank writes; None: all of them.
        guarded: where the tensors are that nobody changes before the guard's word.
        on_gpu: copy guarded CUDA tensors into GPU memory.
        overlap_from_bytes: copy all CPU tensors at once if fewer bytes of them are guarded.
    """

    only: AbstractSet[str] | None
    guarded: AbstractSet[Address]
    on_gpu: bool
    overlap_from_bytes: int = 0


class CopyPlan:
    """What is copied, when, and where to. It keeps no tensor alive, and serves many snapshots.

    Attributes:
        inventory: of the state.
        asked: how to copy it.
        places: of every piece; None: not copied.
        at_once: numbers of the pieces to copy before the call returns, by device of the source.
        overlapped: of those to copy while training goes on.
    """

    def __init__(self, inventory: Inventory, asked: Asked) -> None:
        self.inventory, self.asked = inventory, asked
        only, guarded = asked.only, asked.guarded
        wanted = [
            piece if only is None or not only.isdisjoint(piece.paths) else None
            for piece in inventory.pieces
        ]
        host_overlaps = asked.overlap_from_bytes <= sum(
            piece.size_bytes
            for piece in wanted
            if piece is not None and piece.device.type == "cpu" and piece.address in guarded
        )
        sizes: dict[torch.device | None, int] = {}
        self.slots: list[Slot | None] = []
        self.at_once: dict[torch.device, list[int]] = {}
        self.overlapped: dict[torch.device, list[int]] = {}
        for number, piece in enumerate(wanted):
            if piece is None:
                self.slots.append(None)
                continue
            overlaps = piece.address in guarded and (host_overlaps or piece.device.type != "cpu")
            to_gpu = asked.on_gpu and overlaps and piece.device.type == "cuda"
            device = piece.device if to_gpu else None
            # As in the file, so that large parts can be written from where they lie.
            offset = next_place(sizes.get(device, 0), piece.size_bytes)
            sizes[device] = offset + piece.size_bytes
            self.slots.append(Slot(offset, device))
            group = self.overlapped if overlaps else self.at_once
            group.setdefault(piece.device, []).append(number)
        self.host_bytes = sizes.pop(None, 0)
        self.gpu_bytes = {device: size for device, size in sizes.items() if device is not None}
        self.copied_bytes = sum(piece.size_bytes for piece in wanted if piece is not None)

    def is_for(self, inventory: Inventory, asked: Asked) -> bool:
        """Tell whether a plan made of these would be this one."""
        return inventory is self.inventory and asked == self.asked


class Kept:
    """Tensors that snapshots of one plan make of the leased memory, each made once.

    It also keeps them alive: torch lets go of the GIL whenever a tensor dies, so that a thread
    which drops a snapshot of 800 tensors waits for seconds.

    Attributes:
        targets: what each piece is copied into; None: it is not copied.
        tensors: what stands in the snapshot for each tensor of the state, by number of leaf. A
            meta tensor stands for what another rank writes.
    """

    def __init__(self, plan: CopyPlan, leases: Leases, values: Sequence[object]) -> None:
        self.plan: CopyPlan | None = plan
        self.targets: list[torch.Tensor | None] = []
        self.tensors: dict[int, torch.Tensor] = {}
        stands: list[torch.Tensor] = []
        for piece, slot in zip(plan.inventory.pieces, plan.slots, strict=True):
            target = None if slot is None else slot.part_of(leases.of(slot.device).memory, piece)
            self.targets.append(target)
            if target is None:
                target = torch.empty(piece.shape, dtype=piece.dtype, device="meta")
            stands.append(target)
        inventory = plan.inventory
        for leaf, numbers in enumerate(inventory.pieces_of):
            if numbers is None:
                continue
            value, copies = values[leaf], [stands[number] for number in numbers]
            if isinstance(value, DTensor):
                # Not `from_local`: it would move the shard to the device of the mesh.
                self.tensors[leaf] = _with_local(value, *copies)
            elif isinstance(value, torch.Tensor) and describes_itself(value):
                self.tensors[leaf] = stand_in(inventory.paths[leaf], value, copies)
            else:
                (self.tensors[leaf],) = copies

    def forget(self) -> None:
        """Let go of all tensors, as some of the memory is to go."""
        self.plan = None
        self.targets.clear()
        self.tensors.clear()


class Leases:
    """What one snapshot holds: memory, and the copies that write into it."""

    def __init__(self, host: Lease) -> None:
        self._pid = os.getpid()  # in a forked child nothing writes into it, and it is not its own
        self.host = host
        self.on_device: dict[torch.device, Lease] = {}
        self.pending: list[PendingCopy] = []
        self.at_once_s = 0.0

    def of(self, device: torch.device | None) -> Lease:
        """Return the memory on this device; None: of the host."""
        return self.host if device is None else self.on_device[device]

    def kept(self, plan: CopyPlan, values: Sequence[object]) -> Kept:
        """Return the tensors of this plan: those that an earlier snapshot has left, or new ones."""
        leases = (self.host, *self.on_device.values())
        for kept in self.host.kept:
            if (
                isinstance(kept, Kept)
                and kept.plan is plan
                and all(kept in lease.kept for lease in leases)
            ):
                break
        else:
            kept = Kept(plan, self, values)
        for lease in leases:
            lease.keep(kept)
        return kept

    def handed_to(self, worker: threading.Thread) -> None:
        """Name the thread whose end ends the leases."""
        for lease in (self.host, *self.on_device.values()):
            lease.worker = worker

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Give the memory back, once nothing writes into it any more. May be called twice."""
        if self._pid != os.getpid():
            return
        for copying in self.pending:
            copying.let_go()
        for lease in (self.host, *self.on_device.values()):
            lease.release()


def _with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    names, context = tensor.__tensor_flatten__()  # type: ignore[no-untyped-call]
    inner = {name: getattr(tensor, name) for name in names}  # the shard; since 2.13 also its mesh
    inner = {key: local if isinstance(part, torch.Tensor) else part for key, part in inner.items()}
    unflatten: Any = DTensor.__tensor_unflatten__
    made: torch.Tensor = unflatten(inner, context, tensor.shape, tensor.stride())
    detached = made.detach()
    assert isinstance(detached, DTensor)
    return detached
