"""The orders of the epochs that a loader is in: made once each, and forgotten behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from dcp_checkfreq.data.order.permutation import Ahead, order
from dcp_checkfreq.data.order.position import Share

T = TypeVar("T")


class EpochOrders(Generic[T]):
    """Keeps what was made for the present epoch and its neighbours.

    Args:
        make: makes the order of an epoch.
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._made: dict[int, T] = {}

    def of(self, epoch: int) -> T:
        """Return the order of an epoch."""
        if epoch not in self._made:
            # A batch may straddle two epochs, and repeat items of the first: it is still needed.
            for old in [one for one in self._made if abs(one - epoch) > 1]:
                del self._made[old]
            self._made[epoch] = self._make(epoch)
        return self._made[epoch]


class Indices:
    """Turns shares into indices of items."""

    def __init__(self, seed: int, length: int, *, shuffle: bool) -> None:
        self._orders = EpochOrders(lambda epoch: Ahead(order(seed, epoch, length, shuffle=shuffle)))

    def of(self, share: Share) -> list[tuple[int, list[int]]]:
        """Return ``(epoch, indices)`` for each run of a share."""
        return [(epoch, self._orders.of(epoch).at(positions)) for epoch, positions in share.runs]
