"""Where each item goes: which file, and at which offset. Pure.

Payloads of 64 KiB and more start at a multiple of 4096 of the file, smaller ones at a multiple of
64. Only payloads are aligned; the gaps are outside of the items, so an item stays a plain archive.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

PAGE_BYTES = 4096
SMALL_ALIGN_BYTES = 64
PAGE_ALIGNED_FROM_BYTES = 64 << 10
# Less than this in a file is not worth a thread and a file of its own.
MIN_FILE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Extent:
    """Sizes of one item: archive bytes before the payload, the payload, archive bytes after it."""

    prefix_bytes: int
    payload_bytes: int
    suffix_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """One shard file: items in file order, and where each starts."""

    items: tuple[int, ...]  # positions in the list that was given
    starts: tuple[int, ...]  # bytes from the start of the file, one per item
    size_bytes: int


def assign_files(payload_bytes: Sequence[int], max_files: int) -> list[list[int]]:
    """Spread items over at most ``max_files`` files of nearly equal size.

    Largest first onto the smallest file: no file is above 4/3 of the best possible. Within a file
    items keep their order. Every item is in exactly one file; few bytes make fewer files.
    """
    if max_files < 1:
        raise ValueError(f"max_files must be at least 1, got {max_files}")
    files = max(1, min(max_files, sum(payload_bytes) // MIN_FILE_BYTES))
    if files == 1:
        return [list(range(len(payload_bytes)))] if payload_bytes else []
    heap = [(0, number) for number in range(files)]
    members: list[list[int]] = [[] for _ in range(files)]
    for item in sorted(range(len(payload_bytes)), key=payload_bytes.__getitem__, reverse=True):
        size, number = heapq.heappop(heap)
        members[number].append(item)
        heapq.heappush(heap, (size + payload_bytes[item], number))
    return [sorted(member) for member in members if member]


def next_place(end: int, payload_bytes: int) -> int:
    """Return the first offset from ``end`` on at which a payload of this size may start."""
    align = PAGE_BYTES if payload_bytes >= PAGE_ALIGNED_FROM_BYTES else SMALL_ALIGN_BYTES
    return -(-end // align) * align


def place(items: Sequence[int], extents: Sequence[Extent]) -> Placement:
    """Return where ``items`` go in one file, in that order.

    A file of one page or more is filled up to a whole page, so that all of it can be written with
    direct I/O.
    """
    starts = []
    end = 0
    for item in items:
        extent = extents[item]
        payload_at = next_place(end + extent.prefix_bytes, extent.payload_bytes)
        start = payload_at - extent.prefix_bytes
        starts.append(start)
        end = payload_at + extent.payload_bytes + extent.suffix_bytes
    size = -(-end // PAGE_BYTES) * PAGE_BYTES if end >= PAGE_BYTES else end
    return Placement(tuple(items), tuple(starts), size)


def share_out(held: Sequence[Mapping[K, int]]) -> list[set[K]]:
    """Decide which rank writes what, so that every rank writes about as many bytes.

    Args:
        held: for each rank, what it holds and its bytes. What several ranks hold is the same.

    Returns:
        For each rank what it writes; everything that is held is in exactly one of them.
    """
    holders: dict[K, list[int]] = {}
    for rank, mine in enumerate(held):
        for key in mine:
            holders.setdefault(key, []).append(rank)
    load_bytes = [0] * len(held)
    chosen: list[set[K]] = [set() for _ in held]
    # What only one rank holds comes first, then the largest: small ones even out the rest.
    for key in sorted(
        holders, key=lambda key: (len(holders[key]) > 1, -held[holders[key][0]][key])
    ):
        rank = min(holders[key], key=lambda rank: load_bytes[rank])
        load_bytes[rank] += held[rank][key]
        chosen[rank].add(key)
    return chosen
