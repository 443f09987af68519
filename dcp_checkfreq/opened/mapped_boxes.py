"""Boxes that lie in one piece in a file of a local disk, as memory that is mapped: no copy."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from dcp_checkfreq.dcp.item_reads import ItemRead
from dcp_checkfreq.errors import BrokenShard
from dcp_checkfreq.shards.byte_spans import strides_of
from dcp_checkfreq.shards.fetch import told_damage
from dcp_checkfreq.shards.targets import TensorTarget
from dcp_checkfreq.storage.local.mapped import mapped
from dcp_checkfreq.storage.local.tier import LocalTier


class MappedBoxes:
    """Maps each file of a checkpoint once. Several threads may ask.

    Args:
        tier: folder of the checkpoint.
        sizes: exact size of each file in bytes.
    """

    def __init__(self, tier: LocalTier, sizes: Mapping[str, int]) -> None:
        self._tier, self._sizes = tier, sizes
        self._files: dict[str, memoryview] = {}
        self._lock = threading.Lock()

    def box(self, job: ItemRead) -> torch.Tensor | None:
        """Return what a job would read, of the file's own memory and checked; None: it cannot be.

        Raises:
            BrokenShard: the file is missing or short, or a block of the box fails its digest.
        """
        target, want = job.target, job.want
        if not isinstance(target, TensorTarget):
            return None
        memory = self._file(want.file)
        start = want.payload_offset + want.start
        data = memory[start : want.payload_offset + want.stop]
        problem = told_damage(want, data, job.digests, repr(job.key))
        if problem is not None:
            raise BrokenShard(self._tier.location, problem, False)
        at = want.payload_offset + target.start_bytes
        if at % target.dtype.itemsize:
            return None  # another writer's, which aligns otherwise
        size = target.stop_bytes - target.start_bytes
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=at)
        return flat.view(target.dtype).as_strided(target.tensor.shape, strides_of(target.shape))

    def _file(self, name: str) -> memoryview:
        with self._lock:
            memory = self._files.get(name)
            if memory is None:
                memory = self._files[name] = self._opened(name)
            return memory

    def _opened(self, name: str) -> memoryview:
        where, expected = self._tier.location, self._sizes[name]
        try:
            memory = mapped(self._tier, name)
        except FileNotFoundError as error:
            raise BrokenShard(where, f"{name} is missing", False) from error
        except OSError as error:
            raise BrokenShard(where, f"{name}: {error}", False) from error
        if len(memory) != expected:
            why = f"{name} has {len(memory)} bytes, it was saved with {expected}"
            raise BrokenShard(where, why, False)
        return memory

    def let_go(self) -> None:
        """Forget the files. Tensors that were given out keep theirs."""
        with self._lock:
            self._files.clear()
