"""`ResumableBatchSampler`: the order and the position, for a loader of your own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dcp_checkfreq.data.order.cursor import Cursor, HasPosition
from dcp_checkfreq.data.order.epoch_orders import Indices
from dcp_checkfreq.data.order.options import LoaderOptions
from dcp_checkfreq.data.order.permutation import order_name
from dcp_checkfreq.data.order.position import Last, Position
from dcp_checkfreq.data.order.saved_position import OnMismatch


class ResumableBatchSampler(HasPosition):
    """Yields this rank's batches of indices, from the position to the end of the epoch.

    ::

        sampler = ResumableBatchSampler(len(dataset), 32, seed=1)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        for batch in loader:
            ...
            sampler.advance()  # after the step; before a checkpoint is saved

    A sampler cannot know what the training has got: loaders ask for batches ahead. So the position
    moves only by `advance`. `ResumableLoader` does that by itself, and seeds each sample.

    Args:
        length: items of the data set.
        batch_size: samples per rank and step.
        global_batch: samples of all ranks in a step, instead: the same on any number of ranks that
            divides it.
        seed: of the order.
        shuffle: False keeps the order of the data set.
        rank: data-parallel rank; default: of the default process group.
        world_size: data-parallel ranks; pass both or neither.
        last: what becomes of the last samples of an epoch; see `Deal`.
        dataset_id: what the data is, in your words; a state is not loaded into other data.
        on_mismatch: what `load_state_dict` does by default if the data is another.
    """

    def __init__(
        self,
        length: int,
        batch_size: int | None = None,
        *,
        global_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        last: Last = "partial",
        dataset_id: str = "",
        on_mismatch: OnMismatch = "error",
    ) -> None:
        options = LoaderOptions(
            batch_size=batch_size, global_batch=global_batch, seed=seed, shuffle=shuffle, last=last,
            rank=rank, world_size=world_size, dataset_id=dataset_id, on_mismatch=on_mismatch,
        )  # fmt: skip
        self._cursor = Cursor(options, length, order_name(shuffle=shuffle), type(self).__name__)
        self._indices = Indices(seed, length, shuffle=shuffle)
        self._ran_through_at: Position | None = None

    def __iter__(self) -> Iterator[list[int]]:
        """Return an iterator over the rest of the epoch; those made before become stale.

        Raises:
            RuntimeError: the iterator before ran to its end, and `advance` was never called.
        """
        self._cursor.check_place()
        if self._ran_through_at == self._cursor.position:
            raise RuntimeError(
                "all batches of the epoch were taken from this sampler, and none was reported: "
                "call advance() after every step, or a checkpoint would start the epoch anew"
            )
        return self._batches(self._cursor.turns.begin(), self._cursor.position)

    def _batches(self, turn: int, start: Position) -> Iterator[list[int]]:
        is_empty = True
        for _, share in self._cursor.plan(start):
            self._cursor.turns.check(turn)
            is_empty = False
            yield [index for _, indices in self._indices.of(share) for index in indices]
        self._cursor.turns.check(turn)
        if is_empty:  # what is left of the epoch is dropped
            self._cursor.end_epoch(start.epoch)
        else:
            self._ran_through_at = start

    def advance(self) -> None:
        """Say that the next batch is trained, on all ranks."""
        for step, share in self._cursor.plan():
            self._cursor.count(step, share)
            return
        raise RuntimeError(f"there is no batch left in epoch {self.epoch}")

    def load_state_dict(
        self, state: Mapping[str, Any], *, on_mismatch: OnMismatch | None = None
    ) -> None:
        """Resume from a saved position; see `HasPosition.load_state_dict`."""
        super().load_state_dict(state, on_mismatch=on_mismatch)
        self._ran_through_at = None
