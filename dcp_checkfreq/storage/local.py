"""A folder of a POSIX file system: durable files, one atomic commit, direct I/O where it pays."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import stat
from collections.abc import Iterable, Iterator

from dcp_checkfreq.storage import engines
from dcp_checkfreq.storage.tier import Entry

_log = logging.getLogger(__name__)

# Below this a file is one or two requests anyway, and the page cache takes them at once.
DIRECT_FROM_BYTES = 4 << 20

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_LEADS_NOWHERE = {errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG}
_NO_FSYNC_OF_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}
_RENAME_NOREPLACE = 1
_AT_FDCWD = -100


class LocalTier:
    """One folder of a mounted file system. See `Tier` for what each call promises.

    Args:
        path: the folder; need not exist yet.
        direct_io: write and read large files past the page cache. None: where the file system
            can. True: the same, False: never.
    """

    def __init__(self, path: str | os.PathLike[str], *, direct_io: bool | None = None) -> None:
        self._path = os.path.abspath(os.fspath(path))
        self._direct_io = direct_io is not False

    def __repr__(self) -> str:
        return f"LocalTier({self._path!r})"

    @property
    def location(self) -> str:
        """The absolute path."""
        return self._path

    def child(self, name: str) -> LocalTier:
        """Return the tier of a folder inside this one."""
        return LocalTier(os.path.join(self._path, name), direct_io=self._direct_io)

    def _join(self, name: str) -> str:
        return os.path.join(self._path, name)

    def make(self) -> None:
        """Make the folder and its parents, each durable in its own parent."""
        missing = []
        path = self._path
        while not os.path.isdir(path):
            missing.append(path)
            parent = os.path.dirname(path)
            if parent == path:
                break
            path = parent
        for folder in reversed(missing):
            try:
                os.mkdir(folder)
            except FileExistsError:
                if not os.path.isdir(folder):
                    raise
            _sync_folder(os.path.dirname(folder))
        if not missing:
            # Whoever made it may have died, or not come yet, to syncing its name; another rank's
            # files are no safer than ours.
            _sync_folder(os.path.dirname(self._path))

    def list(self) -> list[Entry]:
        """Return what is in the folder; links that lead nowhere are left out."""
        try:
            found = list(os.scandir(self._path))
        except FileNotFoundError:
            return []
        return [entry for entry in map(_entry_of, found) if entry is not None]

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        info = os.stat(self._join(name))
        if not stat.S_ISREG(info.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self._join(name))
        return info.st_size

    def read(self, name: str) -> bytes:
        """Return the whole content of a file."""
        with open(self._join(name), "rb") as file:
            return file.read()

    def open(self, name: str) -> engines.FileReader:
        """Open a file for ranged reads from any thread."""
        return engines.FileReader(self._join(name), direct_io=self._direct_io)

    def write_shard(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        """Write a new file; its content is durable on return."""
        path = self._join(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(path, flags, 0o666)
        try:
            engines.preallocate(fd, size_bytes)
            direct = self._direct_io and size_bytes >= DIRECT_FROM_BYTES
            if direct and engines.set_direct(fd, on=True):
                written = engines.write_direct(fd, pieces)
            else:
                written = engines.write_buffered(fd, pieces)
            if written != size_bytes:
                raise OSError(
                    errno.EIO, f"{written} bytes were given for a file of {size_bytes}", path
                )
            os.fdatasync(fd)
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        os.close(fd)

    def sync(self) -> None:
        """Fsync the folder."""
        _sync_folder(self._path)

    def create(self, name: str, data: bytes, *, scratch: str) -> None:
        """Write ``scratch``, fsync it, link it to ``name`` exclusively, fsync the folder."""
        with self._written_scratch(scratch, data) as source:
            _link_exclusively(source, self._join(name))
        self.sync()

    def replace(self, name: str, data: bytes, *, scratch: str) -> None:
        """Write ``scratch``, fsync it, rename it over ``name``, fsync the folder."""
        with self._written_scratch(scratch, data) as source:
            os.rename(source, self._join(name))
        self.sync()

    @contextlib.contextmanager
    def _written_scratch(self, scratch: str, data: bytes) -> Iterator[str]:
        path = self._join(scratch)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            try:
                engines.write_all(fd, [memoryview(data)], 0)
                os.fsync(fd)
            finally:
                os.close(fd)
            yield path
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def delete(self, name: str) -> None:
        """Unlink a file."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._join(name))

    def remove(self) -> None:
        """Remove the folder if nothing is in it, durably."""
        try:
            os.rmdir(self._path)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return
            raise
        _sync_folder(os.path.dirname(self._path))


def _entry_of(item: os.DirEntry[str]) -> Entry | None:
    is_link = item.is_symlink()
    try:
        info = item.stat()
    except OSError as error:
        if isinstance(error, FileNotFoundError) or (is_link and error.errno in _LEADS_NOWHERE):
            return None
        raise
    folder, file = stat.S_ISDIR(info.st_mode), stat.S_ISREG(info.st_mode)
    return Entry(
        item.name,
        is_folder=folder,
        size_bytes=info.st_size if file else 0,
        modified_s=info.st_mtime,
        is_link=is_link,
        is_special=not folder and not file,
    )


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FSYNC_OF_FOLDERS:
            raise
        _log.debug("%s: this file system has no fsync of folders", path)
    finally:
        os.close(fd)


def _link_exclusively(source: str, target: str) -> None:
    """Give ``source`` the name ``target`` if no one has it; `FileExistsError` if someone has."""
    try:
        os.link(source, target)
    except FileExistsError:
        # An NFS server may answer a repeated request of a link that it made the first time.
        if os.stat(source).st_nlink == 2 and os.path.samefile(source, target):
            return
        raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_exclusively(source, target)


def _rename_exclusively(source: str, target: str) -> None:
    """For file systems without hard links: renameat2, or else look and rename."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        outcome = libc.renameat2(
            _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE
        )
        if outcome == 0:
            return
        code = ctypes.get_errno()
        if code == errno.EEXIST:
            raise FileExistsError(code, os.strerror(code), target)
        if code not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(code, os.strerror(code), target)
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    _log.warning(
        "%s: this file system can neither link nor rename exclusively; two runs that save the "
        "same step at the same moment are not told apart here",
        os.path.dirname(target),
    )
    os.rename(source, target)
