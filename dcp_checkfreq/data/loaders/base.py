"""What loaders whose batches are made by a `DataLoader` share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from dcp_checkfreq.data.order.cursor import Cursor, HandOut, HasPosition
from dcp_checkfreq.data.order.permutation import WORKER_STREAM, derive
from dcp_checkfreq.data.order.position import OnMismatch
from dcp_checkfreq.data.order.ranks import DataRank


class TorchLoader(HasPosition):
    """A loader with a position. See its subclasses.

    Nothing that is passed in may refer back to the loader: left to the collector of cycles,
    workers would be joined in whatever thread it happens to run in, which may be one of theirs.

    Args:
        cursor: the position.
        place: this rank.
        batches: makes one batch of what ``plan`` yields for it. In the workers.
        plan: what to make batches of, from the position on. Asked ahead of the training.
        num_workers: processes; they stay alive between epochs.
        options: of `DataLoader`.
    """

    def __init__(
        self,
        cursor: Cursor,
        place: DataRank,
        batches: Dataset[Any],
        plan: Iterable[Any],
        num_workers: int,
        options: dict[str, Any],
    ) -> None:
        self.num_workers = num_workers
        self._cursor = cursor
        self._place = place
        self._batches = batches
        self._plan = plan
        # Workers that end with each epoch would lose what they fetched ahead, and start slowly.
        self._options = {**options, "persistent_workers": num_workers > 0}
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] | None = self._new_loader()

    def _new_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._batches,
            batch_size=None,  # an item of ours is a batch
            sampler=self._plan,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            # Without it DataLoader draws from the training's random state at each epoch.
            generator=self._generator,
            **self._options,
        )

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch; those made before become stale."""
        self._place.check(type(self).__name__)
        self._cursor.begin()  # workers that go on begin anew, even if something below fails
        at, rank = self._cursor.position, self._place.rank
        key = derive(WORKER_STREAM, self._cursor.seed, at.epoch, at.samples, rank)
        self._generator.manual_seed(key >> 1)
        if self._loader is None:
            self._loader = self._new_loader()
        try:
            batches = iter(self._loader)
        except BaseException:
            self._drop_loader()
            raise
        return HandOut(self._cursor, lambda share: next(batches), self._drop_loader)

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
                starts the epoch anew with a warning; default: as given at construction.

        Raises:
            DataStateError: it does not fit. The loader is as it was.
        """
        self._cursor.load_state_dict(state, on_mismatch=on_mismatch)


def _as_it_is(batch: Any) -> Any:
    return batch
