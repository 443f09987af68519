"""Reads memory that somebody may free meanwhile, which must not end the process.

Who holds a tensor holds its storage, and not the memory behind it: ``storage.resize_(0)`` gives
that back at once, as what saves memory between two uses of a parameter does. A plain read of it
would be a segmentation fault. So the kernel reads: it says that there is nothing. That costs
nothing where the targets are on huge pages (`docs/decisions/0014-what-may-overlap.md`).
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
from array import array
from collections.abc import Callable, Sequence

MOST_SPANS = 512  # of one call; the kernel takes 1024

_Write = Callable[..., int]

# Another one for short calls, which would wait longer to get the GIL back than they take.
_libc, _libc_with_gil = ctypes.CDLL(None, use_errno=True), ctypes.PyDLL(None, use_errno=True)
_REFUSED = {errno.ENOSYS, errno.EPERM, errno.EACCES}  # as some sandboxes do


def _vm_write(libc: ctypes.CDLL) -> _Write | None:
    write = getattr(libc, "process_vm_writev", None)
    if write is None:  # not Linux
        return None
    number, address = ctypes.c_ulong, ctypes.c_void_p
    write.argtypes = (ctypes.c_int, address, number, address, number, number)
    write.restype = ctypes.c_ssize_t
    return write  # type: ignore[no-any-return]


_writes = {False: _vm_write(_libc), True: _vm_write(_libc_with_gil)}


def read(
    targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], *, short: bool = False
) -> int:
    """Copy spans of memory; return how many bytes, in order: fewer than all if a source is gone.

    Where the kernel does not do it, a source that is gone ends the process.

    Args:
        targets: addresses of own memory, or one: where all are put behind each other.
        sources: addresses.
        sizes: in bytes; at most `MOST_SPANS`, and 1 GiB in all.
        short: keep the GIL.
    """
    total = sum(sizes)
    write = _writes[short]
    if write is not None and total:
        local = _vector(sources, sizes)
        remote = _vector(targets, sizes if len(targets) > 1 else [total])
        done = _written(write, local, remote)
        if done == total:
            return total
        if done >= 0:
            return done
        code = ctypes.get_errno()
        if code == errno.EFAULT:
            if _can_reach(write, targets[0]):
                return 0
        elif code in _REFUSED:
            _writes[False] = _writes[True] = None
        else:
            raise OSError(code, os.strerror(code))
    if len(targets) == 1:
        targets = list(itertools.accumulate(sizes, initial=targets[0]))[:-1]
    move = _libc_with_gil.memmove if short else _libc.memmove
    for target, source, size in zip(targets, sources, sizes, strict=True):
        move(ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size))
    return total


def _vector(addresses: Sequence[int], sizes: Sequence[int]) -> array[int]:
    """Return what C calls an array of ``struct iovec``."""
    spans = array("Q", bytes(16 * len(sizes)))
    spans[::2], spans[1::2] = array("Q", addresses), array("Q", sizes)
    return spans


def _written(write: _Write, local: array[int], remote: array[int]) -> int:
    (mine, mine_words), (theirs, their_words) = local.buffer_info(), remote.buffer_info()
    return write(os.getpid(), mine, mine_words // 2, theirs, their_words // 2, 0)


def _can_reach(write: _Write, target: int) -> bool:
    """Tell whether the kernel writes there: memory of a device it may not."""
    known = ctypes.create_string_buffer(1)
    ctypes.memmove(known, target, 1)
    return _written(write, _vector([ctypes.addressof(known)], [1]), _vector([target], [1])) == 1
