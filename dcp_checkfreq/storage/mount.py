"""A mounted slow volume that may know no rename, no link, no append and no write in the middle.

FUSE mounts of object stores and cloud volumes take a file as one stream from its first byte to its
last, and keep it when it is closed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterable

from dcp_checkfreq.storage.local import LocalTier

_log = logging.getLogger(__name__)

_REFUSED = {
    errno.EPERM,
    errno.EACCES,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.EINVAL,
    errno.EXDEV,
    errno.EMLINK,
}


class MountTier(LocalTier):
    """`LocalTier` that gets by with streams of whole files. See `Tier` for the promises.

    Where the mount can neither link nor rename, `create` writes the file under its own name:
    exclusively, in one call, and removed again if that fails. A crash in the midst of it can then
    leave a file cut short, which its trailer shows. `replace` then deletes first.
    """

    def __init__(self, path: str | os.PathLike[str], *, direct_io: bool | None = None) -> None:
        super().__init__(path, direct_io=False)

    def __repr__(self) -> str:
        return f"MountTier({self._path!r})"

    def child(self, name: str) -> MountTier:
        """Return the tier of a folder inside this one."""
        return MountTier(os.path.join(self._path, name))

    def write_shard(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        """Write a new file from its first byte to its last, fsync it and close it."""
        path = self._join(name)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                written = sum(_write_on(fd, piece.cast("B")) for piece in pieces if len(piece))
                if written != size_bytes:
                    raise OSError(
                        errno.EIO, f"{written} bytes were given for a file of {size_bytes}", path
                    )
                _sync(fd)
            finally:
                os.close(fd)  # may be where the mount uploads, and says that it could not
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            raise

    def sync(self) -> None:
        """Fsync the folder, where the mount has that."""
        try:
            super().sync()
        except OSError as error:
            if error.errno not in _REFUSED:
                raise

    def create(self, name: str, data: bytes, *, scratch: str) -> None:
        """Like `LocalTier.create`; in place where the mount can neither link nor rename."""
        try:
            super().create(name, data, scratch=scratch)
        except FileExistsError:
            raise
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            _log.debug("%s: no link and no rename here (%s)", self._path, error)
            self.write_shard(name, [memoryview(data)], len(data))
            self.sync()

    def replace(self, name: str, data: bytes, *, scratch: str) -> None:
        """Like `LocalTier.replace`; where the mount has no rename, there is none for a moment."""
        try:
            super().replace(name, data, scratch=scratch)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self.delete(name)
            self.write_shard(name, [memoryview(data)], len(data))
            self.sync()


def _write_on(fd: int, piece: memoryview) -> int:
    size = len(piece)
    while piece:
        piece = piece[os.write(fd, piece) :]
    return size


def _sync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
