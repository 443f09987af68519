"""How a shard is cut into the parts of an upload, decided from its size before the first byte."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from typing import Any

MIB = 1 << 20

# S3: a part has 5 MiB at least (but for the last one) and 5 GiB at most; 10,000 parts at most.
# 16 MiB is two to three times what one connection to S3 carries in the time of an answer, and six
# of them, in two files at once, stay below 256 MiB when they have to be kept in memory.
PART_BYTES = 16 * MIB
MAX_PARTS = 10_000
PARTS_IN_FLIGHT = 6  # per shard; one more is being filled
COPIED_PARTS_IN_FLIGHT = 3  # where the client needs each part in one piece and copies it once more

# From here on a piece is sent from where it lies. Smaller ones are gathered: each costs a request
# for the GIL and a system call, and the gap between two tensors has a piece of its own.
_IN_PLACE_FROM_BYTES = 256 << 10
_GATHERED_BYTES = 1 * MIB


def part_bytes(size_bytes: int) -> int:
    """Return the size of every part but the last one: whole MiB, and at most 10,000 parts."""
    least = -(-size_bytes // MAX_PARTS)
    return max(PART_BYTES, -(-least // MIB) * MIB)


def checked(pieces: Iterable[memoryview], size_bytes: int, where: str) -> Iterator[memoryview]:
    """Yield the pieces, and raise `OSError` instead of ending if they do not add up."""
    given = 0
    for piece in pieces:
        given += len(piece)
        if given > size_bytes:
            break
        if len(piece):
            yield piece
    if given != size_bytes:
        raise OSError(errno.EINVAL, f"{given} bytes were given for a file of {size_bytes}", where)


def gathered(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the same bytes with runs of small pieces copied together; large ones as they are."""
    store, used = bytearray(), 0
    for piece in pieces:
        size = len(piece)
        if used and (size >= _IN_PLACE_FROM_BYTES or used + size > len(store)):
            yield memoryview(store)[:used]
            store, used = bytearray(), 0
        if size >= _IN_PLACE_FROM_BYTES:
            yield piece
            continue
        if not store:
            store = bytearray(_GATHERED_BYTES)
        store[used : used + size] = piece
        used += size
    if used:
        yield memoryview(store)[:used]


def in_parts(pieces: Iterable[memoryview], part: int) -> Iterator[list[memoryview]]:
    """Yield the parts, each as the pieces it consists of. Nothing is copied."""
    group: list[memoryview] = []
    missing = part
    for piece in pieces:
        while len(piece) >= missing:
            yield [*group, piece[:missing]]
            piece, group, missing = piece[missing:], [], part
        if len(piece):
            group.append(piece)
            missing -= len(piece)
    if group:
        yield group


def fill(target: memoryview, data: Any, path: str) -> None:
    """Copy ``data`` to ``target``; `EOFError` unless both are of one size."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    if len(view) != len(target):
        raise EOFError(f"{path}: {len(view)} bytes came, {len(target)} were asked for")
    target[:] = view
