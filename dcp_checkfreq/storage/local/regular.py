"""Opens files of a mounted file system for reading: regular ones only, and no more than asked for.

In the place of a file may be a fifo, which blocks the thread that opens it, a device, which may
do anything then, or a sparse file of any size, which costs nobody anything but its reader.
"""

from __future__ import annotations

import errno
import os
import stat

from dcp_checkfreq.storage.tier import OddFile, check_size

_KINDS = {
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_HOLES_FROM_BYTES = 1 << 20  # a smaller file is worth no second look


def check_regular(info: os.stat_result, path: str) -> None:
    """Refuse what is not a regular file.

    Raises:
        IsADirectoryError: it is a folder.
        OddFile: it is a fifo, a socket or a device.
    """
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(info.st_mode):
        kind = _KINDS.get(stat.S_IFMT(info.st_mode), "something else")
        raise OddFile(errno.EINVAL, f"this is {kind}, not a file", path)


def stat_regular(path: str) -> os.stat_result:
    """Return what the file system says of a regular file.

    Raises:
        IsADirectoryError, OddFile: as `check_regular`, or links that lead to each other.
        OSError: of the file system.
    """
    try:
        info = os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OddFile(errno.ELOOP, os.strerror(errno.ELOOP), path) from error
        raise
    check_regular(info, path)
    return info


def open_regular(path: str, flags: int = 0) -> tuple[int, int]:
    """Open a regular file for reading; return its descriptor and its size in bytes.

    Raises:
        IsADirectoryError, OddFile: as `check_regular`.
        OSError: of the file system.
    """
    stat_regular(path)  # before it is opened: opening some devices has effects
    # Not blocking: it may have become a fifo since.
    flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    fd = os.open(path, flags)
    try:
        info = os.fstat(fd)
        check_regular(info, path)
    except BaseException:
        os.close(fd)
        raise
    return fd, info.st_size


def read_regular(path: str, at_most_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        IsADirectoryError, OddFile: as `check_regular`, or it is larger, or has large holes.
        OSError: of the file system.
    """
    fd, size = open_regular(path)
    with open(fd, "rb") as file:
        check_size(size, at_most_bytes, path)
        if size >= _HOLES_FROM_BYTES and _has_holes(fd, size):
            raise OddFile(errno.EINVAL, f"it has {size} bytes, and holes in them", path)
        content = file.read(at_most_bytes + 1)
    if len(content) > at_most_bytes:
        raise OddFile(errno.EFBIG, f"it grew beyond {at_most_bytes} bytes", path)
    return content


def _has_holes(fd: int, size: int) -> bool:
    try:
        hole = os.lseek(fd, 0, os.SEEK_HOLE)
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:  # a file system that does not know
        return False
    return hole < size
