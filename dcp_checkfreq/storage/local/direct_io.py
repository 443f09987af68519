"""How bytes get to and from one file: direct I/O through huge pages, or the page cache, paced.

Calls are few and large. Each call that lets go of the GIL can cost a switch interval (5 ms) to get
it back while the training loop is busy in Python, whatever the call itself takes.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence

from dcp_checkfreq.runtime.crew import Crew, Task
from dcp_checkfreq.storage.local.abilities import is_refusal
from dcp_checkfreq.storage.local.huge_pages import (
    BOUNCE_BYTES,
    address_of,
    give_back,
    take,
)
from dcp_checkfreq.storage.local.regular import open_regular

ALIGN_BYTES = 4096  # covers every block size and DMA alignment in use
BATCH_BYTES = 64 << 20  # one request to the kernel; also the pace of buffered writing
_MAX_IN_FLIGHT = 2  # batches per file: one under way, one waiting so that the disk never does
_MAX_VECTORS = 1000  # the kernel takes 1024
# From here on a piece is written from where it lies, if it is aligned; smaller ones are gathered.
_IN_PLACE_FROM_BYTES = 128 << 10
# Shorter copies take less than getting the GIL back after them.
_COPY_WITHOUT_GIL_FROM_BYTES = 512 << 10

_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None, use_errno=True)


def preallocate(fd: int, size_bytes: int) -> None:
    """Reserve the file's blocks, so that a full disk is noticed before the first byte."""
    if not size_bytes:
        return
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if not is_refusal(error):
            raise


def set_direct(fd: int, *, on: bool) -> bool:
    """Switch direct I/O of an open file; False where the file system has none."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if on else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, wanted)
    except OSError as error:
        if not is_refusal(error):
            raise
        return False
    return True


def write_all(fd: int, vectors: Sequence[memoryview], offset: int) -> int:
    """Write all of ``vectors`` at ``offset`` and return the offset after them."""
    waiting = list(vectors)
    while waiting:
        written = os.pwritev(fd, waiting, offset)
        offset += written
        while waiting and written >= len(waiting[0]):
            written -= len(waiting.pop(0))
        if waiting and written:
            waiting[0] = waiting[0][written:]
    return offset


def write_buffered(fd: int, pieces: Iterable[memoryview]) -> int:
    """Write through the page cache, keeping the disk busy meanwhile; return the bytes written."""
    offset = 0
    batch: list[memoryview] = []
    batch_bytes = 0
    for piece in pieces:
        if not len(piece):
            continue
        batch.append(piece)
        batch_bytes += len(piece)
        if batch_bytes >= BATCH_BYTES or len(batch) >= _MAX_VECTORS:
            start, offset = offset, write_all(fd, batch, offset)
            _start_writeback(fd, start, offset - start)
            batch, batch_bytes = [], 0
    return write_all(fd, batch, offset)


def _start_writeback(fd: int, offset: int, size_bytes: int) -> None:
    """Hand dirty pages to the disk now, rather than all at once in the final fdatasync."""
    if hasattr(_libc, "sync_file_range"):
        # Only a hint: the fdatasync at the end is what makes the bytes durable, and reports errors.
        _libc.sync_file_range(
            fd,
            ctypes.c_int64(offset),
            ctypes.c_int64(size_bytes),
            ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
        )


def write_direct(fd: int, pieces: Iterable[memoryview]) -> int:
    """Write past the page cache; return the bytes written.

    Large pieces that lie aligned in memory and in the file are written from where they are.
    Everything else is gathered in bounce buffers, one being filled while others are written. The
    file must be open for direct I/O.
    """
    with _DirectWriter(fd) as writer:
        for piece in pieces:
            writer.add(piece)
        return writer.finish()


class _DirectWriter:
    """Gathers pieces into aligned vectors. The stream position of each vector is aligned."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._offset = 0  # of the first byte that is in no batch yet
        self._bounce = take()
        self._vectors: list[memoryview] = []
        self._batch_bytes = 0  # in self._vectors
        self._used = 0  # bytes of the bounce buffer in self._vectors or gathered
        self._gathered = 0  # bytes at the end of those, not in self._vectors yet
        self._io = Crew(1, "checkfreq-io")
        self._in_flight: deque[tuple[Task[int], memoryview]] = deque()

    def __enter__(self) -> _DirectWriter:
        return self

    def __exit__(self, *_: object) -> None:
        # Whatever happened: no write may be under way when the file and the buffers go.
        for job, _bounce in self._in_flight:
            job.cancel()
        self._io.close()
        give_back(self._bounce)
        for _job, bounce in self._in_flight:
            give_back(bounce)

    def add(self, piece: memoryview) -> None:
        size = len(piece)
        used = self._used
        if size < _IN_PLACE_FROM_BYTES and used + size < BOUNCE_BYTES:
            # By far the most frequent case, and the same as `_gather` makes of it.
            self._bounce[used : used + size] = piece
            self._used = used + size
            self._gathered += size
            return
        if size >= _IN_PLACE_FROM_BYTES and not piece.readonly:
            in_place = self._aligned_part(piece, size)
            if in_place:
                self._add_vector(piece[:in_place])
                piece = piece[in_place:]
        self._gather(piece)

    def _aligned_part(self, piece: memoryview, size: int) -> int:
        if self._gathered % ALIGN_BYTES or address_of(piece) % ALIGN_BYTES:
            return 0
        return size - size % ALIGN_BYTES

    def _add_vector(self, vector: memoryview) -> None:
        self._close_gathered()
        self._vectors.append(vector)
        self._batch_bytes += len(vector)
        if self._batch_bytes >= BATCH_BYTES or len(self._vectors) >= _MAX_VECTORS:
            self._flush()

    def _gather(self, piece: memoryview) -> None:
        done, size = 0, len(piece)
        while done < size:
            part = min(size - done, BOUNCE_BYTES - self._used)
            copy_bytes(self._bounce, self._used, piece, done, part)
            self._used += part
            self._gathered += part
            done += part
            if self._used == BOUNCE_BYTES:
                self._flush()

    def _close_gathered(self) -> None:
        if self._gathered:
            self._vectors.append(self._bounce[self._used - self._gathered : self._used])
            self._batch_bytes += self._gathered
            self._gathered = 0

    def _flush(self) -> None:
        """Hand the batch to the I/O thread, and go on with another buffer."""
        self._close_gathered()
        job = self._io.start(functools.partial(write_all, self._fd, self._vectors, self._offset))
        self._in_flight.append((job, self._bounce))
        self._offset += self._batch_bytes
        self._vectors, self._batch_bytes, self._used = [], 0, 0
        if len(self._in_flight) < _MAX_IN_FLIGHT:
            self._bounce = take()
        else:
            oldest, self._bounce = self._in_flight.popleft()
            oldest.result()

    def finish(self) -> int:
        total = self._offset + self._batch_bytes + self._gathered
        loose = self._gathered % ALIGN_BYTES
        if loose:
            pad = ALIGN_BYTES - loose
            self._bounce[self._used : self._used + pad] = bytes(pad)
            self._used += pad
            self._gathered += pad
        self._flush()
        for job, _bounce in self._in_flight:
            job.result()
        if loose:
            os.ftruncate(self._fd, total)
        return total


