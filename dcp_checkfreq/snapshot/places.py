"""What of a state is copied, and the place in leased memory that each part has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_checkfreq.errors import SnapshotFailed
from dcp_checkfreq.shards.assign import next_place
from dcp_checkfreq.snapshot.guard import Address, address_of
from dcp_checkfreq.snapshot.lanes import Lane
from dcp_checkfreq.snapshot.pool import Lease
from dcp_checkfreq.snapshot.survey import Found, Survey


class Item:
    """A distinct piece of memory to copy, and where to."""

    __slots__ = ("device", "found", "offset", "overlaps")

    def __init__(self, found: Found, *, overlaps: bool, device: torch.device | None) -> None:
        self.found = found
        self.overlaps = overlaps
        self.device = device  # of the buffer; None: host
        self.offset = 0

    def part_of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the buffer that the copy goes into."""
        source = self.found.local
        flat = memory[self.offset : self.offset + source.nbytes]
        return flat.view(source.dtype).view(source.shape)


class CopyPlan:
    """What is copied, when, and where to."""

    def __init__(
        self,
        survey: Survey,
        only: AbstractSet[str] | None,
        guarded: AbstractSet[Address],
        *,
        on_gpu: bool,
    ) -> None:
        self.items: dict[Hashable, Item] = {}
        sizes: dict[torch.device | None, int] = {}
        for one in survey.found:
            if only is not None and only.isdisjoint(survey.paths[id(one.tensor)]):
                continue
            if one.memory in self.items:
                continue
            overlaps = address_of(one.local) in guarded
            to_gpu = on_gpu and overlaps and one.local.is_cuda
            item = Item(one, overlaps=overlaps, device=one.local.device if to_gpu else None)
            # As in the file, so that large parts can be written from where they lie.
            item.offset = next_place(sizes.get(item.device, 0), one.local.nbytes)
            sizes[item.device] = item.offset + one.local.nbytes
            self.items[one.memory] = item
        self.host_bytes = sizes.pop(None, 0)
        self.gpu_bytes = {device: size for device, size in sizes.items() if device is not None}
        self.copied_bytes = sum(item.found.local.nbytes for item in self.items.values())

    @property
    def overlapped_host_bytes(self) -> int:
        """Bytes of CPU tensors that a thread would copy."""
        return sum(item.found.local.nbytes for item in self._overlapped_on_host())

    def overlap_no_host_memory(self) -> None:
        """Copy all CPU tensors before the call returns."""
        for item in self._overlapped_on_host():
            item.overlaps = False

    def _overlapped_on_host(self) -> list[Item]:
        return [item for item in self.items.values() if item.overlaps and item.found.local.is_cpu]


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
    """Tensors that are parts of the buffers: those of the snapshot before, where they fit.

    Each lease keeps those of its own memory, so that none outlives it.
    """

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._used: dict[int, tuple[Lease, dict[Hashable, torch.Tensor]]] = {}

    def place(self, item: Item) -> torch.Tensor:
        """Return the tensor that the copy goes into."""
        source = item.found.local
        lease = self._leases.of(item.device)
        key = (item.offset, source.dtype, source.shape)
        return self._kept(lease, key, lambda: item.part_of(lease.memory))

    def absent(self, one: Found) -> torch.Tensor:
        """Return a meta tensor that stands for what another rank writes."""
        local = one.local
        return self._kept(
            self._leases.host,
            ("absent", local.dtype, local.shape),
            lambda: torch.empty(local.shape, dtype=local.dtype, device="meta"),
        )

    def like(self, tensor: DTensor, local: torch.Tensor) -> torch.Tensor:
        """Return a DTensor like ``tensor`` with this local shard, wherever that is."""
        layout = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        key = (local.data_ptr(), local.dtype, local.shape, layout)
        lease = self._leases.of(local.device if local.is_cuda else None)
        # Not `from_local`: it would move the shard to the device of the mesh.
        return self._kept(lease, key, lambda: _with_local(tensor, local))

    def _kept(self, lease: Lease, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        _, used = self._used.setdefault(id(lease), (lease, {}))
        if key not in used:
            part = lease.tensors.get(key)
            used[key] = make() if part is None else part
        return used[key]

    def keep(self) -> None:
        """Leave them to the next snapshot, and let go of those that were not used."""
        for lease, used in self._used.values():
            lease.tensors = used


def _with_local(tensor: DTensor, local: torch.Tensor) -> torch.Tensor:
    names, context = tensor.__tensor_flatten__()  # type: ignore[no-untyped-call]
    inner = {name: getattr(tensor, name) for name in names}  # the shard; since 2.13 also its mesh
    inner = {key: local if isinstance(part, torch.Tensor) else part for key, part in inner.items()}
    unflatten: Any = DTensor.__tensor_unflatten__
    made: torch.Tensor = unflatten(inner, context, tensor.shape, tensor.stride())
    return made.detach()
