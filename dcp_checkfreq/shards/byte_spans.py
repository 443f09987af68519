"""Which bytes of a saved chunk hold a wanted box of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``[start, stop)`` of a chunk in C order; ``dense`` if all of them are wanted."""

    start: int
    stop: int
    dense: bool


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the C-order strides of a shape, in elements."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def span_of(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> Span:
    """Return the smallest run of elements of a chunk that holds a box of it.

    Args:
        shape: of the saved chunk.
        offsets: of the box in the chunk.
        lengths: of the box.

    Raises:
        ValueError: the box is not inside the chunk.
    """
    if lengths == shape and not any(offsets) and len(offsets) == len(shape):
        return Span(0, math.prod(shape), dense=True)
    if not len(shape) == len(offsets) == len(lengths) or any(
        start < 0 or length < 0 or start + length > size
        for size, start, length in zip(shape, offsets, lengths, strict=True)
    ):
        raise ValueError(f"a box of {list(lengths)} at {list(offsets)} is not in {list(shape)}")
    count = math.prod(lengths)
    if count == 0:
        return Span(0, 0, dense=True)
    strides = strides_of(shape)
    start = sum(at * step for at, step in zip(offsets, strides, strict=True))
    last = start + sum((n - 1) * step for n, step in zip(lengths, strides, strict=True))
    return Span(start, last + 1, dense=last + 1 - start == count)
