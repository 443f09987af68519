"""`ResumableLoader`: a `DataLoader` over a map-style data set that resumes where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from dcp_checkfreq.data.loaders.base import BatchMaker, Keys, Plan, TorchLoader
from dcp_checkfreq.data.order.cursor import Cursor
from dcp_checkfreq.data.order.epoch_orders import Indices
from dcp_checkfreq.data.order.options import LoaderOptions
from dcp_checkfreq.data.order.permutation import order_name
from dcp_checkfreq.data.order.position import Last
from dcp_checkfreq.data.order.saved_position import OnMismatch
from dcp_checkfreq.data.random.per_sample import AugmentRng, SampleSeeds

# Options of DataLoader that would take the order out of our hands, and what to use instead.
_NOT_OURS = {
    "sampler": "the order comes from seed= and shuffle=",
    "batch_sampler": "use DataLoader with ResumableBatchSampler",
    "drop_last": "use last='drop'",
    "generator": "use seed=",
}


class ResumableLoader(TorchLoader):
    """Loads batches like `DataLoader`, and knows exactly which samples were trained.

    Every item comes exactly once per epoch, also if the job is cut at any batch and resumes with
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
        global_batch: samples of all ranks in a step, instead: the same on any number of ranks that
            divides it.
        seed: of the order and of the samples' random numbers, in ``[0, 2**64)``.
        shuffle: False keeps the order of the data set.
        last: what becomes of the last samples of an epoch; see `Deal`. The last batch may have
            ``batch_size + 1`` samples with the default "partial".
        rank: data-parallel rank; default: of the default process group.
        world_size: data-parallel ranks; pass both or neither.
        num_workers: processes; they stay alive between epochs.
        augment_rng: what is seeded before each sample (and before collate), without touching the
            training's own random state: "global" `random`, NumPy's and torch's global generators,
            and `sample_rng`; "explicit" only the latter, which costs less; "none" nothing. With
            "none" a batch is fetched at once by ``__getitems__``, where the data set has it.
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
        batch_size: int | None = None,
        *,
        global_batch: int | None = None,
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
        of_torch = _checked_options(dataloader_kwargs)
        self.dataset = dataset
        options = LoaderOptions(
            batch_size=batch_size, global_batch=global_batch, seed=seed, shuffle=shuffle, last=last,
            rank=rank, world_size=world_size, num_workers=num_workers, augment_rng=augment_rng,
            dataset_id=_id_of(dataset) if dataset_id is None else dataset_id,
            on_mismatch=on_mismatch,
        )  # fmt: skip
        length = len(dataset)
        super().__init__(
            options,
            Cursor(options, length, order_name(shuffle=shuffle), type(self).__name__),
            BatchesOf(dataset, collate, SampleSeeds(seed, augment_rng)),
            partial(_keys_of, Indices(seed, length, shuffle=shuffle)),
            of_torch,
        )


def _keys_of(indices: Indices, plan: Plan) -> Iterator[Keys]:
    return (indices.of(share) for _, share in plan)


class BatchesOf(BatchMaker):
    """A data set of batches: makes the samples of one batch and collates them. In the workers.

    Attributes:
        dataset: of samples. In a ``worker_init_fn`` it is ``get_worker_info().dataset.dataset``.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any], seeds: SampleSeeds
    ) -> None:
        super().__init__(collate, seeds)
        self.dataset = dataset

    def __getitem__(self, keys: Keys) -> Any:
        return self._made(keys, lambda: list(self._samples(keys)))

    def _samples(self, keys: Keys) -> Iterator[Any]:
        # `DataLoader` prefers it, and some data sets have nothing else.
        several = getattr(self.dataset, "__getitems__", None)
        for epoch, indices in keys:
            if several is not None and self._seeds.is_off:
                yield from several(indices)
                continue
            for index in indices:  # one by one, to be seeded in between
                self._seeds.sample(epoch, index)
                if several is None:
                    yield self.dataset[index]
                else:
                    (sample,) = several([index])
                    yield sample


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


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    for name, instead in _NOT_OURS.items():
        if options.get(name):
            raise TypeError(f"ResumableLoader takes no {name}: {instead}")
    if not options.get("in_order", True):
        raise ValueError(
            "in_order=False hands batches out in any order: what was trained would not be a "
            "position"
        )
    return {name: value for name, value in options.items() if name not in _NOT_OURS}
