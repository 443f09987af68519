"""Digests of payloads: xxh3-64 over blocks, so that part of a payload can be checked alone.

The block grows with the payload (`block_bytes`), from 16 KiB to 4 MiB: a rank that needs a few
rows of a shard reads little more than those rows, and large states do not bloat ``.metadata``.
`docs/decisions/0002-digest-blocks.md` has the measurement.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

ALGORITHM = "xxh3_64"
MIN_BLOCK_BYTES = 16 << 10
MAX_BLOCK_BYTES = 4 << 20
_BLOCKS_PER_PAYLOAD = 32


def block_bytes(payload_bytes: int) -> int:
    """Return the digest block of a payload: a power of two, about 1/32 of it, 16 KiB to 4 MiB."""
    wanted = payload_bytes // _BLOCKS_PER_PAYLOAD
    if wanted <= MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    return min(1 << (wanted.bit_length() - 1), MAX_BLOCK_BYTES)


def digest(data: memoryview | bytes) -> int:
    """Return the xxh3-64 of ``data``."""
    return xxhash.xxh3_64_intdigest(data)


def identity(content: bytes) -> str:
    """Return what tells one commit record from every other: xxh3-128 of its bytes, as hex."""
    return xxhash.xxh3_128_hexdigest(content)


def first_bad_block(data: memoryview, block: int, expected: Sequence[int]) -> int | None:
    """Return the number of the first block of ``data`` that fails its digest, or None.

    Args:
        data: whole blocks; only the last one may be shorter.
        block: block size in bytes.
        expected: one digest per block of ``data``.
    """
    for number, wanted in enumerate(expected):
        if digest(data[number * block : (number + 1) * block]) != wanted:
            return number
    return None
