"""A folder of a POSIX file system: durable files, one atomic commit, direct I/O where it pays."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator

from dcp_checkfreq.errors import BadLocation
from dcp_checkfreq.format import names
from dcp_checkfreq.storage.local import direct_io
from dcp_checkfreq.storage.local.abilities import (
    REFUSALS_OF_FOLDERS,
    Abilities,
    abilities_of,
    doubt,
    is_refusal,
    rename_exclusively,
)
from dcp_checkfreq.storage.local.regular import read_regular, stat_regular
from dcp_checkfreq.storage.tier import (
    LARGEST_SMALL_FILE_BYTES,
    Entry,
    ReservationRevoked,
    ScratchReservation,
)

# Below this a file is one or two requests anyway, and the page cache takes them at once.
DIRECT_FROM_BYTES = 4 << 20

_LEADS_NOWHERE = {errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG}


class LocalTier:
    """One folder of a mounted file system. See `Tier` for what each call promises.

    What the mount can do is tried out before the first file is written (`abilities`). On one that
    can neither link nor rename, `create` writes the file under its own name, exclusively, and
    removes it again if that fails; `replace` then deletes first. What such a mount cannot promise
    is said in one warning.

    Args:
        path: the folder; need not exist yet. ``~`` and ``~user`` at its start are home folders.
        direct_io: write and read large files past the page cache. None: where the file system
            can. True: the same, False: never.
    """

    def __init__(self, path: str | os.PathLike[str], *, direct_io: bool | None = None) -> None:
        self._path = os.path.abspath(at_home(os.fspath(path)))
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

    def _can(self) -> Abilities:
        return abilities_of(self._path)

    def _join(self, name: str) -> str:
        return os.path.join(self._path, name)

    def make(self) -> None:
        """Make the folder and its parents, each durable in its own parent.

        What a run notes about itself goes into a folder of the root itself, never through a link:
        what that leads to may be another run's.
        """
        missing = []
        path = self._path
        if os.path.basename(path) == names.RUN_FOLDER and os.path.islink(path):
            raise NotADirectoryError(
                errno.ENOTDIR, "is a link to somewhere else, which is left alone", path
            )
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
            # The process that made it may have died, or not have synced its name yet; another
            # rank's files are no safer than ours.
            _sync_folder(os.path.dirname(self._path))

    def disk(self) -> int:
        """Return the number of the device that holds the folder; see `disk_of`."""
        path = self._path
        while True:
            try:
                return os.stat(path).st_dev
            except FileNotFoundError:
                if path == os.path.dirname(path):
                    raise
                path = os.path.dirname(path)

    def list(self) -> list[Entry]:
        """Return what is in the folder; links that lead nowhere are left out."""
        try:
            found = list(os.scandir(self._path))
        except FileNotFoundError:
            return []
        return [entry for entry in map(_entry_of, found) if entry is not None]

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return stat_regular(self._join(name)).st_size

    def read(self, name: str) -> bytes:
        """Return the whole content of a file."""
        return self.read_at_most(name, LARGEST_SMALL_FILE_BYTES)

    def read_at_most(self, name: str, at_most_bytes: int) -> bytes:
        """Return the whole content of a file; see `read_small`."""
        return read_regular(self._join(name), at_most_bytes)

    def open(self, name: str) -> direct_io.FileReader:
        """Open a file for ranged reads from any thread."""
        return direct_io.FileReader(self._join(name), direct_io=self._direct_io)

    def write_shard(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        """Write a new file; its content is durable on return."""
        can = self._can()
        direct = self._direct_io and can.direct_io and size_bytes >= DIRECT_FROM_BYTES
        path = self._join(name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(path, flags, 0o666)
        try:
            try:
                if can.fallocate:
                    direct_io.preallocate(fd, size_bytes)
                if direct and direct_io.set_direct(fd, on=True):
                    written = direct_io.write_direct(fd, pieces)
                else:
                    written = direct_io.write_buffered(fd, pieces)
                if written != size_bytes:
                    raise OSError(
                        errno.EIO, f"{written} bytes were given for a file of {size_bytes}", path
                    )
                sync_file(os.fdatasync, fd, can)
            finally:
                os.close(fd)  # may be where a mount uploads, and says that it could not
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            raise

    def sync(self) -> None:
        """Fsync the folder."""
        _sync_folder(self._path)

    def create(self, name: str, data: bytes, *, scratch: str) -> None:
        """Write ``scratch``, fsync it, link it to ``name`` exclusively, fsync the folder."""
        if not self._if_offered(lambda: self._create_whole(name, data, scratch)):
            self.write_shard(name, [memoryview(data)], len(data))
        self.sync()

    def replace(self, name: str, data: bytes, *, scratch: str) -> None:
        """Write ``scratch``, fsync it, rename it over ``name``, fsync the folder."""
        if not self._if_offered(lambda: self._replace_whole(name, data, scratch)):
            self.delete(name)
            self.write_shard(name, [memoryview(data)], len(data))
        self.sync()

    def _if_offered(self, commit: Callable[[], None]) -> bool:
        """Carry out a commit; False if the mount has no such thing, and nothing was done."""
        if not self._can().commits_whole:
            return False
        if _offers(commit):
            return True
        doubt(self._path)
        return False

    def _create_whole(self, name: str, data: bytes, scratch: str) -> None:
        with self._written_scratch(scratch, data) as source:
            _link_exclusively(source, self._join(name), self._can())

    def _replace_whole(self, name: str, data: bytes, scratch: str) -> None:
        with self._written_scratch(scratch, data) as source:
            os.rename(source, self._join(name))

    @contextlib.contextmanager
    def _written_scratch(self, scratch: str, data: bytes) -> Iterator[str]:
        can = self._can()
        path = self._join(scratch)
        try:
            _overwrite(path, data, os.O_CREAT, can)
            yield path
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def reserve(self, name: str, *, scratch: str) -> ScratchReservation:
        """Make an empty file ``scratch``. Its removal is the revocation."""
        path = self._join(scratch)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        return ScratchReservation(self, name, scratch)

    def revoke(self, name: str, *, scratch: str) -> bool:
        """Remove ``scratch``: a commit links or renames it, and finds nothing from now on."""
        self.delete(scratch)
        return True

    def commit_scratch(self, name: str, data: bytes, scratch: str, over: bytes | None) -> None:
        """Fill ``scratch``, which must be there, and make it ``name``; see `Reservation.commit`.

        Where the mount can neither link nor rename, a revocation is noticed only if it comes before
        the record is written under its own name.
        """
        try:
            if not self._if_offered(lambda: self._fill_and_name(scratch, data, name, over)):
                self.size(scratch)  # raises if it is gone
                if self.must_replace(name, over):
                    self.delete(name)
                self.write_shard(name, [memoryview(data)], len(data))
        except FileNotFoundError as error:
            raise ReservationRevoked(errno.ENOENT, "was taken away", self._join(scratch)) from error
        self.delete(scratch)
        self.sync()

    def _fill_and_name(self, scratch: str, data: bytes, name: str, over: bytes | None) -> None:
        source, target = self._join(scratch), self._join(name)
        _overwrite(source, data, 0, self._can())
        if self.must_replace(name, over):
            os.rename(source, target)
        else:
            _link_exclusively(source, target, self._can())

    def must_replace(self, name: str, over: bytes | None) -> bool:
        """Tell whether ``name`` is there. It is asked right before it is replaced.

        Raises:
            FileExistsError: it holds something else than ``over``.
        """
        if over is None:
            return False  # `link` asks, and acts in the same moment
        try:
            held = self.read(name)
        except FileNotFoundError:
            return False
        if held != over:
            raise FileExistsError(errno.EEXIST, "holds something else by now", self._join(name))
        return True

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


def at_home(path: str) -> str:
    """Return a path with ``~`` or ``~user`` at its start expanded. Write ``./~`` for such a name.

    Raises:
        BadLocation: there is no such user, or no home; or no path could be like this.
    """
    if "\0" in path:
        raise BadLocation(path, "there is a zero byte in it, which names cannot have")
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise BadLocation(path, f"there is no home folder {path.partition('/')[0]}")
    return expanded


def _overwrite(path: str, data: bytes, flags: int, can: Abilities) -> None:
    """Make a file hold ``data``, durably. ``flags``: `os.O_CREAT` if it need not be there."""
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o666)
    try:
        direct_io.write_all(fd, [memoryview(data)], 0)
        sync_file(os.fsync, fd, can)
    finally:
        os.close(fd)


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in REFUSALS_OF_FOLDERS:
            raise
        # Said once, when the mount was tried out.
    finally:
        os.close(fd)


def sync_file(sync: Callable[[int], None], fd: int, can: Abilities) -> None:
    """Sync an open file, where the mount has that."""
    try:
        sync(fd)
    except OSError as error:
        if can.fsync and is_refusal(error):
            doubt(f"/proc/self/fd/{fd}")
        if can.fsync or not is_refusal(error):
            raise


def _offers(call: Callable[[], None]) -> bool:
    """Make a call; False if the mount has no such thing, and nothing was done."""
    try:
        call()
    except OSError as error:
        if not is_refusal(error):
            raise
        return False
    return True


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        # An NFS server may answer a repeated request of a link that it made the first time.
        if os.stat(source).st_nlink != 2 or not os.path.samefile(source, target):
            raise


def _link_exclusively(source: str, target: str, can: Abilities) -> None:
    """Give ``source`` the name ``target`` if no one has it; `FileExistsError` if someone has."""
    if can.link and _offers(lambda: _link(source, target)):
        return
    if can.rename_exclusively and _offers(lambda: rename_exclusively(source, target)):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    os.rename(source, target)
