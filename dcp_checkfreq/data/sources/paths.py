"""Where the files of a data set are: local paths, fsspec URLs, or paths of a file system."""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

_SHOWN = 5


def located(
    paths: Any, filesystem: Any, options: Mapping[str, Any] | None = None
) -> tuple[str | list[str], Any]:
    """Return paths as their file system knows them, and that file system.

    Args:
        paths: one or several. One is returned as one.
        filesystem: that knows the paths as they are; None: fsspec finds it, if there are URLs.
        options: for fsspec, if there are URLs.

    Raises:
        ValueError: there is no path, one is named twice, they are in several file systems, or
            there are options without a URL to use them.
    """
    is_one = isinstance(paths, (str, os.PathLike))
    found = [os.fspath(path) for path in ([paths] if is_one else paths)]
    if filesystem is None:
        found = [os.path.expanduser(path) for path in found]
    if not found:
        raise ValueError("no paths were given")
    twice = [path for path, times in Counter(found).items() if times > 1]
    if twice:
        raise ValueError(f"named more than once: {twice[:5]}")
    are_urls = filesystem is None and any("://" in path for path in found)
    if options and not are_urls:
        raise ValueError("storage_options are for URLs, without a filesystem")
    if are_urls:
        located = [fsspec.core.url_to_fs(path, **(options or {})) for path in found]
        filesystem = located[0][0]
        for path, (other, _) in zip(found, located, strict=True):
            if other != filesystem:
                raise ValueError(f"{path} is in another file system than {found[0]}")
        found = [path for _, path in located]
        # fsspec keeps one for all that ask, with what it listed for any of them, whenever it was.
        filesystem.invalidate_cache()
    if isinstance(filesystem, MemoryFileSystem):
        filesystem = _OwnPositions()
    return found[0] if is_one else found, filesystem


def is_local(filesystem: fsspec.AbstractFileSystem) -> bool:
    """Tell whether it is this machine's own."""
    return isinstance(filesystem, LocalFileSystem)


class _OwnPositions(MemoryFileSystem):  # type: ignore[misc]
    """The same files in memory. fsspec's own gives one open file, and position, to all readers."""

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        file = super()._open(path, mode, *args, **kwargs)
        return io.BytesIO(file.getvalue()) if mode == "rb" else file


def listed(names: Sequence[str]) -> str:
    """Return some names, for a text."""
    return ", ".join(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")


def digest(lines: Iterable[str]) -> str:
    """Return what names data that these lines describe."""
    found = hashlib.sha256()
    for line in lines:
        found.update(f"{line}\n".encode())
    return found.hexdigest()


def relative_names(paths: Sequence[str]) -> list[str]:
    """Return the names of files in the innermost folder that holds all of them."""
    folder = posixpath.commonpath({posixpath.dirname(path) for path in paths})
    return [posixpath.relpath(path, folder) for path in paths]
