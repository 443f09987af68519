"""Memory for snapshots, on the host or on a GPU, kept for the life of the process.

Reuse is the point: a copy into memory that the process already owns is 4 to 9 times faster than
one into new pages. One slot by default; a save that comes while it is leased waits until its bytes
are on storage. Pinned where there is a CUDA device, on huge pages elsewhere.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from dcp_checkfreq.errors import SnapshotFailed
from dcp_checkfreq.runtime.clock import Clock, SystemClock
from dcp_checkfreq.storage.local.huge_pages import HUGE_PAGE_BYTES, huge_buffer

_log = logging.getLogger(__name__)
_SLACK_BYTES = 64 << 20  # not worth a new allocation
_MOST_KEPT = 4  # jobs save few different states in turn: a model, its average, ...
_POLL_S = 0.2  # how often a waiting thread looks whether the holder's thread has died


class Keepable(Protocol):
    """What a snapshot leaves for later ones, made of leased memory."""

    def forget(self) -> None:
        """Let go of what is made of the memory: it goes now."""
        ...


class Lease:
    """The right to write one slot, until `release`, or until nobody has it any more.

    Attributes:
        memory: [size_bytes], uint8, starting at a multiple of 4096.
        worker: the thread that writes the bytes out, once it is known. When it ends without a
            release (its save failed before writing), the slot counts as free.
    """

    def __init__(self, pool: BufferPool, memory: torch.Tensor, number: int) -> None:
        self._pool, self.number = pool, number
        self.memory = memory
        self.worker: threading.Thread | None = None

    def __del__(self) -> None:
        self.release()

    def touch(self) -> None:
        """Have the system provide the memory now, if it has not yet."""
        if self._pool.is_untouched and not self.memory.is_pinned():
            ctypes.memset(self.memory.data_ptr(), 0, self.memory.nbytes)

    @property
    def kept(self) -> Sequence[Keepable]:
        """What the last snapshots in this memory have left, newest first."""
        return self._pool.kept

    def keep(self, one: Keepable) -> None:
        """Leave something for later snapshots. It goes when the memory goes."""
        self._pool._keep(one)

    def release(self) -> None:
        """Give the slot back; its content may change from now on. May be called twice."""
        self._pool._give_back(self)


class BufferPool:
    """A slot of memory, leased to one snapshot at a time. Thread-safe.

    Args:
        device: of the memory; None: host.
        wait_s: how long `lease` waits for the slot before it gives up.

    Attributes:
        kept: what the last snapshots have left for later ones, newest first.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        wait_s: float = 600.0,
        clock: Clock | None = None,
    ) -> None:
        self._device = device
        self._wait_s = wait_s
        self._clock = clock or SystemClock()
        self._pid = os.getpid()
        self._free = threading.Condition()
        self._memory: torch.Tensor | None = None
        self.kept: tuple[Keepable, ...] = ()
        # Weak: a save that is cut off at any place, as by Ctrl-C, leaves nothing that holds it.
        self._lease: weakref.ref[Lease] | None = None
        self._leased: int | None = None  # number of the lease that has the slot
        self._leases = 0  # so far
        self._leases_of_memory = 0  # how often this memory was leased

    @property
    def is_untouched(self) -> bool:
        """Whether no snapshot before the one that holds the lease has used the memory."""
        return self._leases_of_memory == 1

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that the pool holds now."""
        return 0 if self._memory is None else self._memory.nbytes

    def _begin_in_child(self) -> None:
        """Begin with nothing: the slot, and threads that wait for it, are those of the parent."""
        self._pid = os.getpid()
        self._free = threading.Condition()
        self._lease, self._leased = None, None
        self._memory, self.kept = None, ()

    def lease(self, size_bytes: int, *, fit: bool = False) -> Lease:
        """Wait for the slot, make it at least ``size_bytes`` large, and hand it out.

        Args:
            size_bytes: to lease.
            fit: also make it smaller if it is much too large.

        Raises:
            SnapshotFailed: the slot was not given back in time, or there is no memory.
        """
        if self._pid != os.getpid():
            self._begin_in_child()
        with self._free:
            self._wait()
            if self._memory is None or not self._suits(size_bytes, fit):
                self._let_go()  # the old one goes before the new one comes
                self._memory = _allocate(size_bytes, self._device)
                self._leases_of_memory = 0
            self._leases_of_memory += 1
            self._leases += 1
            lease = Lease(self, self._memory[:size_bytes], self._leases)
            self._lease, self._leased = weakref.ref(lease), self._leases
            return lease

    def _suits(self, size_bytes: int, fit: bool) -> bool:
        too_large = fit and self.held_bytes > 2 * size_bytes + _SLACK_BYTES
        return self.held_bytes >= size_bytes and not too_large

    def _wait(self) -> None:
        deadline_s = self._clock.monotonic_s() + self._wait_s
        collected = False
        while self._leased is not None:
            lease = None if self._lease is None else self._lease()
            worker = None if lease is None else lease.worker
            if worker is not None and not worker.is_alive():
                self._leased = None
                return
            del lease  # while this waits it may go
            if not collected:
                collected = True
                gc.collect()  # a failed save's frames may be all that holds the snapshot
                continue
            if self._clock.monotonic_s() >= deadline_s:
                raise SnapshotFailed(
                    f"the buffer of the save before is still being written after {self._wait_s} s"
                )
            self._free.wait(_POLL_S)

    def _give_back(self, lease: Lease) -> None:
        if self._pid != os.getpid():
            return
        with self._free:
            if self._leased == lease.number:
                self._leased = None
                self._free.notify_all()

    def _keep(self, one: Keepable) -> None:
        others = [other for other in self.kept if other is not one]
        self.kept = (one, *others[: _MOST_KEPT - 1])
        for other in others[_MOST_KEPT - 1 :]:
            other.forget()

    def drop(self) -> None:
        """Free the memory if no one has leased it."""
        if self._pid != os.getpid():
            return
        with self._free:
            if self._leased is None:
                self._let_go()

    def _let_go(self) -> None:
        if self._memory is not None and self._device is None:
            _unpin(self._memory)
        self._memory = None
        gone, self.kept = self.kept, ()
        for one in gone:
            one.forget()


def allocated_bytes(size_bytes: int) -> int:
    """Return how much memory is taken for a buffer of so many bytes: whole huge pages."""
    return -(-max(size_bytes, 1) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def _allocate(size_bytes: int, device: torch.device | None) -> torch.Tensor:
    size = allocated_bytes(size_bytes)
    pinned = device is None and torch.cuda.is_available()
    kind = "pinned host" if pinned else "pageable host" if device is None else str(device)
    _log.info("snapshot buffer: taking %.1f MiB of %s memory", size / (1 << 20), kind)
    try:
        if device is not None:
            return torch.empty(size, dtype=torch.uint8, device=device)
        memory = torch.frombuffer(huge_buffer(size), dtype=torch.uint8)
        if pinned:
            _pin(memory)
        return memory
    except (MemoryError, OSError, RuntimeError) as error:
        raise SnapshotFailed(f"no {size} bytes of {kind} memory for the buffer: {error}") from error


_ON_ALL_GPUS = 1  # cudaHostRegisterPortable


def _pin(memory: torch.Tensor) -> None:
    """Pin memory that is there already.

    Torch's own pinned memory is rounded up to a power of two, is never given back to the system,
    and has no huge pages, which direct I/O needs.
    """
    ctypes.memset(memory.data_ptr(), 0, memory.nbytes)  # pages of a kind that can be large
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, _ON_ALL_GPUS))


def _unpin(memory: torch.Tensor) -> None:
    if torch.cuda.is_available() and memory.is_pinned():
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(cuda.cudaHostUnregister(memory.data_ptr()))


# One per process, so that a writer made anew for every save, as DCP's guides do, reuses it.
PROCESS_POOL = BufferPool()

_device_pools: dict[torch.device, BufferPool] = {}
_device_pools_lock = threading.Lock()


def _in_child() -> None:
    global _device_pools_lock
    _device_pools_lock = threading.Lock()
    _device_pools.clear()  # nothing of CUDA works in a forked child


os.register_at_fork(after_in_child=_in_child)


def device_pool(device: torch.device) -> BufferPool:
    """Return the process's pool of memory on this GPU."""
    with _device_pools_lock:
        return _device_pools.setdefault(device, BufferPool(device))


def drop_device_pools() -> None:
    """Give back GPU memory that no snapshot uses."""
    with _device_pools_lock:
        pools = list(_device_pools.values())
    for pool in pools:
        pool.drop()
