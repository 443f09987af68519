"""What loaders whose batches are made by a `DataLoader` share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from dcp_checkfreq.data.order.cursor import Cursor, HandOut, HasPosition
from dcp_checkfreq.data.order.options import LoaderOptions
from dcp_checkfreq.data.order.permutation import WORKER_STREAM, derive
from dcp_checkfreq.data.order.position import Share, Step
from dcp_checkfreq.data.random.per_sample import SampleSeeds
from dcp_checkfreq.format.torch_private import keep_queues

Keys = list[tuple[int, list[int]]]  # (epoch, numbers of the items) of one batch, in its order
Plan = Iterator[tuple[Step, Share]]


class TorchLoader(HasPosition):
    """A loader with a position. See its subclasses.

    Nothing that is passed in may refer back to the loader: left to the collector of cycles,
    workers would be joined in whatever thread it happens to run in, which may be one of theirs.

    Args:
        options: of the loader.
        cursor: the position.
        batches: makes one batch of what ``feed`` yields for it. In the workers.
        feed: turns the plan of an epoch into what batches are made of. Asked ahead of the training.
        of_torch: options of `DataLoader`.
    """

    def __init__(
        self,
        options: LoaderOptions,
        cursor: Cursor,
        batches: Dataset[Any],
        feed: Callable[[Plan], Iterable[Any]],
        of_torch: Mapping[str, Any],
    ) -> None:
        self.batch_size = options.per_rank
        self.num_workers = options.num_workers
        self._cursor = cursor
        self._batches = batches
        self._sampler = _Sampler(cursor, feed)
        # Workers that end with each epoch would lose what they fetched ahead, and start slowly.
        self._of_torch = {**of_torch, "persistent_workers": options.num_workers > 0}
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] | None = self._new_loader()

    def _new_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._batches,
            batch_size=None,  # an item of ours is a batch
            sampler=self._sampler,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            # Without it DataLoader draws from the training's random state at each epoch.
            generator=self._generator,
            **self._of_torch,
        )

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch; those made before become stale."""
        self._cursor.check_place()
        # What follows resets the workers, so older iterators must be stale even if it fails.
        self._cursor.turns.begin()
        at, rank = self._cursor.position, self._cursor.place.rank
        key = derive(WORKER_STREAM, self._cursor.seed, at.epoch, at.samples, rank)
        self._generator.manual_seed(key >> 1)
        if self._loader is None:
            self._loader = self._new_loader()
        try:
            batches = iter(self._loader)
        except BaseException:
            self._drop_loader()
            raise
        keep_queues(batches)
        return HandOut(self._cursor, lambda share: next(batches), self._drop_loader)

    def _drop_loader(self) -> None:
        """Begin with new workers next time: the old ones may be dead, or a batch ahead."""
        self._loader = None


class _Sampler:
    """The sampler of `DataLoader`: what it yields goes to the workers."""

    def __init__(self, cursor: Cursor, feed: Callable[[Plan], Iterable[Any]]) -> None:
        self._cursor = cursor
        self._feed = feed

    def __len__(self) -> int:
        return self._cursor.steps_left()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._feed(self._cursor.plan()))


class BatchMaker(Dataset[Any]):
    """Makes one batch of what the sampler yields, under the random numbers of its samples.

    Args:
        collate: makes the batch.
        seeds: sets the random numbers.
    """

    def __init__(self, collate: Callable[[Any], Any], seeds: SampleSeeds) -> None:
        self._collate = collate
        self._seeds = seeds

    def _made(self, keys: Keys, samples: Callable[[], Any]) -> Any:
        with self._seeds.batch():
            found = samples()
            epoch, numbers = keys[0]
            self._seeds.collate(epoch, numbers[0])
            return self._collate(found)


def _as_it_is(batch: Any) -> Any:
    return batch
