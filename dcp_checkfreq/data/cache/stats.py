"""What a file cache did in this process, and the one warning per kind of trouble."""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

_log = logging.getLogger(__name__)


class Fallback(str, Enum):
    """Why a file was read from the source, past the cache."""

    FULL = "full"  # no room: `keep` never evicts, `lru` not what is in use
    TOO_LARGE = "too large"  # larger than the whole cache
    UNKNOWN_SIZE = "unknown size"  # the source does not say its size
    NO_FLOCK = "no flock"  # locks do nothing there
    DISK_FULL = "disk full"
    PERMISSION = "permission"
    LOCK_TIMEOUT = "lock timeout"  # another process holds a lock for too long
    UNREADABLE = "unreadable"  # loading the copy failed; counted as hit or miss, too
    IO_ERROR = "I/O error"


# What a well set up cache does every day. All else is worth a warning.
_NORMAL = {Fallback.FULL, Fallback.TOO_LARGE}
_KINDS = {
    errno.ENOSPC: Fallback.DISK_FULL,
    errno.EDQUOT: Fallback.DISK_FULL,
    errno.EACCES: Fallback.PERMISSION,
    errno.EPERM: Fallback.PERMISSION,
    errno.EROFS: Fallback.PERMISSION,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What a `FileCache` did in this process.

    Each request is a hit, a miss, or a fallback; one that failed is none of them.

    Attributes:
        hits: served from the cache.
        misses: copied into the cache, and served from there.
        fallbacks: read from the source, by reason.
        hit_bytes: sizes of the hits.
        filled_bytes: sizes of the misses.
    """

    hits: int = 0
    misses: int = 0
    fallbacks: Mapping[Fallback, int] = field(default_factory=dict)
    hit_bytes: int = 0
    filled_bytes: int = 0


class Tally:
    """Counts for one `FileCache` in one process. Thread-safe.

    Args:
        root: names the cache in warnings.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._hits = self._misses = self._hit_bytes = self._filled_bytes = 0
        self._fallbacks: Counter[Fallback] = Counter()
        self._warned: set[Fallback] = set()

    def hit(self, size_bytes: int) -> None:
        """Count a file served from the cache."""
        with self._lock:
            self._hits += 1
            self._hit_bytes += size_bytes

    def miss(self, size_bytes: int) -> None:
        """Count a file copied into the cache."""
        with self._lock:
            self._misses += 1
            self._filled_bytes += size_bytes

    def fallback(self, kind: Fallback, error: OSError | None = None) -> None:
        """Count a file read from the source, and warn if it is not for a normal reason."""
        with self._lock:
            self._fallbacks[kind] += 1
        if kind not in _NORMAL:
            self.warn(kind, error)

    def warn(self, kind: Fallback, error: OSError | None) -> None:
        """Warn, the first time that trouble of this kind comes."""
        with self._lock:
            if kind in self._warned:
                return
            self._warned.add(kind)
        _log.warning(
            "file cache %s: %s. Files are read from the source where need be; "
            "said once per kind and process",
            self._root,
            kind.value if error is None else f"{kind.value}: {error}",
        )

    def stats(self) -> CacheStats:
        """Return the numbers so far."""
        with self._lock:
            return CacheStats(
                hits=self._hits,
                misses=self._misses,
                fallbacks=dict(self._fallbacks),
                hit_bytes=self._hit_bytes,
                filled_bytes=self._filled_bytes,
            )


def kind_of(error: OSError) -> Fallback:
    """Return what kind of trouble an error of the cache's disk is."""
    if isinstance(error, TimeoutError):
        return Fallback.LOCK_TIMEOUT
    return _KINDS.get(error.errno or 0, Fallback.IO_ERROR)
