"""`FileCache`: files of a slow volume, kept on a local disk for all processes of a node."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

from dcp_checkfreq.data.cache.eviction import charge_bytes
from dcp_checkfreq.data.cache.folder import CacheFolder
from dcp_checkfreq.data.cache.source import (
    FromSource,
    Source,
    canonical,
    suffix_of,
)
from dcp_checkfreq.data.cache.stats import (
    CacheStats,
    Fallback,
    Tally,
    kind_of,
)
from dcp_checkfreq.errors import BadLocation
from dcp_checkfreq.runtime.clock import Clock, SystemClock
from dcp_checkfreq.runtime.flock import HeldFile, flock_works
from dcp_checkfreq.storage.local.tier import at_home

_T = TypeVar("_T")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class _Here:
    """What belongs to one process and goes neither to forked nor to spawned ones."""

    def __init__(self, folder: CacheFolder, tally: Tally) -> None:
        self.pid = os.getpid()
        self.folder = folder
        self.tally = tally
        self.prepared = False
        self.flock_works = True  # until it was tried


class FileCache:
    """A bounded folder of copies, shared by all processes of a node that name the same root.

    It promises that what is served is the whole content of the source as it was copied; that all
    copies together, finished or not, take at most ``max_bytes`` whatever is killed when; and that
    trouble with the cache never fails a request: the source is read instead, with one
    warning per kind and process. Errors of the source are raised.

    A source is taken not to change. If its content does, change ``version``. A file larger than
    the cache is read from the source. Usable from many threads; may be pickled and forked.

    Args:
        root: a folder for nothing else, on a disk of this node.
        max_bytes: bound on the files' sizes, each rounded up to blocks of 4096 bytes. Folders and
            a record of 100 bytes come on top. Give all processes the same.
        policy: ``"keep"`` copies until it is full and then evicts nothing, which serves most
            where every epoch reads all files in another order. ``"lru"`` evicts what was not used
            for longest.
        low: ``"lru"`` makes room down to this part of ``max_bytes``, so that not every miss evicts.
        version: of the sources' content; copies of other versions are not served.
        storage_options: for fsspec. They do not tell copies apart: use another root or
            version for another endpoint.
        clock: for tests.

    Raises:
        BadLocation: the root is no local path, or flock does nothing there.
        TypeError: ``max_bytes`` is no int, or the root no path.
        ValueError: another argument makes no sense.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        max_bytes: int,
        *,
        policy: Literal["keep", "lru"] = "keep",
        low: float = 0.9,
        version: str = "",
        storage_options: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        text = canonical(root)
        at_home(os.fspath(root))  # raises for a user that is not there
        if not os.path.isabs(text):
            raise BadLocation(text, "a cache must be a folder on a disk of this node")
        self.max_bytes = operator.index(max_bytes)
        if self.max_bytes <= 0:
            raise ValueError(f"max_bytes must be positive, got {max_bytes}")
        if policy not in ("keep", "lru"):
            raise ValueError(f"policy must be 'keep' or 'lru', got {policy!r}")
        if not 0 < low <= 1:
            raise ValueError(f"low must be in (0, 1], got {low!r}")
        self.root = text
        self.policy = policy
        self.low = low
        self.version = version
        self._options = dict(storage_options or {})
        self._clock = clock if clock is not None else SystemClock()
        self._here = self._start()
        try:
            self._prepare(self._here)
        except OSError as error:
            self._here.tally.warn(kind_of(error), error)
        if not self._here.flock_works:
            raise BadLocation(
                text, "flock does nothing there, so processes cannot share it: use a local disk"
            )

    @contextmanager
    def pin(self, src: str | os.PathLike[str]) -> Iterator[str]:
        """Give a local path with the content of ``src``, which stays as long as the context.

        The path is for reading only. It is the copy's, or the source's own after a fallback; of
        a remote source then that of a temporary copy outside of the cache. A pin belongs to the
        process: it ends with it, and a forked child does not have it.

        Args:
            src: a local path or an fsspec URL.

        Raises:
            OSError: the source cannot be read; the error names it.
        """
        with _unwrapped(), self._served(src) as (copy, source):
            if copy is not None:
                yield copy.path
            else:
                with source.local_path() as path:
                    yield path

    def load(self, src: str | os.PathLike[str], load: Callable[[str], _T]) -> _T:
        """Return ``load(path)`` of a path as from `pin`.

        If it raises OSError on a cached copy, it is called once more with the source: the cache's
        disk may have failed, or the folder may have been removed.

        Raises:
            OSError: the source cannot be read.
        """
        with _unwrapped(), self._served(src) as (copy, source):
            if copy is not None:
                try:
                    return load(copy.path)
                except OSError as error:
                    self._of_this_process().tally.fallback(Fallback.UNREADABLE, error)
            with source.local_path() as path:
                return load(path)

    def read(self, src: str | os.PathLike[str]) -> bytes:
        """Return the content of ``src``; without a temporary file also after a fallback.

        Raises:
            OSError: the source cannot be read.
        """
        with _unwrapped(), self._served(src) as (copy, source):
            if copy is not None:
                try:
                    with open(copy.path, "rb") as file:
                        return file.read()
                except OSError as error:
                    self._of_this_process().tally.fallback(Fallback.UNREADABLE, error)
            return source.read()

    def stats(self) -> CacheStats:
        """Return what was served in this process so far; other processes have their own."""
        return self._of_this_process().tally.stats()

    def used_bytes(self) -> int:
        """Return how many bytes the copies take now, finished or not, of all processes.

        Raises:
            OSError: the cache is not usable.
        """
        here = self._of_this_process()
        self._prepare(here)
        return here.folder.used_bytes()

    def __getstate__(self) -> dict[str, Any]:
        """Another process gets the settings only."""
        return {name: value for name, value in vars(self).items() if name != "_here"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Touch nothing yet: the first request prepares the folder."""
        vars(self).update(state)
        self._here = self._start()

    def _start(self) -> _Here:
        folder = CacheFolder(
            self.root,
            self.max_bytes,
            evicts=self.policy == "lru",
            low=self.low,
            clock=self._clock,
            boot=_boot(),
        )
        return _Here(folder, Tally(self.root))

    def _of_this_process(self) -> _Here:
        if self._here.pid != os.getpid():
            self._here = self._start()
        return self._here

    def _prepare(self, here: _Here) -> None:
        if not here.prepared:
            os.makedirs(self.root, exist_ok=True)
            here.flock_works = flock_works(self.root)
            if here.flock_works:
                here.folder.prepare()
            here.prepared = True

    @contextmanager
    def _served(self, src: str | os.PathLike[str]) -> Iterator[tuple[HeldFile | None, Source]]:
        source = Source(src, self._options)
        copy = self._copy_of(source)
        try:
            yield copy, source
        finally:
            if copy is not None:
                copy.close()

    def _copy_of(self, source: Source) -> HeldFile | None:
        """Return the copy of a source, held; None if the source is to be read instead."""
        here = self._of_this_process()
        key = hashlib.sha256(os.fsencode(f"{self.version}\0{source.name}")).hexdigest()
        name = key + suffix_of(source.name)
        try:
            self._prepare(here)
            if not here.flock_works:
                here.tally.fallback(Fallback.NO_FLOCK)
                return None
            copy = here.folder.hold(name)
            got = self._fill(here, source, name) if copy is None else self._hit(here, copy)
        except OSError as error:  # of the cache: those of the source are no OSError here
            if isinstance(error, FileNotFoundError):
                here.prepared = False  # the folder was removed: make it again
            here.tally.fallback(kind_of(error), error)
            return None
        if isinstance(got, Fallback):
            here.tally.fallback(got)
            return None
        return got

    def _fill(self, here: _Here, source: Source, name: str) -> HeldFile | Fallback:
        size_bytes = source.size_bytes()
        if size_bytes is None:
            return Fallback.UNKNOWN_SIZE
        if charge_bytes(size_bytes) > self.max_bytes:
            return Fallback.TOO_LARGE
        if here.folder.is_full_for(size_bytes):
            return Fallback.FULL
        partial, is_whole = here.folder.claim(name)
        if is_whole:
            return self._hit(here, partial)
        try:
            if not here.folder.reserve(partial, size_bytes):
                here.folder.abandon(partial)
                return Fallback.FULL
            source.copy_to(partial.fd, size_bytes)
            copy = here.folder.publish(partial, name)
        except BaseException:
            with suppress(OSError):  # released in any case, and then as good as dead
                here.folder.abandon(partial)
            raise
        here.tally.miss(size_bytes)
        return copy

    def _hit(self, here: _Here, copy: HeldFile) -> HeldFile:
        if self.policy == "lru":
            try:
                here.folder.touch(copy)
            except OSError as error:  # costs the order of eviction, not the hit
                here.tally.warn(kind_of(error), error)
        here.tally.hit(copy.size_bytes())
        return copy


def _boot() -> str:
    try:
        with open(_BOOT_ID) as file:
            return file.read().strip()
    except OSError:
        return ""  # not known here: all boots are taken for one


@contextmanager
def _unwrapped() -> Iterator[None]:
    try:
        yield
    except FromSource as wrapped:
        raise wrapped.error from wrapped.__cause__
