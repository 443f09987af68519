"""What an index of a tensor asks for: a box to read, and what to do with it then. Pure."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Picked:
    """A box of a tensor, and the index that makes of it what was asked for."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    rest: tuple[int | slice, ...]


def picked(index: object, shape: Sequence[int]) -> Picked:
    """Return what ``index`` picks of a tensor, as torch's basic indexing does.

    Args:
        index: numbers, slices and ``...``, one or a tuple of them.
        shape: of the tensor.

    Raises:
        IndexError: a number is out of range, or there are more than dimensions.
        TypeError: it is another kind of index.
        ValueError: a slice does not go forward.
    """
    boxes = [
        _of_one(part, size, dim)
        for dim, (part, size) in enumerate(zip(_expanded(index, len(shape)), shape, strict=True))
    ]
    offsets, lengths, rest = zip(*boxes, strict=True) if boxes else ((), (), ())
    return Picked(offsets, lengths, rest)


def _expanded(index: object, dims: int) -> list[object]:
    """Return one index for each dimension."""
    parts = list(index) if isinstance(index, tuple) else [index]
    dots = [place for place, part in enumerate(parts) if part is ...]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if len(parts) - len(dots) > dims:
        raise IndexError(f"too many indices: {len(parts) - len(dots)} for {dims} dimensions")
    at = dots[0] if dots else len(parts)
    all_of_it: list[object] = [slice(None)] * (dims - len(parts) + len(dots))
    return parts[:at] + all_of_it + parts[at + len(dots) :]


def _of_one(part: object, size: int, dim: int) -> tuple[int, int, int | slice]:
    """Return start and length of what is to be read of one dimension, and what to take of that."""
    if isinstance(part, slice):
        start, stop, step = part.indices(size)
        if step < 0:
            raise ValueError(f"the step of a slice must be above zero, got {step}")
        count = len(range(start, stop, step))
        return (start, (count - 1) * step + 1, slice(None, None, step)) if count else _NOTHING
    try:
        if isinstance(part, bool):
            raise TypeError
        number = operator.index(part)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"cannot read by an index of type {type(part).__name__}: use numbers, slices and "
            "'...', or load the tensor first: .tensor()[...]"
        ) from None
    if not -size <= number < size:
        raise IndexError(f"index {number} is out of range for dimension {dim} with size {size}")
    return number % size, 1, 0


_NOTHING = (0, 0, slice(None))
