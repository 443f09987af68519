"""`ResumableLoader`: a `DataLoader` over a map-style data set that goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from dcp_checkfreq.data.augment import AugmentRng, SampleSeeds
from dcp_checkfreq.data.batch_sampler import Indices
from dcp_checkfreq.data.cursor import Cursor
from dcp_checkfreq.data.order import SEQUENTIAL, SHUFFLED, WORKER_STREAM, derive
from dcp_checkfreq.data.position import Deal, Last, OnMismatch
from dcp_checkfreq.data.ranks import resolve

_Keys = list[tuple[int, list[int]]]  # (epoch, indices) of one batch

# Options of DataLoader that would take the order out of our hands, and what to use instead.
_NOT_OURS = {
    "sampler": "the order comes from seed= and shuffle=",
    "batch_sampler": "use DataLoader with ResumableBatchSampler",
    "drop_last": "use last='drop'",
    "generator": "use seed=",
}


class ResumableLoader:
    """Loads batches like `DataLoader`, and knows exactly which samples were trained.

    Every item comes exactly once per epoch, also if the job is cut at any batch and goes on with
    another number of ranks or workers or another batch size. The order and each sample's random
    numbers depend on (seed, epoch, index) only. Register it with `Checkpointer`, or save
    `state_dict()`: it is the position after the last batch that was handed out, whatever was
    fetched ahead. So save after the optimizer's step and before the next batch is taken.

    ::

        loader = ResumableLoader(dataset, 32, seed=1, num_workers=4)
        for epoch in range(loader.epoch, epochs):
            for batch in loader:  # the rest of the epoch
                ...

    Args:
        dataset: map-style.
        batch_size: samples per rank and step.
        seed: of the order and of the samples' random numbers, in ``[0, 2**64)``.
        shuffle: False keeps the order of the data set.
        last: what becomes of the last samples of an epoch; see `Deal`. The last batch may have
            ``batch_size + 1`` samples with the default "partial".
        rank: data-parallel rank; default: of the default process group.
        world_size: data-parallel ranks; tell both or neither.
        num_workers: processes; they stay alive between epochs.
        augment_rng: what is seeded before each sample (and before collate), without touching the
            training's own random state: "global" `random`, NumPy's and torch's global generators,
            and `sample_rng`; "explicit" only the latter, which costs less; "none" nothing. With
            "none" items are fetched by ``__getitems__`` where the data set has it.
        dataset_id: what the data is, in your words (name, version, transforms). A state is not
            loaded into data with another id or length. Default: ``dataset.dataset_id`` if there is
            one (`CachedFiles` has it).
        on_mismatch: what `load_state_dict` does by default if the data is another.
        dataloader_kwargs: go to `DataLoader`.

    Raises:
        TypeError: the data set is an `IterableDataset` (use `ResumableIterator`) or has no length,
            or an option of `DataLoader` would change the order.
        ValueError: numbers that cannot be.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        last: Last = "partial",
        rank: int | None = None,
        world_size: int | None = None,
        num_workers: int = 0,
        augment_rng: AugmentRng = "global",
        dataset_id: str | None = None,
        on_mismatch: OnMismatch = "error",
        **dataloader_kwargs: Any,
    ) -> None:
        _check_dataset(dataset)
        collate = dataloader_kwargs.pop("collate_fn", None) or default_collate
        self.dataset = dataset
        self.batch_size = batch_size
        self.num_workers = num_workers
        self._options = _checked_options(dataloader_kwargs, num_workers)
        self._place = resolve(rank, world_size)
        length = len(dataset)
        self._cursor = Cursor(
            Deal(length, batch_size, self._place.world_size, last),
            self._place.rank,
            seed=seed,
            order=SHUFFLED if shuffle else SEQUENTIAL,
            dataset_id=_id_of(dataset) if dataset_id is None else dataset_id,
            what=type(self).__name__,
            on_mismatch=on_mismatch,
        )
        self._ahead = _AheadOfTraining(self._cursor, Indices(seed, length, shuffle=shuffle))
        self._batches = BatchesOf(dataset, collate, SampleSeeds(seed, augment_rng))
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] | None = self._new_loader()

    def _new_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._batches,
            batch_size=None,  # an item of ours is a batch
            sampler=self._ahead,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            # Without it DataLoader draws from the training's random state at each epoch.
            generator=self._generator,
            **self._options,
        )

    @property
    def epoch(self) -> int:
        """Epoch of the next batch: with the last batch of an epoch it is already the next one."""
        return self._cursor.position.epoch

    @property
    def samples(self) -> int:
        """Samples of this epoch that all ranks together were handed."""
        return self._cursor.position.samples

    @property
    def valid(self) -> int:
        """Real samples, from the front, of this rank's last batch; the rest are repeats."""
        return self._cursor.valid

    def __len__(self) -> int:
        """Return how many batches are left of this epoch."""
        return self._cursor.steps_left()

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch; those made before become stale."""
        self._place.check(type(self).__name__)
        generation = self._cursor.begin()
        at, place = self._cursor.position, self._place
        self._generator.manual_seed(
            derive(WORKER_STREAM, self._cursor.seed, at.epoch, at.samples, place.rank) >> 1
        )
        if self._loader is None:
            self._loader = self._new_loader()
        try:
            batches = iter(self._loader)
        except BaseException:
            self._drop_loader()
            raise
        return _Iterator(self._cursor, generation, batches, self._drop_loader)

    def _drop_loader(self) -> None:
        """Begin with new workers next time: the old ones may be dead, or a batch ahead."""
        self._loader = None

    def state_dict(self) -> dict[str, str]:
        """Return the position after the last batch handed out, as JSON; the same on all ranks."""
        return self._cursor.state_dict()

    def load_state_dict(
        self, state: Mapping[str, Any], *, on_mismatch: OnMismatch | None = None
    ) -> None:
        """Go on from a saved position; iterators made before become stale.

        Args:
            state: of `state_dict`, from any number of ranks, any batch size and workers.
            on_mismatch: "error" refuses other data in the middle of an epoch, "restart_epoch"
                starts the epoch anew with a warning; default: as told at construction.

        Raises:
            DataStateError: it does not fit. The loader is as it was.
        """
        self._cursor.load_state_dict(state, on_mismatch=on_mismatch)


class _Iterator:
    """Hands out batches and counts them in that moment."""

    def __init__(
        self,
        cursor: Cursor,
        generation: int,
        batches: Iterator[Any],
        on_failure: Callable[[], None],
    ) -> None:
        self._cursor = cursor
        self._generation = generation
        self._batches: Iterator[Any] | None = batches
        self._plan = cursor.plan()
        self._epoch = cursor.position.epoch
        self._on_failure = on_failure

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        self._cursor.check(self._generation)
        planned = next(self._plan, None)
        if planned is None:
            self._batches = None
            self._cursor.end_epoch(self._epoch)
            raise StopIteration
        try:
            batch = next(self._batches)
        except BaseException as error:
            # The batches that follow would no longer be those that are counted.
            self._cursor.begin()
            self._on_failure()
            if isinstance(error, StopIteration):  # would end the epoch without a word
                raise RuntimeError("the data set raised StopIteration") from error
            raise
        self._cursor.handed_out(*planned)
        return batch


class _AheadOfTraining:
    """The sampler of `DataLoader`: asked for batches before the training gets them."""

    def __init__(self, cursor: Cursor, indices: Indices) -> None:
        self._cursor = cursor
        self._indices = indices

    def __len__(self) -> int:
        return self._cursor.steps_left()

    def __iter__(self) -> Iterator[_Keys]:
        return (self._indices.of(share) for _, share in self._cursor.plan())


class BatchesOf(Dataset[Any]):
    """A data set of batches: makes the samples of one batch and collates them. In the workers.

    Attributes:
        dataset: of samples. In a ``worker_init_fn`` it is ``get_worker_info().dataset.dataset``.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], seeds: SampleSeeds
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._seeds = seeds

    def __getitem__(self, keys: _Keys) -> Any:
        with self._seeds.batch():
            samples = list(self._samples(keys))
            epoch, indices = keys[0]
            self._seeds.collate(epoch, indices[0])
            return self._collate(samples)

    def _samples(self, keys: _Keys) -> Iterator[Any]:
        # What fetches several at once (Hugging Face data sets do) cannot be seeded in between.
        at_once = getattr(self.dataset, "__getitems__", None) if self._seeds.is_off else None
        for epoch, indices in keys:
            if at_once is not None:
                yield from at_once(indices)
                continue
            for index in indices:
                self._seeds.sample(epoch, index)
                yield self.dataset[index]


def _as_it_is(batch: Any) -> Any:
    return batch


def _id_of(dataset: Any) -> str:
    own = getattr(dataset, "dataset_id", None)
    return own if isinstance(own, str) else ""


def _check_dataset(dataset: Any) -> None:
    # Some IterableDatasets have a length, which says nothing about where they can begin.
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{type(dataset).__name__} is an IterableDataset: its items have no index. Use "
            "DataLoader inside of ResumableIterator"
        )
    for name in ("__getitem__", "__len__"):
        if not hasattr(dataset, name):
            raise TypeError(f"{type(dataset).__name__} has no {name}: it is not map-style")


def _checked_options(options: dict[str, Any], num_workers: int) -> dict[str, Any]:
    for name, instead in _NOT_OURS.items():
        if options.get(name):
            raise TypeError(f"ResumableLoader takes no {name}: {instead}")
    if not options.get("in_order", True):
        raise ValueError(
            "in_order=False hands batches out in any order: what was trained would not be a "
            "position"
        )
    kept = {name: value for name, value in options.items() if name not in _NOT_OURS}
    # Workers that end with each epoch would lose what they have fetched ahead, and start slowly.
    return {**kept, "persistent_workers": num_workers > 0}
