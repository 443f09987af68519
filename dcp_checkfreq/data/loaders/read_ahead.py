"""What loaders of data in pieces share: one thread reads ahead, workers make the batches.

Pieces (row groups, shard files) are read by one thread of the training process, because several
DataLoader workers would each read all of them. Workers get what was read, and decode, transform
and collate it.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from dcp_checkfreq.data.loaders.base import BatchMaker, Keys, Plan, TorchLoader
from dcp_checkfreq.data.order.cursor import Cursor
from dcp_checkfreq.data.order.epoch_orders import EpochOrders
from dcp_checkfreq.data.order.interleave import LaneOrder, LaneRule
from dcp_checkfreq.data.order.options import LoaderOptions
from dcp_checkfreq.data.order.position import Share
from dcp_checkfreq.data.random.per_sample import SampleSeeds

_log = logging.getLogger(__name__)

_READ_THREADS = 8  # pieces that are needed at once: mostly waiting for storage
_OF_TORCH = frozenset(
    ("pin_memory", "prefetch_factor", "timeout", "worker_init_fn", "multiprocessing_context")
)


@dataclass(frozen=True, slots=True)
class Raw:
    """What was read for one batch of this rank.

    Attributes:
        keys: (epoch, numbers of the items in the data set), in the order of the batch.
        items: as the reader gives them, in the same order.
    """

    keys: Keys
    items: Any


@dataclass(frozen=True, slots=True)
class ReadStats:
    """What this rank has read since the loader was made.

    Attributes:
        pieces: row groups read, or shards opened; a piece counts each time.
        items: rows or samples read from them.
        used: of these, what was put into batches.
    """

    pieces: int = 0
    items: int = 0
    used: int = 0

    @property
    def amplification(self) -> float:
        """Items read for each one that was used; 1.0 is the least. 0.0 before the first."""
        return self.items / self.used if self.used else 0.0


class Counts:
    """The same, while it grows. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = ReadStats()

    def add(self, *, pieces: int = 0, items: int = 0, used: int = 0) -> None:
        """Count what was read or used."""
        with self._lock:
            now = self._now
            self._now = ReadStats(now.pieces + pieces, now.items + items, now.used + used)

    def so_far(self) -> ReadStats:
        """Return what they are by now."""
        return self._now


class PieceReader(ABC):
    """Reads the batches of one iterator, one after the other, in one thread.

    Args:
        rule: the order of the items.
        counts: what was read is counted there.
        threads: name of those that read several pieces at once.
    """

    def __init__(self, rule: LaneRule, counts: Counts, threads: str) -> None:
        self._counts = counts
        self._orders: EpochOrders[LaneOrder] = EpochOrders(rule.of)
        self._first_items = list(accumulate(rule.sizes, initial=0))  # of each piece
        self._pool = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix=threads)

    @abstractmethod
    def read(self, share: Share) -> Raw:
        """Read what a share names. Each share lies behind the one before."""

    def close(self) -> None:
        """Release threads and files."""
        self._pool.shutdown(cancel_futures=True)


class Maker(BatchMaker):
    """Makes a batch of what was read. In the workers, if there are any.

    Args:
        rows: to be called on `Raw.items`, gives one value per item; None: the batch is made from
            all of them at once.
        transform: of one such value; its random numbers are those of the item.
        collate: samples, or what was read if there are no rows, to a batch.
        seeds: sets the random numbers.
    """

    def __init__(
        self,
        rows: Callable[[Any], Iterable[Any]] | None,
        transform: Callable[[Any], Any] | None,
        collate: Callable[[Any], Any],
        seeds: SampleSeeds,
    ) -> None:
        super().__init__(collate, seeds)
        self._rows = rows
        self._transform = transform

    def __getitem__(self, raw: Raw) -> Any:
        is_whole = self._rows is None
        return self._made(raw.keys, lambda: raw.items if is_whole else list(self._samples(raw)))

    def _samples(self, raw: Raw) -> Iterator[Any]:
        assert self._rows is not None
        keys = ((epoch, number) for epoch, numbers in raw.keys for number in numbers)
        for (epoch, number), row in zip(keys, self._rows(raw.items), strict=True):
            self._seeds.sample(epoch, number)
            yield row if self._transform is None else self._transform(row)


class ReadingLoader(TorchLoader):
    """A loader whose batches are read in one thread and made in workers. See its subclasses.

    Args:
        options: of the loader.
        rule: the order of the items.
        maker: makes the batches.
        new_reader: of one iterator; is given the rule and where to count.
        of_torch: options of `DataLoader`.
    """

    def __init__(
        self,
        options: LoaderOptions,
        rule: LaneRule,
        maker: Maker,
        new_reader: Callable[[LaneRule, Counts], PieceReader],
        of_torch: Mapping[str, Any],
    ) -> None:
        what, place = type(self).__name__, options.place
        if unknown := of_torch.keys() - _OF_TORCH:
            raise TypeError(
                f"{what} takes no {', '.join(sorted(unknown))}; of DataLoader's options it takes "
                f"{', '.join(sorted(_OF_TORCH))}"
            )
        lanes = rule.lanes if rule.shuffle else 1
        if lanes % place.world_size and place.rank == 0:
            _log.warning(
                "%s: %d lanes do not divide among %d ranks, so every rank reads pieces of all "
                "lanes. It stays exact, and reads up to %d times as much",
                *(what, lanes, place.world_size, place.world_size),
            )
        self._rule = rule
        self._counts = Counts()
        feed = partial(_read_ahead, partial(new_reader, rule, self._counts), options.batches_ahead)
        cursor = Cursor(options, sum(rule.sizes), rule.name, what)
        super().__init__(options, cursor, maker, feed, of_torch)

    def _handed_out(self) -> list[int]:
        """Return how many items of each piece this epoch has handed out, over all ranks."""
        return self._rule.of(self.epoch).consumed(self.samples)

    @property
    def read_stats(self) -> ReadStats:
        """What this rank has read, and how much of it was used."""
        return self._counts.so_far()


def _read_ahead(
    new_reader: Callable[[], PieceReader], batches_ahead: int, plan: Plan
) -> Iterator[Raw]:
    """Yield what is read for each share, some batches ahead of the caller."""
    waiting: deque[Future[Raw]] = deque()
    with (
        closing(new_reader()) as reader,
        ThreadPoolExecutor(1, thread_name_prefix="checkfreq-data") as thread,
    ):
        try:
            for _, share in plan:
                waiting.append(thread.submit(reader.read, share))
                if len(waiting) > batches_ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for batch in waiting:
                batch.cancel()
