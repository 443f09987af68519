"""Copies a state dict into a leased buffer and hands DCP a state dict that lives there."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_checkfreq.errors import SnapshotFailed, UnsupportedState
from dcp_checkfreq.garbage import collector_held
from dcp_checkfreq.shards.assign import next_place
from dcp_checkfreq.shards.codec import check_storable, is_sharded_tensor, memory_of
from dcp_checkfreq.snapshot.copies import copy_tensors
from dcp_checkfreq.snapshot.pool import PROCESS_POOL, HostPool, Lease


class _Staged(dict[str, Any]):
    """A state dict in a leased buffer. When it goes, the lease goes."""

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # to another process goes the content, not the lease


@dataclass(slots=True)
class _Copy:
    source: torch.Tensor
    offset: int  # in the buffer


class _Survey:
    """Finds every tensor of a state and gives each distinct memory a place."""

    def __init__(self) -> None:
        self.copies: list[_Copy] = []
        self.position: dict[int, int] = {}  # id of a tensor object: position in copies
        self.size_bytes = 0
        self._known: dict[tuple[object, ...], int] = {}

    def visit(self, value: object, path: str) -> None:
        """Look where DCP looks: into mappings and lists. What else there is becomes a byte item."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self.position:
                self._tensor(value, path)
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                self.visit(inner, f"{path}.{key}" if path else str(key))
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                self.visit(inner, f"{path}.{number}")

    def _tensor(self, tensor: torch.Tensor, path: str) -> None:
        if is_sharded_tensor(tensor):
            raise UnsupportedState(
                path,
                "ShardedTensor",
                "only DTensor shards can be staged. Give FSDP a device_mesh, use fully_shard, "
                "or save with dcp.save",
            )
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local = local.detach()
        check_storable(local, path)
        identity = memory_of(local) if local.nbytes else (id(tensor),)
        position = self._known.get(identity)
        if position is None:
            position = self._known[identity] = len(self.copies)
            # As in the file, so that large parts can be written from where they lie.
            offset = next_place(self.size_bytes, local.nbytes)
            self.copies.append(_Copy(local, offset))
            self.size_bytes = offset + local.nbytes
        self.position[id(tensor)] = position


class Stager:
    """Stages for one writer; the memory comes from a pool that all writers share."""

    def __init__(self, pool: HostPool = PROCESS_POOL) -> None:
        self._pool = pool
        self._lease: Lease | None = None

    def __reduce__(self) -> tuple[type[Stager], tuple[()]]:
        return Stager, ()  # a lease means nothing in another process

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the state that no later change of the original can reach.

        Tensors are copied into the leased buffer: views only their own elements, tied ones once.
        Everything else is deep-copied. On CUDA the copies have arrived when this returns. Waits
        while the snapshot before is still being written out.

        Raises:
            UnsupportedState: a tensor that could not be written, or loaded again.
            SnapshotFailed: no buffer, or a value that cannot be copied.
        """
        with collector_held():
            survey = _Survey()
            survey.visit(state_dict, "")
        lease = self._pool.lease(survey.size_bytes)
        try:
            with collector_held():
                staged = _Staged(self._copy(state_dict, survey, lease))
        except (TypeError, RecursionError, copy.Error) as error:
            lease.release()
            raise SnapshotFailed(f"a value of the state cannot be copied: {error}") from error
        except BaseException:
            lease.release()
            raise
        self._lease = lease
        weakref.finalize(staged, lease.release).atexit = False
        return staged

    def _copy(self, state_dict: dict[str, Any], survey: _Survey, lease: Lease) -> dict[str, Any]:
        parts = _Parts(lease)
        places = [parts.place(item) for item in survey.copies]
        on_device = copy_tensors([item.source for item in survey.copies], places)

        def rebuilt(value: Any) -> Any:
            """Return the same nesting of mappings and lists, with tensors in the buffer."""
            if isinstance(value, DTensor):
                return parts.like(value, survey.copies[survey.position[id(value)]])
            if isinstance(value, torch.Tensor):
                return places[survey.position[id(value)]]
            if isinstance(value, Mapping):
                return {key: rebuilt(inner) for key, inner in value.items()}
            if isinstance(value, list):
                return [rebuilt(inner) for inner in value]
            return _own_copy(value)

        staged = {key: rebuilt(value) for key, value in state_dict.items()}
        lease.tensors = parts.used
        if on_device:
            torch.accelerator.current_stream().synchronize()
        return staged

    def handed_to(self, worker: threading.Thread) -> None:
        """Name the thread that writes the snapshot out; its end ends the lease."""
        if self._lease is not None:
            self._lease.worker = worker

    def release(self) -> None:
        """Say that the snapshot's bytes are on storage, or given up. May be called twice."""
        # Taken out first: once it is released, `stage` in another thread may set the next one.
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


def _own_copy(value: Any) -> Any:
    """Deep-copy what DCP will pickle. Its tensors get memory of their own.

    Pickling a tensor writes all of the storage behind it: for a view of the buffer that would be
    the whole snapshot, and for a view of the user's memory all that it is a view of.
    """
    memo: dict[int, Any] = {}

    def clone(inner: Any) -> None:
        if isinstance(inner, torch.Tensor) and not isinstance(inner, DTensor):
            copied = inner.detach().cpu().clone(memory_format=torch.contiguous_format)
            memo[id(inner)] = copied
        elif isinstance(inner, Mapping):
            for element in inner.values():
                clone(element)
        elif isinstance(inner, (list, tuple)):
            for element in inner:
                clone(element)

    clone(value)
    return copy.deepcopy(value, memo)  # takes what is in its memo as copied already


class _Parts:
    """Tensors that are parts of the buffer: those of the snapshot before, where they fit."""

    def __init__(self, lease: Lease) -> None:
        self._memory = lease.memory
        self._before = lease.tensors
        self.used: dict[Hashable, torch.Tensor] = {}

    def place(self, item: _Copy) -> torch.Tensor:
        """Return the tensor that the copy goes into."""
        source = item.source
        key = (item.offset, source.dtype, source.shape)
        part = self._before.get(key)
        if part is None:
            flat = self._memory[item.offset : item.offset + source.nbytes]
            part = flat.view(source.dtype).view(source.shape)
        self.used[key] = part
        return part

    def like(self, tensor: DTensor, item: _Copy) -> torch.Tensor:
        """Return a DTensor like ``tensor`` whose local shard is where the copy goes."""
        local = self.place(item)
        layout = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        key = (item.offset, local.dtype, local.shape, layout)
        part = self._before.get(key)
        if part is None:
            part = DTensor.from_local(
                local,
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
        self.used[key] = part
        return part
