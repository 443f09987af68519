"""What the files of a cache count for, and which of them go first. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

BLOCK_BYTES = 4096  # file systems give space out in blocks of this size


@dataclass(frozen=True, slots=True)
class CachedFile:
    """A cached file as a scan of the cache sees it."""

    name: str
    size_bytes: int
    last_use_ns: int  # since the epoch, by the clock of the process that used it


def charge_bytes(size_bytes: int) -> int:
    """Return what a file of this size counts for: whole blocks, nothing for an empty file."""
    if size_bytes < 0:
        raise ValueError(f"a size cannot be negative, got {size_bytes}")
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def bytes_to_free(*, used_bytes: int, need_bytes: int, max_bytes: int, low: float) -> int:
    """Return how much must go before ``need_bytes`` more may come.

    Nothing if they fit. Otherwise so much that the cache is filled to ``low * max_bytes`` with
    them, so that the next misses find room without an eviction of their own.

    Raises:
        ValueError: ``need_bytes`` is more than the cache holds.
    """
    if need_bytes > max_bytes:
        raise ValueError(f"{need_bytes} bytes never fit into {max_bytes}")
    if used_bytes + need_bytes <= max_bytes:
        return 0
    return used_bytes + need_bytes - max(int(low * max_bytes), need_bytes)


def plan_eviction(
    entries: Iterable[CachedFile], *, free_bytes: int, busy: Collection[str] = ()
) -> list[CachedFile]:
    """Return the files to evict, least recently used first, until they add up to ``free_bytes``.

    Empty files free nothing and stay. All that is left is returned if it is not enough.

    Args:
        entries: what is there.
        free_bytes: in charged bytes, see `charge_bytes`.
        busy: names that were found in use and are left out.
    """
    plan: list[CachedFile] = []
    for entry in sorted(entries, key=lambda entry: (entry.last_use_ns, entry.name)):
        if free_bytes <= 0:
            break
        if entry.size_bytes and entry.name not in busy:
            plan.append(entry)
            free_bytes -= charge_bytes(entry.size_bytes)
    return plan
