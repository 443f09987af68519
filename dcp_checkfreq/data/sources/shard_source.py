"""`ShardSource`: shard files as one data set, with the number of samples of each."""

from __future__ import annotations

import gzip
import logging
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

import fsspec

from dcp_checkfreq.data.order.interleave import DEFAULT_LANES
from dcp_checkfreq.data.sources import shard_index
from dcp_checkfreq.data.sources.paths import digest, listed, located, relative_names
from dcp_checkfreq.data.sources.shard_readers import FunctionReader, Layout, ShardReader

_log = logging.getLogger(__name__)

# What a shard that is wrong makes its reader raise. Errors of storage are raised unchanged.
_WRONG = (ValueError, EOFError, tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
_SHOWN = 5
_SCAN_THREADS = 8  # mostly waiting for storage
_DEFAULT_WINDOW = 64
_READ_AHEAD_BYTES = 4 << 20  # per open shard of a remote file system; s3fs would take 50 MiB


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard file and what is in it."""

    path: str
    layout: Layout


class ShardSource:
    """Shard files as one data set. The number of samples of each must be known, or is found out.

    Args:
        paths: local paths or fsspec URLs, in this order; or a pattern such as
            ``s3://bucket/train-*.tar``, whose matches are sorted. ``.gz``, ``.bz2``, ``.xz`` and
            ``.zst`` (if fsspec can) are decompressed.
        reader: `TarReader`, `JsonLinesReader`, `NpyReader`, another `ShardReader`, or a function
            that takes an open binary file and yields its samples, the same ones every time.
        index: path or URL of a file in which is kept how many samples each shard has and where
            they lie. Shards that it does not know, or knows with another size, are scanned, and it
            is written. Make it once, before a job of many ranks starts. Without it, every process
            scans all shards.
        samples: of each shard, if you know them; nothing is scanned then.
        filesystem: fsspec's, which knows the paths as they are; default: the local one, or that of
            the URLs.
        storage_options: for the file system of the URLs (keys, endpoint), as fsspec takes them;
            also for that of ``index``, if it is one.
        lanes: shards that are open at a time, over all ranks. The same for the life of a job, and
            best a multiple of all numbers of ranks it may have.
        window: so many neighbours in a shard are shuffled among themselves, and read at once. A
            rank holds up to ``lanes / world_size * window`` samples.

    Attributes:
        shards: those that are not empty.
        sizes: samples of each of them.
        fingerprint: names the data: the shards' names in their folder, and how many samples each
            has. The same for a copy elsewhere.

    Raises:
        ValueError: there are no samples, or numbers that cannot be; or a scan has found a shard
            that is cut short or damaged, or whose samples it cannot tell apart. The text has its
            path.
        FileNotFoundError: a path is not there, or nothing matches.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        reader: ShardReader | Callable[[IO[bytes]], Iterable[Any]],
        *,
        index: str | os.PathLike[str] | None = None,
        samples: Sequence[int] | None = None,
        filesystem: fsspec.AbstractFileSystem | None = None,
        storage_options: Mapping[str, Any] | None = None,
        lanes: int = DEFAULT_LANES,
        window: int = _DEFAULT_WINDOW,
    ) -> None:
        if lanes < 1 or window < 1:
            raise ValueError(f"lanes and window must be at least 1, got {lanes} and {window}")
        self.lanes, self.window = lanes, window
        self.reader: ShardReader
        if isinstance(reader, type) or not (hasattr(reader, "scan") or callable(reader)):
            raise TypeError(f"reader must be a ShardReader or a function, got {reader!r}")
        self.reader = reader if hasattr(reader, "scan") else FunctionReader(reader)  # type: ignore[assignment]
        found, filesystem = located(paths, filesystem, storage_options)
        self._filesystem = filesystem or fsspec.filesystem("file")
        if isinstance(found, str):
            pattern, found = found, sorted(self._filesystem.glob(found))
            if not found:
                raise FileNotFoundError(f"no shard matches {pattern}")
        self._names = relative_names(found)
        if samples is not None:
            layouts = _layouts_of(samples, found)
        elif index is not None:
            layouts = self._indexed(found, os.fspath(index), storage_options or {})
        else:
            layouts = self._scanned(found)
        pairs = zip(found, layouts, self._names, strict=True)
        filled = [(Shard(path, layout), name) for path, layout, name in pairs if layout.samples]
        self.shards = tuple(shard for shard, _ in filled)
        if not self.shards:
            raise ValueError(f"there are no samples in {len(found)} shards")
        empty = [path for path, layout in zip(found, layouts, strict=True) if not layout.samples]
        if empty:
            counts = len(empty), len(found)
            _log.warning("%d of %d shards are empty: %s", *counts, listed(empty))
        self.sizes = [shard.layout.samples for shard in self.shards]
        self.fingerprint = digest(f"{name}\0{shard.layout.samples}" for shard, name in filled)

    def __len__(self) -> int:
        """Return the number of samples."""
        return sum(self.sizes)

    def _scanned(self, paths: Sequence[str]) -> list[Layout]:
        with ThreadPoolExecutor(_SCAN_THREADS, thread_name_prefix="checkfreq-scan") as pool:
            layouts = list(pool.map(self._scan, paths))
        odd = [(path, note) for path, layout in zip(paths, layouts, strict=True)
               for note in layout.notes]  # fmt: skip
        for path, note in odd[:_SHOWN]:
            _log.warning("shard %s: %s", path, note)
        if len(odd) > _SHOWN:
            _log.warning("there is something of that kind in %d shards more", len(odd) - _SHOWN)
        return layouts

    def _scan(self, path: str) -> Layout:
        try:
            with self.open(path) as file:
                return self.reader.scan(file)
        except _WRONG as error:
            raise ValueError(f"shard {path}: {error}") from error

    def _indexed(
        self, paths: Sequence[str], location: str, options: Mapping[str, Any]
    ) -> list[Layout]:
        known = shard_index.load(location, options)
        sizes = dict(zip(paths, self._filesystem.sizes(list(paths)), strict=True))
        named = dict(zip(paths, self._names, strict=True))
        new = [
            path for path in paths
            if named[path] not in known or known[named[path]].size_bytes != sizes[path]
        ]  # fmt: skip
        if new:
            for path, layout in zip(new, self._scanned(new), strict=True):
                known[named[path]] = shard_index.IndexedShard(sizes[path], layout)
            shard_index.store(location, known, options)
        return [known[named[path]].layout for path in paths]

    def open(self, path: str) -> IO[bytes]:
        """Open a shard, decompressed."""
        compression = "gzip" if path.endswith(".tgz") else "infer"
        file: IO[bytes] = self._filesystem.open(
            path, "rb", compression=compression, block_size=_READ_AHEAD_BYTES
        )
        return file


def _layouts_of(samples: Sequence[int], paths: Sequence[str]) -> list[Layout]:
    if len(samples) != len(paths):
        raise ValueError(f"there are {len(paths)} shards, and {len(samples)} numbers of samples")
    for count in samples:
        if type(count) is not int or count < 0:
            raise ValueError(f"samples must be whole numbers from 0 on, got {count!r}")
    return [Layout(count) for count in samples]
