"""What loaders of data in pieces share: one thread reads ahead, workers make the batches.

Pieces (row groups, shard files) are read by one thread of the training process, because several
DataLoader workers would each read all of them. Workers get what was read, and decode, transform
and collate it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch.utils.data import Dataset

from dcp_checkfreq.data.loaders.base import TorchLoader
from dcp_checkfreq.data.order.cursor import Cursor
from dcp_checkfreq.data.order.position import (
    Deal,
    Last,
    OnMismatch,
    Share,
    Step,
    batch_per_rank,
)
from dcp_checkfreq.data.order.ranks import resolve
from dcp_checkfreq.data.random.per_sample import SampleSeeds

_log = logging.getLogger(__name__)

_OPTIONS = frozenset(
    ("pin_memory", "prefetch_factor", "timeout", "worker_init_fn", "multiprocessing_context")
)


@dataclass(frozen=True, slots=True)
class Raw:
    """What was read for one batch of this rank.

    Attributes:
        keys: (epoch, numbers of the items in the data set), in the order of the batch.
        items: as the reader gives them, in the same order.
    """

    keys: list[tuple[int, list[int]]]
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


class Reader(Protocol):
    """Reads the batches of one iterator, one after the other, in one thread."""

    def read(self, share: Share) -> Raw:
        """Read what a share names. Each share lies behind the one before."""

    def close(self) -> None:
        """Let go of what is open."""


class Maker(Dataset[Any]):
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
        self._rows = rows
        self._transform = transform
        self._collate = collate
        self._seeds = seeds

    def __getitem__(self, raw: Raw) -> Any:
        with self._seeds.batch():
            samples = raw.items if self._rows is None else list(self._samples(raw))
            epoch, numbers = raw.keys[0]
            self._seeds.collate(epoch, numbers[0])
            return self._collate(samples)

    def _samples(self, raw: Raw) -> Iterator[Any]:
        assert self._rows is not None
        keys = ((epoch, number) for epoch, numbers in raw.keys for number in numbers)
        for (epoch, number), row in zip(keys, self._rows(raw.items), strict=True):
            self._seeds.sample(epoch, number)
            yield row if self._transform is None else self._transform(row)


class ReadingLoader(TorchLoader):
    """A loader whose batches are read in one thread and made in workers. See its subclasses."""

    def __init__(
        self,
        length: int,
        batch_size: int | None,
        global_batch: int | None,
        maker: Maker,
        new_reader: Callable[[Counts], Reader],
        *,
        lanes: int,
        order: str,
        seed: int,
        last: Last,
        rank: int | None,
        world_size: int | None,
        num_workers: int,
        batches_ahead: int,
        dataset_id: str,
        on_mismatch: OnMismatch,
        options: dict[str, Any],
    ) -> None:
        what = type(self).__name__
        if unknown := options.keys() - _OPTIONS:
            raise TypeError(
                f"{what} takes no {', '.join(sorted(unknown))}; of DataLoader's options it takes "
                f"{', '.join(sorted(_OPTIONS))}"
            )
        if batches_ahead < 0:
            raise ValueError(f"batches_ahead must not be negative, got {batches_ahead}")
        place = resolve(rank, world_size)
        self.batch_size = batch_per_rank(batch_size, global_batch, place.world_size)
        if lanes % place.world_size and place.rank == 0:
            _log.warning(
                "%s: %d lanes do not divide among %d ranks, so every rank reads pieces of all "
                "lanes. It stays exact, and reads up to %d times as much",
                *(what, lanes, place.world_size, place.world_size),
            )
        cursor = Cursor(
            Deal(length, self.batch_size, place.world_size, last),
            place.rank,
            seed=seed,
            order=order,
            dataset_id=dataset_id,
            what=what,
            on_mismatch=on_mismatch,
        )
        self._counts = Counts()
        self._feed = _Feed(cursor, partial(new_reader, self._counts), batches_ahead)
        super().__init__(cursor, place, maker, self._feed, num_workers, options)

    @property
    def read_stats(self) -> ReadStats:
        """What this rank has read, and how much of it was used."""
        return self._counts.so_far()


class _Feed:
    """The sampler of `DataLoader`: what it yields goes to the workers."""

    def __init__(
        self, cursor: Cursor, new_reader: Callable[[], Reader], batches_ahead: int
    ) -> None:
        self._cursor = cursor
        self._new_reader = new_reader
        self._batches_ahead = batches_ahead

    def __len__(self) -> int:
        return self._cursor.steps_left()

    def __iter__(self) -> Iterator[Raw]:
        return _read_ahead(self._cursor.plan(), self._new_reader, self._batches_ahead)


def _read_ahead(
    plan: Iterator[tuple[Step, Share]], new_reader: Callable[[], Reader], batches_ahead: int
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
