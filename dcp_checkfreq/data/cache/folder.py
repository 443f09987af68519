"""The folder of a file cache: whole files, partial files, and how many bytes they are.

    books             the lock that guards all changes below, and the bytes in use
    partial/<name>    being copied; its writer holds it exclusively
    whole/ab/<name>   served; a reader holds it shared

All holds are flocks, so a killed process holds nothing. A partial that no process holds is dead.
Sizes are set, files renamed and removed only under the lock of the byte count; copying needs none.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dcp_checkfreq.data.cache.byte_count import ByteCount, locked_byte_count, peek
from dcp_checkfreq.data.cache.eviction import (
    CachedFile,
    bytes_to_free,
    charge_bytes,
    plan_eviction,
)
from dcp_checkfreq.runtime.clock import Clock
from dcp_checkfreq.runtime.flock import HeldFile, pauses

_BYTE_COUNT_WAIT_S = 10.0  # held for microseconds, or for a count of all files after a crash
_FILL_WAIT_S = 120.0  # for another process that is copying the same file
_BATCH = 64  # so many files are removed before others get the lock of the byte count again
_ROUNDS = 8  # so often a plan is made before the source is read instead


class CacheFolder:
    """One process's view of the folder. Thread-safe; not for use in a forked child.

    Every method but `hold` may raise OSError, after which the folder is as good as before.

    Args:
        root: the folder, on a file system where `flock_works`.
        max_bytes: what all files may charge together, see `charge_bytes`.
        evicts: whether whole files make room for new ones.
        low: filled down to this part of ``max_bytes`` when files are evicted.
        clock: for waiting, and for the order of use.
        boot: names the boot of this machine; files of another one are removed.
    """

    def __init__(
        self, root: str, max_bytes: int, *, evicts: bool, low: float, clock: Clock, boot: str
    ) -> None:
        self._byte_count_path = os.path.join(root, "books")
        self._partial = os.path.join(root, "partial")
        self._whole = os.path.join(root, "whole")
        self._max_bytes = max_bytes
        self._evicts = evicts
        self._low = low
        self._clock = clock
        self._boot = boot
        self._victims: deque[CachedFile] = deque()  # touched only under the lock of the byte count

    def prepare(self) -> None:
        """Make the folders, remove what dead processes left, and come down to ``max_bytes``."""
        os.makedirs(self._partial, exist_ok=True)
        os.makedirs(self._whole, exist_ok=True)
        self._make_room(0, evicts=True)

    def used_bytes(self) -> int:
        """Return the charged bytes of all files."""
        with self._byte_count() as byte_count:
            return byte_count.used_bytes

    def hold(self, name: str) -> HeldFile | None:
        """Return a whole file, held shared; None if it is not there or about to go.

        Raises:
            OSError: the folder cannot be read.
        """
        path = self._whole_path(name)
        try:
            file = HeldFile(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if file.try_lock(shared=True) and file.is_at(path):
                return file
        except OSError:
            file.close()
            raise
        file.close()
        return None

    def touch(self, file: HeldFile) -> None:
        """Note that a file is in use now.

        The order of use lies in the files' mtime by the wall clock: atime is off or coarse on most
        mounts, and a counter would be one more thing that all processes write on every hit. If
        the clock jumps, files go in another order and nothing else happens.
        """
        now_ns = int(self._clock.wall_s() * 1e9)
        os.utime(file.fd, ns=(now_ns, now_ns))

    def claim(self, name: str) -> tuple[HeldFile, bool]:
        """Return either the whole file and True, or an empty partial to be filled and False.

        Waits while another process fills it.

        Raises:
            TimeoutError: it took too long.
        """
        path = os.path.join(self._partial, name)
        until_s = self._clock.monotonic_s() + _FILL_WAIT_S
        for pause_s in pauses():
            whole = self.hold(name)
            if whole is not None:
                return whole, True
            partial = HeldFile(path, os.O_RDWR | os.O_CREAT)
            try:
                mine = partial.try_lock(shared=False) and partial.is_at(path)
                # Who filled it may have been faster than the look above.
                whole = self.hold(name) if mine else None
            except BaseException:
                partial.close()
                raise
            if whole is not None:
                self.abandon(partial)
                return whole, True
            if mine:
                return partial, False
            partial.close()
            if self._clock.monotonic_s() >= until_s:
                raise TimeoutError(
                    errno.ETIMEDOUT, "another process is copying the same file", path
                )
            self._clock.sleep(pause_s)
        raise AssertionError("pauses do not end")

    def reserve(self, partial: HeldFile, size_bytes: int) -> bool:
        """Give a claimed partial its size, making room if need be; False if there is none.

        No byte may be written to it before.
        """
        if not self._make_room(size_bytes, evicts=self._evicts, partial=partial):
            return False
        if size_bytes:
            os.posix_fallocate(partial.fd, 0, size_bytes)  # a full disk is noticed now, not midway
        return True

    def publish(self, partial: HeldFile, name: str) -> HeldFile:
        """Turn a filled partial into a whole file, and return it held shared.

        Raises:
            TimeoutError: others hold the byte count or the file for too long.
        """
        path = self._whole_path(name)
        with self._byte_count() as byte_count:
            if os.path.exists(path):  # came back while it could not be held for a moment
                self._remove(byte_count, partial)
            else:
                self.touch(partial)
                os.fchmod(partial.fd, 0o444)  # loaders should not write to it
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.rename(partial.path, path)
                partial.path = path
            # Evicting needs the byte count, but a process that waited for the partial may hold it.
            partial.lock_within(_BYTE_COUNT_WAIT_S, self._clock, shared=True)
        if partial.is_at(path):
            return partial
        partial.close()
        whole = self.hold(name)
        if whole is None:
            raise FileNotFoundError(errno.ENOENT, "went while it was published", path)
        return whole

    def abandon(self, partial: HeldFile) -> None:
        """Remove a claimed partial, and release it in any case."""
        if partial.closed:
            return
        try:
            with self._byte_count() as byte_count:
                if partial.try_lock(shared=False) and partial.is_at(partial.path):
                    self._remove(byte_count, partial)
        finally:
            partial.close()

    def is_full_for(self, size_bytes: int) -> bool:
        """Tell at a glance, without a lock, that `reserve` would find no room. May miss it."""
        if self._evicts:
            return False
        with os.scandir(self._partial) as partials:
            if any(partial.stat().st_size for partial in partials):
                return False  # one may be dead, and give room when it is removed
        used_bytes = peek(self._byte_count_path, self._boot)
        return used_bytes is not None and not self._fits(used_bytes, charge_bytes(size_bytes))

    @contextmanager
    def _byte_count(self) -> Iterator[ByteCount]:
        """Lock the byte count, corrected first if need be."""
        with locked_byte_count(
            self._byte_count_path, self._boot, self._clock, _BYTE_COUNT_WAIT_S
        ) as byte_count:
            if byte_count.must_clear or byte_count.must_count:
                byte_count.begin()
                if byte_count.must_clear:
                    self._sweep(byte_count)
                    for entry in self._entries():
                        self._remove_whole(byte_count, entry)
                byte_count.used_bytes = self._count()
            yield byte_count

    def _make_room(self, size_bytes: int, *, evicts: bool, partial: HeldFile | None = None) -> bool:
        """See that so many more bytes fit, and give them to the partial under the same lock."""
        need_bytes = charge_bytes(size_bytes)
        busy: set[str] = set()
        for _ in range(_ROUNDS):
            with self._byte_count() as byte_count:
                if partial is not None and partial.size_bytes():
                    self._resize(byte_count, partial, 0)  # what a dead process had reserved
                if partial is None or not self._fits(byte_count.used_bytes, need_bytes):
                    self._sweep(byte_count)
                if evicts:
                    self._evict(byte_count, need_bytes, busy)
                if self._fits(byte_count.used_bytes, need_bytes):
                    if partial is not None:
                        self._resize(byte_count, partial, size_bytes)
                    return True
                used_bytes = byte_count.used_bytes
            if not evicts:
                return False
            free_bytes = bytes_to_free(
                used_bytes=used_bytes,
                need_bytes=need_bytes,
                max_bytes=self._max_bytes,
                low=self._low,
            )
            # Looked at without the lock, for it may take seconds: checked again file by file.
            plan = plan_eviction(self._entries(), free_bytes=free_bytes, busy=busy)
            if not plan:
                return False
            self._victims = deque(plan)
        return False

    def _fits(self, used_bytes: int, need_bytes: int) -> bool:
        return used_bytes + need_bytes <= self._max_bytes

    def _evict(self, byte_count: ByteCount, need_bytes: int, busy: set[str]) -> None:
        """If there is no room, remove files of the plan: to the low mark, or for a batch."""
        if self._fits(byte_count.used_bytes, need_bytes):
            return
        goal_bytes = max(int(self._low * self._max_bytes), need_bytes)
        removed = 0
        while self._victims and byte_count.used_bytes + need_bytes > goal_bytes:
            if removed >= _BATCH and self._fits(byte_count.used_bytes, need_bytes):
                return
            victim = self._victims.popleft()
            if self._remove_whole(byte_count, victim):
                removed += 1
            else:
                busy.add(victim.name)

    def _remove_whole(self, byte_count: ByteCount, victim: CachedFile) -> bool:
        """Remove a file unless it is held or was used since; tell whether it is gone."""
        path = self._whole_path(victim.name)
        try:
            file = HeldFile(path, os.O_RDONLY)
        except FileNotFoundError:
            return True
        try:
            if not file.try_lock(shared=False) or not file.is_at(path):
                return False
            if os.fstat(file.fd).st_mtime_ns != victim.last_use_ns:
                return False
            self._remove(byte_count, file)
            return True
        finally:
            file.close()

    def _sweep(self, byte_count: ByteCount) -> None:
        """Remove the partials of dead processes."""
        for name in os.listdir(self._partial):
            path = os.path.join(self._partial, name)
            try:
                file = HeldFile(path, os.O_RDWR)
            except FileNotFoundError:
                continue
            try:
                if file.try_lock(shared=False) and file.is_at(path):
                    self._remove(byte_count, file)
            finally:
                file.close()

    def _remove(self, byte_count: ByteCount, file: HeldFile) -> None:
        byte_count.begin()
        size_bytes = file.size_bytes()
        os.unlink(file.path)
        byte_count.used_bytes -= charge_bytes(size_bytes)

    def _resize(self, byte_count: ByteCount, partial: HeldFile, size_bytes: int) -> None:
        byte_count.begin()
        old_bytes = partial.size_bytes()
        os.ftruncate(partial.fd, size_bytes)
        byte_count.used_bytes += charge_bytes(size_bytes) - charge_bytes(old_bytes)

    def _count(self) -> int:
        """Return the charged bytes of all files; the byte count must be locked."""
        with os.scandir(self._partial) as partials:
            partial_bytes = sum(charge_bytes(partial.stat().st_size) for partial in partials)
        return partial_bytes + sum(charge_bytes(entry.size_bytes) for entry in self._entries())

    def _entries(self) -> list[CachedFile]:
        """Return the whole files; one that is removed meanwhile may be left out."""
        entries = []
        for folder in os.listdir(self._whole):
            with os.scandir(os.path.join(self._whole, folder)) as found:
                for file in found:
                    with suppress(FileNotFoundError):
                        stat = file.stat(follow_symlinks=False)
                        entries.append(CachedFile(file.name, stat.st_size, stat.st_mtime_ns))
        return entries

    def _whole_path(self, name: str) -> str:
        return os.path.join(self._whole, name[:2], name)
