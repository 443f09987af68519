"""In which order the items of an epoch are taken: computed item by item, never stored. Pure.

The order is a function of (seed, epoch, length) alone, so no checkpoint has to hold it and any
position of any epoch is reached at once. Data of a half-done epoch depends on it: what a version
yields never changes, and golden values in the tests hold that. NumPy only makes it faster; its own
random streams are not used, because it does not promise them between versions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ORDER_VERSION = 1
SHUFFLED = f"shuffled-{ORDER_VERSION}"  # as fingerprints name it
SEQUENTIAL = "sequential"
MAX_LENGTH = 1 << 62

# First parts of `derive`, so that no two uses of one seed ever share a stream.
ORDER_STREAM, SAMPLE_STREAM, RANK_STREAM, COLLATE_STREAM, WORKER_STREAM = range(1, 6)
PIECE_STREAM, ITEM_STREAM = 16, 17  # of data in pieces

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL_1, _MUL_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# Up to this length hashes are sorted, which is a perfect shuffle and needs 512 KiB at most.
_SORTED_UP_TO = 1 << 16
_ROUNDS = 8  # 4 are visibly uneven, 6 were enough in the tests; 8 leaves a margin


class Order(Protocol):
    """A permutation of ``range(length)``."""

    length: int

    def __call__(self, position: int) -> int:
        """Return the index of the item at ``position``, in ``[0, length)``."""

    def at(self, positions: Sequence[int]) -> list[int]:
        """Return the index at each of ``positions``; much faster than one by one with NumPy."""

    def array(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Like `at`, for arrays. Needs NumPy."""


def derive(*parts: int) -> int:
    """Return 64 random-looking bits that depend on all of ``parts``, in their order."""
    state = 0
    for part in parts:
        state = _mix(((state ^ (part & _MASK)) + _GOLDEN) & _MASK)
    return state


def order(seed: int, epoch: int, length: int, *, shuffle: bool = True) -> Order:
    """Return the order of one epoch: ``order(seed, epoch, length)(position) -> index``.

    Takes at most 512 KiB and some milliseconds, whatever ``length`` is. Without ``shuffle`` it is
    the order of the data set.

    Raises:
        ValueError: ``length`` is not in ``[0, 2**62]``, or ``seed`` or ``epoch`` is negative.
        IndexError: when called: ``position`` is not in ``[0, length)``.
    """
    if not 0 <= length <= MAX_LENGTH:
        raise ValueError(f"length must be in [0, 2**62], got {length}")
    if seed < 0 or epoch < 0:
        raise ValueError(f"seed and epoch must not be negative, got {seed} and {epoch}")
    if not shuffle:
        return _Sequential(length)
    key = derive(ORDER_STREAM, seed, epoch)
    return _Sorted(key, length) if length <= _SORTED_UP_TO else _Feistel(key, length)


def order_name(*, shuffle: bool) -> str:
    """Return what fingerprints call the order."""
    return SHUFFLED if shuffle else SEQUENTIAL


class Ahead:
    """Computes a few thousand items of an order at once and hands them out in small pieces.

    A batch at a time would cost five times as much per item.

    Args:
        order: to read from.
        items: to compute at once.
    """

    def __init__(self, order: Order, items: int = 4096) -> None:
        self._order = order
        self._items = items
        self._positions = range(0)
        self._indices: list[int] = []

    def at(self, positions: range) -> list[int]:
        """Return the index at each position, which must be in ``[0, length)``."""
        if len(positions) == 0:
            return []
        first = self._find(positions)
        if first is None:
            step = positions.step
            count = max(len(positions), self._items)
            stop = min(self._order.length, positions.start + step * count)
            self._positions = range(positions.start, max(stop, positions.stop), step)
            self._indices = self._order.at(self._positions)
            first = 0
        return self._indices[first : first + len(positions)]

    def _find(self, positions: range) -> int | None:
        """Return where ``positions`` begin among those computed; None if not all are there."""
        if positions.step != self._positions.step or positions.start not in self._positions:
            return None
        first = self._positions.index(positions.start)
        return first if first + len(positions) <= len(self._positions) else None


