"""The order of data that lies in pieces (row groups, shard files), each read from the front. Pure.

The pieces of an epoch, in a shuffled order, make one long row of items. It is cut into equally
long lanes, and position p of the epoch is the next item of lane ``p mod lanes``. So an epoch goes
through all lanes side by side, a few pieces are open at a time, and still two whole numbers say
what is consumed. A rank of W that divides the number of lanes meets ``lanes / W`` of them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dcp_checkfreq.data.order.permutation import (
    ITEM_STREAM,
    PIECE_STREAM,
    SEQUENTIAL,
    Order,
    derive,
    order,
)

LANES_VERSION = 1
DEFAULT_LANES = 48  # divided by many numbers of ranks: 1, 2, 3, 4, 6, 8, 12, 16, 24, 48


@dataclass(frozen=True, slots=True)
class Run:
    """Items of a batch that lie in one lane and one piece.

    Attributes:
        lane: in which they are met.
        piece: in which they lie.
        places: where in the piece, before the items of a window are shuffled.
        slots: where in the batch, as many.
    """

    lane: int
    piece: int
    places: range
    slots: range


class LaneOrder:
    """Which item of which piece comes at which position of one epoch.

    Args:
        sizes: items of each piece, all at least 1.
        lanes: pieces that are open at a time, over all ranks.
        seed: of the order.
        epoch: the order of each epoch is another.
        shuffle: False keeps pieces and items in their own order, in a single lane.
        window: only so many neighbours of a piece are shuffled among themselves, for what is read
            from front to back; None shuffles whole pieces.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        lanes: int,
        *,
        seed: int,
        epoch: int,
        shuffle: bool = True,
        window: int | None = None,
    ) -> None:
        if lanes < 1:
            raise ValueError(f"lanes must be at least 1, got {lanes}")
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.lanes = lanes if shuffle else 1
        self._sizes = sizes
        self._seed, self._epoch = seed, epoch
        self._shuffle = shuffle
        self._window = window
        pieces = order(derive(PIECE_STREAM, seed), epoch, len(sizes), shuffle=shuffle)
        self._pieces = pieces.at(range(len(sizes)))
        # Piece number i of the epoch is [ends[i], ends[i + 1]) of the long row.
        self._ends = list(accumulate((sizes[piece] for piece in self._pieces), initial=0))
        self.length = self._ends[-1]

    def runs(self, positions: range) -> Iterator[Run]:
        """Yield where the items at ``positions`` lie. In each lane they come from front to back.

        Raises:
            IndexError: a position is not in ``[0, length)``.
        """
        if len(positions) and not (positions[0] >= 0 and positions[-1] < self.length):
            raise IndexError(f"{positions} is not in [0, {self.length})")
        shared = math.gcd(positions.step, self.lanes)
        period = self.lanes // shared  # so many items on, the batch comes back to a lane
        stride = positions.step // shared
        for first in range(min(period, len(positions))):
            slots = range(first, len(positions), period)
            offset, lane = divmod(positions[first], self.lanes)
            at = self._lane_start(lane) + offset
            yield from self._cut(lane, range(at, at + len(slots) * stride, stride), slots)

    def _lane_start(self, lane: int) -> int:
        """Return where a lane begins in the long row. The first ones are longer by one, if any."""
        each, longer = divmod(self.length, self.lanes)
        return lane * each + min(lane, longer)

    def _cut(self, lane: int, row: range, slots: range) -> Iterator[Run]:
        """Yield items of the long row piece by piece."""
        while len(row):
            number = bisect_right(self._ends, row.start) - 1
            start, stop = self._ends[number], self._ends[number + 1]
            count = len(range(row.start, min(stop, row.stop), row.step))
            inside = row[:count]
            places = range(inside.start - start, inside.stop - start, row.step)
            yield Run(lane, self._pieces[number], places, slots[:count])
            row, slots = row[count:], slots[count:]

    def window(self, piece: int, place: int) -> range:
        """Return the items of a piece among which the one at ``place`` is shuffled."""
        size = self._sizes[piece]
        width = self._window or size
        start = place - place % width
        return range(start, min(size, start + width))

    def within(self, piece: int, window: range) -> Order:
        """Return the order inside of a window: place, counted from its start, to item likewise."""
        key = derive(ITEM_STREAM, self._seed, piece, window.start)
        return order(key, self._epoch, len(window), shuffle=self._shuffle)

    def consumed(self, samples: int) -> list[int]:
        """Return how many items of each piece the first ``samples`` positions take."""
        taken = [0] * len(self._sizes)
        for lane in range(self.lanes):
            done = len(range(lane, samples, self.lanes))
            start = self._lane_start(lane)
            for run in self._cut(lane, range(start, start + done), range(done)):
                taken[run.piece] += len(run.places)
        return taken


@dataclass(frozen=True, slots=True)
class LaneRule:
    """How the items of pieces are ordered in every epoch; see `LaneOrder`."""

    sizes: Sequence[int]
    lanes: int
    window: int | None
    seed: int
    shuffle: bool

    @property
    def name(self) -> str:
        """Name and version of the order, for fingerprints."""
        window = "" if self.window is None else f"w{self.window}"
        return f"lanes{self.lanes}{window}-{LANES_VERSION}" if self.shuffle else SEQUENTIAL

    def of(self, epoch: int) -> LaneOrder:
        """Return the order of an epoch."""
        return LaneOrder(
            self.sizes,
            self.lanes,
            seed=self.seed,
            epoch=epoch,
            shuffle=self.shuffle,
            window=self.window,
        )
