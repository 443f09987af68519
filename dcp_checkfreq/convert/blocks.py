"""Cuts a tensor into blocks whose elements follow each other in memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Index = tuple[int | slice, ...]


def blocks(shape: Sequence[int], most: int) -> Iterator[Index]:
    """Yield indices of blocks that are all of a tensor, in C order.

    Args:
        shape: of the tensor.
        most: elements in a block, at least 1.
    """
    if not math.prod(shape):
        return
    if math.prod(shape) <= most:
        yield ()
        return
    size, inner = shape[0], math.prod(shape[1:])
    if inner <= most:
        step = most // inner
        for start in range(0, size, step):
            yield (slice(start, min(start + step, size)),)
        return
    for row in range(size):
        for rest in blocks(shape[1:], most):
            yield (row, *rest)