class _Sequential:
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, position: int) -> int:
        _check(position, self.length)
        return position

    def at(self, positions: Sequence[int]) -> list[int]:
        _check_all(positions, self.length)
        return list(positions)

    def array(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        _check_array(positions, self.length)
        same: NDArray[np.int64] = positions.copy()
        return same


class _Sorted:
    """The items sorted by a hash of their index: every order is as likely as any other."""

    def __init__(self, key: int, length: int) -> None:
        self.length = length
        np = numpy_or_none()
        if np is None:
            hashes = [_mix((key + (i + 1) * _GOLDEN) & _MASK) for i in range(length)]
            self._indices: Any = sorted(range(length), key=hashes.__getitem__)
        else:
            counters = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
            self._indices = np.argsort(_mix_array(counters + np.uint64(key)), kind="stable")

    def __call__(self, position: int) -> int:
        _check(position, self.length)
        return int(self._indices[position])

    def at(self, positions: Sequence[int]) -> list[int]:
        _check_all(positions, self.length)
        if isinstance(self._indices, list):
            return [self._indices[position] for position in positions]
        span = positions
        if isinstance(positions, range):
            span = slice(positions.start, positions.stop, positions.step)  # type: ignore[assignment]
        return self._indices[span].tolist()  # type: ignore[no-any-return]

    def array(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        _check_array(positions, self.length)
        found: NDArray[np.int64] = self._indices[positions]
        return found


class _Feistel:
    """A keyed permutation of two digits, ``index = x * b + y`` with ``x < a``, ``y < b``.

    Each round adds a hash of one digit to the other, which can be undone, so it is a permutation
    of ``range(a * b)``. That is at most ``a`` more than the length; what falls outside of the
    length is sent through again until it falls inside.
    """

    def __init__(self, key: int, length: int) -> None:
        self.length = length
        self._a = math.isqrt(length - 1) + 1
        self._b = -(-length // self._a)
        self._keys = [_mix((key + (i + 1) * _GOLDEN) & _MASK) for i in range(_ROUNDS)]

    def __call__(self, position: int) -> int:
        _check(position, self.length)
        index = self._once(position)
        while index >= self.length:
            index = self._once(index)
        return index

    def _once(self, value: int) -> int:
        a, b = self._a, self._b
        x, y = divmod(value, b)
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                x = (x + ((_mix(key ^ y) >> 32) * a >> 32)) % a
            else:
                y = (y + ((_mix(key ^ x) >> 32) * b >> 32)) % b
        return x * b + y

    def at(self, positions: Sequence[int]) -> list[int]:
        np = numpy_or_none()
        if np is None:
            return [self(position) for position in positions]
        if isinstance(positions, range):
            as_array = np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)
        else:
            as_array = np.asarray(positions, dtype=np.int64)
        return self.array(as_array).tolist()  # type: ignore[no-any-return]

    def array(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        _check_array(positions, self.length)
        indices = self._once_array(positions.astype("uint64"))
        while (outside := indices >= self.length).any():
            indices[outside] = self._once_array(indices[outside])
        return indices.astype("int64")

    def _once_array(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        np = numpy_or_none()
        a, b, half = np.uint64(self._a), np.uint64(self._b), np.uint64(32)
        x = values // b
        y = values - x * b
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                x += (_mix_array(y ^ np.uint64(key)) >> half) * a >> half
                x -= a * (x >= a)
            else:
                y += (_mix_array(x ^ np.uint64(key)) >> half) * b >> half
                y -= b * (y >= b)
        return x * b + y  # type: ignore[no-any-return]


def _mix(value: int) -> int:
    """Return the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA '14): a bijection."""
    value = ((value ^ (value >> 30)) * _MUL_1) & _MASK
    value = ((value ^ (value >> 27)) * _MUL_2) & _MASK
    return value ^ (value >> 31)


def _mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    np = numpy_or_none()
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MUL_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MUL_2)
    values ^= values >> np.uint64(31)
    return values


@cache
def numpy_or_none() -> Any:
    """Return NumPy, or None where it is not installed."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def _check(position: int, length: int) -> None:
    if not 0 <= position < length:
        raise IndexError(f"position {position} is not in [0, {length})")


def _check_all(positions: Sequence[int], length: int) -> None:
    if len(positions):
        _check(min(positions), length)
        _check(max(positions), length)


def _check_array(positions: NDArray[np.int64], length: int) -> None:
    if positions.size:
        _check(int(positions.min()), length)
        _check(int(positions.max()), length)
