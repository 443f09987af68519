"""`CachedFiles`: a map-style dataset over files of a slow volume."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable
from typing import Any

from dcp_checkfreq.data.cache.file_cache import FileCache


class CachedFiles:
    """A dataset whose item ``i`` is what ``load`` makes of ``paths[i]``, read through a cache.

    For any loader of map-style datasets. The paths are held in one piece of memory, which forked
    workers share, and not as a list of texts, which they would copy bit by bit.

    Args:
        paths: local paths or fsspec URLs, in the order of the items.
        cache: shared by all processes of the node.
        load: local path to item. The path is good until ``load`` returns, so it must not leave
            anything to be read later. None gives the file's bytes. Must pickle where workers
            are spawned.

    Raises:
        TypeError: a path is not text or PathLike.
        ValueError: a path has a NUL byte.
    """

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        cache: FileCache,
        load: Callable[[str], Any] | None = None,
    ) -> None:
        names = bytearray()
        self._ends = array("Q")
        for path in paths:
            text = os.fspath(path)
            if not isinstance(text, str):
                raise TypeError(f"expected paths as text, got {path!r}")
            name = os.fsencode(text)
            if b"\0" in name:
                raise ValueError(f"a path cannot have a NUL byte: {text!r}")
            names += name + b"\0"
            self._ends.append(len(names))
        self._names = bytes(names)
        self._cache = cache
        self._load = load

    @property
    def dataset_id(self) -> str:
        """Names the list of paths: the same paths in the same order have the same id.

        The sha256 of the paths, as they were given, each with a NUL byte after it. What is in
        the files is not part of it.
        """
        return hashlib.sha256(self._names).hexdigest()

    @property
    def cache(self) -> FileCache:
        """The cache, for its `FileCache.stats` of this process."""
        return self._cache

    def path(self, index: int) -> str:
        """Return a path as it was given.

        Raises:
            IndexError: there is no such item.
        """
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"item {index} of {count}")
        index %= count
        start = self._ends[index - 1] if index else 0
        return os.fsdecode(self._names[start : self._ends[index] - 1])

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Any:
        path = self.path(index)
        if self._load is None:
            return self._cache.read(path)
        return self._cache.load(path, self._load)
