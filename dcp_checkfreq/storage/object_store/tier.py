"""A folder of a remote storage: any fsspec URL; S3 straight from memory, by ranges and in parallel.

Objects are written under their final names, once, and published by one small write. Nothing is
renamed or copied.
"""

from __future__ import annotations

import contextlib
import errno
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dcp_checkfreq.format import names
from dcp_checkfreq.storage.object_store.fsspec_calls import RETRY_FOR_S, shared
from dcp_checkfreq.storage.object_store.fsspec_files import FsspecFiles, Head
from dcp_checkfreq.storage.object_store.options import Options
from dcp_checkfreq.storage.object_store.s3_files import S3Files
from dcp_checkfreq.storage.tier import Entry, ReservationRevoked

_S3 = ("s3", "s3a")
READS_AT_ONCE = 8  # an answer takes tens of milliseconds, whatever its size


class RemoteTier:
    """One folder of a remote storage. See `Tier` for what each call promises.

    On an object store a folder is there as long as something is in it. `create` is exclusive where
    the server honours conditional writes, which is tried out once per bucket and process; elsewhere
    it looks, then writes (`docs/object-storage.md`). Answers get lost and clients repeat requests,
    so a taken name is looked at again; on other stores than S3, one with the very same content
    counts as written by this call.

    Pickles without secrets: in another process (not a forked one) keys that were given in
    ``options`` are missing, and the file system looks for its own (environment, profile, role).

    Args:
        url: of the folder.
        options: for the fsspec file system, as it takes them.
        retry_for_s: how long a call is tried again after throttling, 5xx and broken connections.
    """

    reads_at_once = READS_AT_ONCE

    def __init__(
        self, url: str, options: dict[str, Any] | None = None, *, retry_for_s: float = RETRY_FOR_S
    ) -> None:
        self._url = url.rstrip("/")
        protocol = url.partition("://")[0].lower()
        kind = S3Files if protocol in _S3 else FsspecFiles
        self._files = shared(kind, protocol, Options(options or {}), retry_for_s)

    def __repr__(self) -> str:
        return f"RemoteTier({self._url!r})"

    @property
    def location(self) -> str:
        """The URL."""
        return self._url

    def child(self, name: str) -> RemoteTier:
        """Return the tier of a folder inside this one."""
        below = RemoteTier.__new__(RemoteTier)
        below._url, below._files = f"{self._url}/{name}", self._files
        return below

    def _path(self, name: str = "") -> str:
        base = self._files.path_of(self._url)
        return f"{base.rstrip('/')}/{name}" if name else base

    def make(self) -> None:
        """Make the folder where there are folders; refuse the name of a file everywhere."""
        path = self._path()
        try:
            self._files.head(path)
        except (FileNotFoundError, IsADirectoryError):
            self._files.make_folder(path)
            return
        raise NotADirectoryError(errno.ENOTDIR, "is a file", self._url)

    def list(self) -> list[Entry]:
        """Return what is in the folder, asked anew."""
        return self._files.entries(self._path())

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return self._files.head(self._path(name)).size_bytes

    def read(self, name: str) -> bytes:
        """Return the whole content of a file."""
        return self._files.read(self._path(name))

    def read_at_most(self, name: str, at_most_bytes: int) -> bytes:
        """Return the whole content of a file; see `read_small`."""
        return self._files.read(self._path(name), at_most_bytes)

    def open(self, name: str) -> RemoteReader:
        """Open a file for ranged reads."""
        path = self._path(name)
        return RemoteReader(self._files, path, self._files.head(path))

    def write_shard(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        """Upload a new file from where its pieces lie; complete only if all of it arrived."""
        path = self._path(name)
        try:
            self._files.head(path)
        except FileNotFoundError:
            self._files.upload(path, pieces, size_bytes)
            return
        raise FileExistsError(errno.EEXIST, "is there already", f"{self._url}/{name}")

    def sync(self) -> None:
        """Do nothing: an object is durable, and its name with it, when its upload was answered."""

    def create(self, name: str, data: bytes, *, scratch: str) -> None:
        """Write an object only if its name is free."""
        self._files.write_new(self._path(name), data, self._path(scratch))

    def replace(self, name: str, data: bytes, *, scratch: str) -> None:
        """Write an object in one request, over what was there."""
        self._files.write(self._path(name), data)

    def reserve(self, name: str, *, scratch: str) -> RemoteReservation:
        """Write a small object ``scratch``; who changes it first, decides."""
        target, path = self._path(name), self._path(scratch)
        self._files.try_conditions(target, path)  # now: later the name is in use
        mark = open_mark()
        version = self._files.write(path, mark)
        return RemoteReservation(self._files, target, path, mark, version)

    def revoke(self, name: str, *, scratch: str) -> bool:
        """Change ``scratch`` before a commit does, and remove it."""
        path = self._path(scratch)
        self._files.try_conditions(path, self._path(names.scratch_metadata(names.new_attempt())))
        for _ in range(2):  # the second time it says what the first one came too late for
            try:
                held = self._files.read(path)
            except FileNotFoundError:
                return True
            if not is_open(held):
                return self._is_held(name, held) and self._removed(path)
            try:
                self._files.write_over(path, REVOKED, held)
            except (FileExistsError, FileNotFoundError):
                continue
            return self._removed(path)
        return False

    def _is_held(self, name: str, record: bytes) -> bool:
        try:
            return self._files.read(self._path(name)) == record
        except FileNotFoundError:
            return False

    def _removed(self, path: str) -> bool:
        self._files.delete(path)
        return True

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._files.delete(self._path(name))

    def remove(self) -> None:
        """Remove the folder if it is empty, where there are folders."""
        self._files.remove_folder(self._path())

    def abort_uploads(self, is_ours: Callable[[str], bool], *, before_s: float) -> Sequence[str]:
        """Abort uploads in this folder that were begun before ``before_s`` and never finished."""
        return self._files.abort_uploads(self._path(), is_ours, before_s)


class RemoteReservation:
    """An object that is changed twice at most: by a commit to the record, or by a revocation.

    From the first change on the commit is decided; the second write makes it visible. A process
    that dies between the two leaves the record in the reservation.
    """

    def __init__(
        self, files: FsspecFiles, path: str, scratch: str, mark: bytes, version: object
    ) -> None:
        self._files, self._path, self._scratch = files, path, scratch
        self._mark, self._version = mark, version
        self._is_decided = False  # it holds the record

    def commit(self, data: bytes, *, over: bytes | None) -> None:
        """Put the record into the reservation, then under its name, then remove the reservation."""
        if not self._is_decided:
            try:
                self._files.write_over(self._scratch, data, self._mark, version=self._version)
            except (FileNotFoundError, FileExistsError) as error:
                raise ReservationRevoked(errno.ENOENT, "was taken away", self._scratch) from error
            self._is_decided = True
        if over is None:
            self._files.write_new(self._path, data, self._scratch)
        else:
            try:
                self._files.write_over(self._path, data, over)
            except FileNotFoundError:
                self._files.write_new(self._path, data, self._scratch)
        # An error here is none of the commit; cleaning knows by the content that it is over.
        with contextlib.suppress(OSError):
            self.cancel()

    def cancel(self) -> None:
        """Remove the object."""
        self._files.delete(self._scratch)


REVOKED = b"revoked"
_OPEN = b"open "


def open_mark() -> bytes:
    """Return what a reservation holds that was neither used nor revoked, unlike any other."""
    return _OPEN + uuid.uuid4().hex.encode()


def is_open(held: bytes) -> bool:
    """Tell whether a reservation was neither used nor revoked."""
    return held.startswith(_OPEN)


class RemoteReader:
    """An open remote file: one version of it, read by ranges from any thread."""

    def __init__(self, files: FsspecFiles, path: str, head: Head) -> None:
        self._files = files
        self._path = path
        self._head = head
        self.size_bytes = head.size_bytes

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` on; `EOFError` if the file ends before."""
        stop = offset + len(target)
        if stop > self.size_bytes:
            raise EOFError(
                f"{self._path} has {self.size_bytes} bytes, {stop} were expected at least"
            )
        if len(target):
            self._files.read_range(self._path, offset, target, self._head)

    def close(self) -> None:
        """Do nothing: connections belong to the file system."""