def copy_bytes(
    target: memoryview, target_at: int, source: memoryview, source_at: int, size: int
) -> None:
    """Copy ``size`` bytes between flat views, without the GIL when that is worth it."""
    if size >= _COPY_WITHOUT_GIL_FROM_BYTES and not source.readonly:
        ctypes.memmove(address_of(target) + target_at, address_of(source) + source_at, size)
    else:
        target[target_at : target_at + size] = source[source_at : source_at + size]


class FileReader:
    """An open local file. Aligned ranges into aligned memory go past the page cache."""

    def __init__(self, path: str, *, direct_io: bool) -> None:
        self._path = path
        self._fd, self.size_bytes = open_regular(path)
        self._direct_fd: int | None = None
        self._refuses_direct = False
        self._lock = threading.Lock()
        if direct_io:
            try:
                self._direct_fd, _ = open_regular(path, os.O_DIRECT)
            except OSError as error:
                if not is_refusal(error):
                    self.close()
                    raise

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` on; `EOFError` if the file ends before."""
        if offset + len(target) > self.size_bytes:
            raise EOFError(
                f"{self._path} has {self.size_bytes} bytes, "
                f"{offset + len(target)} were expected at least"
            )
        done = 0
        if self._direct_fd is not None and len(target) >= ALIGN_BYTES and not offset % ALIGN_BYTES:
            aligned = len(target) - len(target) % ALIGN_BYTES
            if not address_of(target) % ALIGN_BYTES:
                done = self._fill_directly(self._direct_fd, offset, target[:aligned])
        self._fill(self._fd, offset + done, target[done:])

    def _fill_directly(self, fd: int, offset: int, target: memoryview) -> int:
        if self._refuses_direct:
            return 0
        try:
            return self._fill(fd, offset, target)
        except OSError as error:
            if not is_refusal(error):
                raise
            self._refuses_direct = True  # it could be opened, and not be read
            return 0

    def _fill(self, fd: int, offset: int, target: memoryview) -> int:
        done = 0
        while done < len(target):
            read = os.preadv(fd, [target[done:]], offset + done)
            if not read:
                raise EOFError(f"{self._path} ends at {offset + done} bytes, it was longer before")
            done += read
            if fd == self._direct_fd and read % ALIGN_BYTES:
                break  # a short direct read: the page cache takes the rest
        return done

    def close(self) -> None:
        """Close the file. May be called twice."""
        with self._lock:
            fds, self._fd, self._direct_fd = (self._fd, self._direct_fd), -1, None
        for fd in fds:
            if fd is not None and fd >= 0:
                os.close(fd)
