"""A mounted slow volume that may know no rename, no link, no append and no write in the middle.

FUSE mounts of object stores and cloud volumes take a file as one stream from its first byte to its
last, and keep it when it is closed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable

from dcp_checkfreq.storage.local.abilities import Abilities, abilities_of
from dcp_checkfreq.storage.local.tier import LocalTier, sync_file


class MountTier(LocalTier):
    """`LocalTier` that writes files as streams only. See `Tier` for the promises."""

    def __init__(self, path: str | os.PathLike[str], *, direct_io: bool | None = None) -> None:
        super().__init__(path, direct_io=False)

    def __repr__(self) -> str:
        return f"MountTier({self._path!r})"

    def _can(self) -> Abilities:
        return abilities_of(self._path, is_staged=True)

    def child(self, name: str) -> MountTier:
        """Return the tier of a folder inside this one."""
        return MountTier(os.path.join(self._path, name))

    def write_shard(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        """Write a new file from its first byte to its last, fsync it and close it."""
        can = self._can()
        path = self._join(name)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                written = sum(_write_on(fd, piece.cast("B")) for piece in pieces if len(piece))
                if written != size_bytes:
                    raise OSError(
                        errno.EIO, f"{written} bytes were given for a file of {size_bytes}", path
                    )
                sync_file(os.fsync, fd, can)
            finally:
                os.close(fd)  # may be where the mount uploads, and says that it could not
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            raise


def _write_on(fd: int, piece: memoryview) -> int:
    size = len(piece)
    while piece:
        piece = piece[os.write(fd, piece) :]
    return size
