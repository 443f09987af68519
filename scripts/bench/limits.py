"""What the disk can do with no checkpoint format in the way."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

HUGE_BYTES = 2 << 20
REQUEST_BYTES = 8 << 20
THREADS = 4
PREAD_BYTES = 16 << 20
BLOCK_BYTES = 4096  # O_DIRECT lengths are rounded up to this


@cache
def huge_buffers() -> list[memoryview]:
    """Return one random-filled buffer per thread in 2 MiB pages, made once per process."""
    arena = mmap.mmap(
        -1, THREADS * REQUEST_BYTES + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    arena.madvise(mmap.MADV_HUGEPAGE)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(arena)) % HUGE_BYTES
    view = memoryview(arena)
    buffers = [view[first + n * REQUEST_BYTES :][:REQUEST_BYTES] for n in range(THREADS)]
    for buffer in buffers:
        buffer[:] = os.urandom(REQUEST_BYTES)
    return buffers


@cache
def pread_buffer() -> memoryview:
    """Return the buffer of `read_pread`, made once per process."""
    return memoryview(bytearray(PREAD_BYTES))


def write_direct(path: Path, size_bytes: int) -> None:
    """Write and fdatasync a new file: preallocated, 8 MiB O_DIRECT requests, 4 threads."""
    fd = _open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(fd, 0, max(size_bytes, 1))

        def write(buffer: memoryview, offset: int, length: int) -> None:
            done = os.pwrite(fd, buffer[: _round_up(length)], offset)
            if done < length:
                raise OSError(errno.EIO, "short write", str(path))

        _in_threads(write, size_bytes)
        os.ftruncate(fd, size_bytes)
        os.fdatasync(fd)
    finally:
        os.close(fd)


def read_direct(path: Path, size_bytes: int) -> None:
    """Read a file: 8 MiB O_DIRECT requests, 4 threads, each into its own reused buffer."""
    fd = _open_direct(path, os.O_RDONLY)
    try:

        def read(buffer: memoryview, offset: int, length: int) -> None:
            if os.preadv(fd, [buffer[: _round_up(length)]], offset) < length:
                raise EOFError(f"{path} ends before {offset + length}")

        _in_threads(read, size_bytes)
    finally:
        os.close(fd)


def read_pread(path: Path, size_bytes: int) -> None:
    """Read a file with one thread and 16 MiB buffered requests into one reused buffer."""
    buffer = pread_buffer()
    fd = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < size_bytes:
            got = os.preadv(fd, [buffer], done)
            if not got:
                raise EOFError(f"{path} ends at {done}")
            done += got
    finally:
        os.close(fd)


def _in_threads(request: Callable[[memoryview, int, int], None], size_bytes: int) -> None:
    def every_fourth(thread: int) -> None:
        for offset in range(thread * REQUEST_BYTES, size_bytes, THREADS * REQUEST_BYTES):
            request(huge_buffers()[thread], offset, min(REQUEST_BYTES, size_bytes - offset))

    huge_buffers()  # made before the threads start, so that they share one set
    with ThreadPoolExecutor(THREADS, thread_name_prefix="bench-limit") as pool:
        for job in [pool.submit(every_fourth, n) for n in range(THREADS)]:
            job.result()


def _round_up(length: int) -> int:
    return -(-length // BLOCK_BYTES) * BLOCK_BYTES


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        if flags & os.O_CREAT:
            path.unlink(missing_ok=True)  # Linux may create it before it refuses O_DIRECT
        return os.open(path, flags, 0o600)
