"""The remote side of a file cache: a file of a local mount or behind an fsspec URL."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from fsspec.core import url_to_fs

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(?:://|::.*://)", re.DOTALL)
_FILE_URL = re.compile(r"(?:file|local)://(?=/)")
_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,16}")
_COPY_BYTES = 1 << 20


class FromSource(Exception):
    """Carries an error of the source past the handlers of cache trouble. Never seen outside."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def blaming(name: str) -> Iterator[None]:
    """Turn what fails inside into a `FromSource` whose error names the source.

    The error is of the class that its errno stands for (FileNotFoundError, PermissionError, ...);
    what a remote file system raises besides OSError becomes an OSError with its text.
    """
    try:
        yield
    except OSError as error:
        lost = isinstance(error, FileNotFoundError)  # fsspec often leaves the errno out
        number = error.errno or (errno.ENOENT if lost else errno.EIO)
        text = error.strerror or str(error) or type(error).__name__
        raise FromSource(OSError(number, text, name)) from error
    except Exception as error:  # anything may come from the libraries behind fsspec
        text = f"{type(error).__name__}: {error}"
        raise FromSource(OSError(errno.EIO, text, name)) from error


class Source:
    """One file of the remote side.

    Args:
        name: a local path, ``file://`` URL or any other fsspec URL.
        options: for fsspec, when it opens the URL.
    """

    def __init__(self, name: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
        self.name = canonical(name)
        self.is_local = _URL.match(self.name) is None
        self._options = options

    def size_bytes(self) -> int | None:
        """Return its size; None if the other side does not say.

        Raises:
            FromSource: it cannot be found or asked.
        """
        with blaming(self.name):
            if self.is_local:
                return os.stat(self.name).st_size
            # Resolved for every file: fsspec keeps its instances, but not across a fork.
            fs, path = url_to_fs(self.name, **self._options)
            size = fs.info(path).get("size")
            return None if size is None else int(size)

    def copy_to(self, fd: int, size_bytes: int | None = None) -> int:
        """Copy it to the start of an open file, and return how many bytes that were.

        Args:
            fd: the target.
            size_bytes: how many are due, and no byte more is written; None for all there are.

        Raises:
            FromSource: the source failed, or its size is not what was due.
            OSError: the target failed.
        """
        done_bytes = 0
        with self._open() as file:
            while True:
                want_bytes = _COPY_BYTES
                if size_bytes is not None:  # at the end: one more, to see that nothing follows
                    want_bytes = min(want_bytes, max(size_bytes - done_bytes, 1))
                with blaming(self.name):
                    piece = file.read(want_bytes)
                    after_bytes = done_bytes + len(piece)
                    if size_bytes is not None and (
                        after_bytes > size_bytes or (not piece and after_bytes < size_bytes)
                    ):
                        raise OSError(errno.EIO, "its size changed while it was copied")
                if not piece:
                    return done_bytes
                _write(fd, piece, done_bytes)
                done_bytes = after_bytes

    def read(self) -> bytes:
        """Return its content, past the cache.

        Raises:
            FromSource: the source failed.
        """
        with self._open() as file, blaming(self.name):
            return b"".join(iter(lambda: file.read(_COPY_BYTES), b""))

    @contextmanager
    def local_path(self) -> Iterator[str]:
        """Give a local path of it, past the cache.

        The path of a local file is its own. A remote file is copied for the time being: to the
        folder for temporary files, or into memory if that fails.

        Raises:
            FromSource: the source failed.
            OSError: there is room in neither.
        """
        if self.is_local:
            yield self.name
            return
        path, remove = self._copy_aside()
        try:
            yield path
        finally:
            remove()

    def _copy_aside(self) -> tuple[str, Callable[[], object]]:
        """Return the path of a private copy, and what removes it."""
        try:
            file = tempfile.NamedTemporaryFile(suffix=suffix_of(self.name))  # noqa: SIM115
            try:
                self.copy_to(file.fileno())
            except BaseException:
                file.close()
                raise
        except OSError:  # of the target: those of the source are no OSError here
            fd = os.memfd_create("checkfreq-cache", os.MFD_CLOEXEC)
            try:
                self.copy_to(fd)
            except BaseException:
                os.close(fd)
                raise
            return f"/proc/self/fd/{fd}", lambda: os.close(fd)
        return file.name, file.close

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        """Give it opened for reading; what reads inside must be under `blaming`."""
        with blaming(self.name):
            if self.is_local:
                file = cast("BinaryIO", open(self.name, "rb", buffering=0))  # noqa: SIM115
            else:
                fs, path = url_to_fs(self.name, **self._options)
                file = cast("BinaryIO", fs.open(path, "rb"))
        try:
            yield file
        finally:
            file.close()


def canonical(name: str | os.PathLike[str]) -> str:
    """Return the same text for the same file whatever the working folder is.

    Raises:
        TypeError: neither text nor PathLike.
    """
    text = os.fspath(name)
    if not isinstance(text, str):
        raise TypeError(f"expected a path or URL as text, got {name!r}")
    text = _FILE_URL.sub("", text, count=1) if _FILE_URL.match(text) else text
    return text if _URL.match(text) else os.path.abspath(os.path.expanduser(text))


def suffix_of(name: str) -> str:
    """Return how a name ends (``.jpg``), since some loaders go by it; empty if not plain."""
    first = name.partition("::")[0].partition("?")[0] if _URL.match(name) else name
    suffix = os.path.splitext(first)[1]
    return suffix if _SUFFIX.fullmatch(suffix) else ""


def _write(fd: int, piece: bytes, at_bytes: int) -> None:
    rest = memoryview(piece)
    while rest:
        written_bytes = os.pwrite(fd, rest, at_bytes)
        rest, at_bytes = rest[written_bytes:], at_bytes + written_bytes
