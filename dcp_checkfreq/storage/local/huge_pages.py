"""Reused, page-aligned buffers on huge pages, for direct I/O.

Direct I/O pays only from 2 MiB pages: with 4 KiB pages a request is cut into many small ones and
is slower than buffered writes (`docs/decisions/0001-direct-io.md`). Making such a buffer costs
page faults, so they are kept for the life of the process: a writer made anew for every save finds
them warm.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

BOUNCE_BYTES = 8 << 20
HUGE_PAGE_BYTES = 2 << 20

_MADV_HUGEPAGE = 14  # Linux; not in the mmap module before Python 3.13

# Process-wide on purpose (see above). Bounded by the number of threads that do I/O at once.
_idle: list[memoryview] = []
_lock = threading.Lock()


def huge_buffer(size_bytes: int) -> memoryview:
    """Return a new private buffer, aligned to a huge page and backed by huge pages if it can be.

    Touches no page: the memory is taken when it is first written. Freed with the last view.
    """
    # Private: shared anonymous memory (the default) gets no huge pages on most machines.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    whole = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=flags)
    with suppress(OSError):  # a kernel without transparent huge pages: slower, still right
        whole.madvise(getattr(mmap, "MADV_HUGEPAGE", _MADV_HUGEPAGE))
    view = memoryview(whole)
    skip = -address_of(view) % HUGE_PAGE_BYTES
    return view[skip : skip + size_bytes]


def address_of(view: memoryview) -> int:
    """Return the memory address of a writable, non-empty view."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def take() -> memoryview:
    """Return a buffer of `BOUNCE_BYTES` for this caller alone, with whatever was in it."""
    with _lock:
        if _idle:
            return _idle.pop()
    return huge_buffer(BOUNCE_BYTES)


def _in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have had it
    _idle.clear()


os.register_at_fork(after_in_child=_in_child)


def give_back(buffer: memoryview) -> None:
    """Let others take a buffer. No I/O on it may be under way."""
    with _lock:
        _idle.append(buffer)


@contextmanager
def borrowed() -> Iterator[memoryview]:
    """Lend one buffer for the length of a ``with`` block."""
    buffer = take()
    try:
        yield buffer
    finally:
        give_back(buffer)
