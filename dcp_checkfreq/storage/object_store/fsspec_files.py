"""Objects of any fsspec file system, by full path: small ones whole, large ones as streams."""

from __future__ import annotations

import contextlib
import datetime
import errno
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dcp_checkfreq.storage.object_store.errors import (
    as_os_error,
    is_taken,
)
from dcp_checkfreq.storage.object_store.fsspec_calls import RETRY_FOR_S, FsspecCalls
from dcp_checkfreq.storage.object_store.options import Options
from dcp_checkfreq.storage.object_store.parts import checked, fill, gathered, part_bytes
from dcp_checkfreq.storage.tier import LARGEST_SMALL_FILE_BYTES, Entry, check_size

_log = logging.getLogger(__name__)

CLEANING_FOR_S = 20.0  # what is not removed now is removed at the next restore

_creating = threading.Lock()  # for file systems whose exclusive create is a look and a write


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of an object without reading it."""

    size_bytes: int
    version: object  # equal only for the same content written by the same call


@dataclass(frozen=True, slots=True)
class Conditions:
    """Which conditional writes a server honours."""

    create: bool  # only if the name is free
    replace: bool  # only if the content is the one that is known


class FsspecFiles(FsspecCalls):
    """Whole and ranged reads, writes, listing. All paths are as the file system has them."""

    has_folders = True  # a folder can be there with nothing in it

    def __init__(
        self, protocol: str, options: Options, *, retry_for_s: float = RETRY_FOR_S
    ) -> None:
        super().__init__(protocol, options, retry_for_s=retry_for_s)
        self._honours: dict[str, Conditions] = {}  # by bucket

    # --- small things ---

    def head(self, path: str) -> Head:
        """Return size and version of a file.

        Raises:
            FileNotFoundError: there is none.
            IsADirectoryError: it is a folder.
        """
        return self.call(path, lambda fs: self._head(fs, path))

    def _head(self, fs: Any, path: str) -> Head:
        fs.invalidate_cache()
        info = fs.info(path)
        if info.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, "is a folder", path)
        marks = ("ETag", "etag", "md5Hash", "generation", "created", "mtime", "modified", "size")
        return Head(int(info["size"]), tuple(info.get(mark) for mark in marks))

    def entries(self, path: str) -> list[Entry]:
        """Return what is in a folder; empty if there is none."""
        return self.call(path, lambda fs: self._entries(fs, path))

    def _entries(self, fs: Any, path: str) -> list[Entry]:
        fs.invalidate_cache()
        try:
            found = fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        entries = []
        for info in found:
            whole = info["name"].rstrip("/")
            folder, _, name = whole.rpartition("/")
            if name and folder.strip("/") == path.strip("/"):
                entries.append(_entry(name, info))
        return entries

    def read(self, path: str, at_most_bytes: int = LARGEST_SMALL_FILE_BYTES) -> bytes:
        """Return the content of a small file; `OddFile` if it is larger."""
        return self.call(path, lambda fs: self._read(fs, path, at_most_bytes))

    def _read(self, fs: Any, path: str, at_most_bytes: int) -> bytes:
        # Not as a range of so many bytes: stores refuse a range of an empty object.
        check_size(self._head(fs, path).size_bytes, at_most_bytes, path)
        return bytes(fs.cat_file(path))

    def write(self, path: str, data: bytes) -> object:
        """Make ``path`` hold ``data``, whatever it held. Return what `write_over` can use."""
        return self.call(path, lambda fs: self._write(fs, path, data))

    def _write(self, fs: Any, path: str, data: bytes, mark: str = "") -> object:
        fs.pipe_file(path, data)
        return None

    def write_new(self, path: str, data: bytes, scratch: str) -> None:
        """Make ``path`` hold ``data`` if it is not there; else raise `FileExistsError`.

        A request may be repeated, also by a client on its own, after an answer was lost. So a name
        that is taken is looked at: perhaps this very call has taken it.
        """
        exclusive = self.try_conditions(path, scratch).create

        def put(fs: Any, mark: str) -> None:
            if exclusive:
                self._write_if_absent(fs, path, data, mark)
            else:
                self._look_and_write(fs, path, data, mark)

        self._put_once(path, data, put)

    def write_over(self, path: str, data: bytes, held: bytes, *, version: object = None) -> None:
        """Make ``path`` hold ``data`` if it holds ``held``.

        Args:
            path: of a file for whose bucket `try_conditions` was called.
            data: new content.
            held: old content.
            version: of ``held``, if `write` has returned one.

        Raises:
            FileNotFoundError: it is not there.
            FileExistsError: it holds something else, which stays.
        """
        conditional = self._honours[self._bucket(path)].replace

        def put(fs: Any, mark: str) -> None:
            if conditional:
                self._write_if_same(fs, path, data, mark, held, version)
            else:
                self._compare_and_write(fs, path, data, mark, held)

        self._put_once(path, data, put)

    def _put_once(self, path: str, data: bytes, put: Callable[[Any, str], None]) -> None:
        mark = uuid.uuid4().hex

        def try_it(fs: Any) -> None:
            try:
                put(fs, mark)
            except Exception as error:
                if not is_taken(error):
                    raise
                if not self._is_mine(fs, path, data, mark):
                    raise FileExistsError(errno.EEXIST, "is there already", path) from error

        self.call(path, try_it)

    def _write_if_same(
        self, fs: Any, path: str, data: bytes, mark: str, held: bytes, version: object
    ) -> None:
        """Write in one request that fails if ``path`` has changed. fsspec itself knows none."""
        raise NotImplementedError

    def _compare_and_write(self, fs: Any, path: str, data: bytes, mark: str, held: bytes) -> None:
        with _creating:
            if self._read(fs, path, LARGEST_SMALL_FILE_BYTES) != held:
                raise FileExistsError(errno.EEXIST, "holds something else by now", path)
            self._write(fs, path, data, mark)

    def _write_if_absent(self, fs: Any, path: str, data: bytes, mark: str) -> None:
        with _creating:
            fs.pipe_file(path, data, mode="create")

    def _is_mine(self, fs: Any, path: str, data: bytes, mark: str) -> bool:
        """Tell whether the call with this mark has written ``path``.

        There are no marks here, so the content tells: that of a commit record is of one attempt.
        """
        return self._read(fs, path, LARGEST_SMALL_FILE_BYTES) == data

    def _look_and_write(self, fs: Any, path: str, data: bytes, mark: str) -> None:
        with _creating:
            try:
                self._head(fs, path)
            except FileNotFoundError:
                self._write(fs, path, data, mark)
                return
        raise FileExistsError(errno.EEXIST, "is there already", path)

    def _bucket(self, path: str) -> str:
        return path.lstrip("/").partition("/")[0]

    def try_conditions(self, path: str, scratch: str) -> Conditions:
        """Return which conditional writes the server honours; tried out once per bucket."""
        bucket = self._bucket(path)
        known = self._honours.get(bucket)
        if known is None:
            known = self._honours[bucket] = self.call(scratch, lambda fs: self._try(fs, scratch))
            if not known.create:
                _log.warning(
                    "%s://%s has no conditional writes: two runs that save the same step at the "
                    "same moment are not distinguished there",
                    self.protocol,
                    bucket,
                )
        return known

    def _try(self, fs: Any, scratch: str) -> Conditions:
        try:
            self._write(fs, scratch, b"first")
            create = self._is_stopped(lambda: self._write_if_absent(fs, scratch, b"second", ""))
            self._write(fs, scratch, b"third")
            wrong = self._wrong_version()
            replace = wrong is not None and self._is_stopped(
                lambda: self._write_if_same(fs, scratch, b"fourth", "", b"third", wrong)
            )
            return Conditions(create=create, replace=replace)
        finally:
            self._delete(fs, scratch)

    def _is_stopped(self, write: Callable[[], None]) -> bool:
        """Tell whether a write is stopped by a condition that does not hold."""
        try:
            write()
        except Exception as error:
            if not (is_taken(error) or self._refuses(error)):
                raise
            return is_taken(error)
        return False

    def _wrong_version(self) -> object:
        """Return a version that no file has; None if writes know no versions."""
        return None

    def _refuses(self, error: Exception) -> bool:
        return isinstance(error, NotImplementedError | TypeError | ValueError)

    def delete(self, path: str) -> None:
        """Remove a file; no error if there is none."""
        self.call(path, lambda fs: self._delete(fs, path), for_s=CLEANING_FOR_S)

    def _delete(self, fs: Any, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(path)

    def make_folder(self, path: str) -> None:
        """Make a folder, where there are any."""
        self.call(path, lambda fs: fs.makedirs(path, exist_ok=True))

    def remove_folder(self, path: str) -> None:
        """Remove a folder if it is empty; no error otherwise."""
        if not self.entries(path):
            # Missing, not empty after all, or nothing that can be removed: all the same here.
            with contextlib.suppress(OSError):
                self.call(path, lambda fs: fs.rmdir(path))

    def abort_uploads(
        self, path: str, is_ours: Callable[[str], bool], before_s: float
    ) -> list[str]:
        """Abort unfinished uploads below ``path``, where a storage has such a thing."""
        return []

    # --- large files ---

    def upload(self, path: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        """Write a new file as one stream; nothing stays of it after an error."""
        fs = self.fs
        block = part_bytes(size_bytes)
        file = self.call(path, lambda fs: fs.open(path, "wb", block_size=block, autocommit=False))
        try:
            for piece in gathered(checked(pieces, size_bytes, path)):
                file.write(piece)
            file.close()
            if hasattr(file, "commit"):
                file.commit()
        except BaseException as error:
            _discard(file)
            with contextlib.suppress(OSError):
                self._delete(fs, path)
            if isinstance(error, Exception):
                translated = as_os_error(error, path)
                if translated is not error:
                    raise translated from error
            raise

    def read_range(self, path: str, offset: int, target: memoryview, head: Head) -> None:
        """Fill ``target`` from ``offset`` on, all of it from the version that ``head`` is of."""

        def get(fs: Any) -> None:
            data = fs.cat_file(path, start=offset, end=offset + len(target))
            if self._head(fs, path) != head:
                raise OSError(errno.ESTALE, "was replaced while it was read", path)
            fill(target, data, path)

        self.call(path, get)


def _discard(file: Any) -> None:
    """Drop a file that is open for writing; closing it would publish what was written so far."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(AttributeError):
        file.closed = True


def _entry(name: str, info: dict[str, Any]) -> Entry:
    kind = info["type"]
    is_folder = kind == "directory"
    return Entry(
        name,
        is_folder=is_folder,
        size_bytes=0 if is_folder else int(info["size"] or 0),
        modified_s=_modified_s(info),
        is_link=kind == "link" or bool(info.get("islink")),
        is_special=kind == "other",
    )


def _modified_s(info: dict[str, Any]) -> float:
    for key in ("LastModified", "last_modified", "mtime", "updated", "modified", "created"):
        when = info.get(key)
        if isinstance(when, datetime.datetime):
            return when.timestamp()
        if isinstance(when, int | float):
            return float(when)
        if isinstance(when, str):
            with contextlib.suppress(ValueError):
                return datetime.datetime.fromisoformat(when.replace("Z", "+00:00")).timestamp()
    return 0.0


def _after_fork_in_child() -> None:
    """Replace a lock that a thread of the parent, which is not here, may hold for ever."""
    global _creating
    _creating = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
