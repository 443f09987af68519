"""`ResumableDALIReader`: DALI's native readers, continued at equal topology."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dcp_checkfreq.data.dali.checkpoint import DALIState, add_dali, dali_of
from dcp_checkfreq.data.dali.graph import check_readers
from dcp_checkfreq.data.dali.plugin import import_plugin
from dcp_checkfreq.data.order.ranks import resolve
from dcp_checkfreq.data.order.saved_position import (
    FORMAT,
    changed,
    parse,
    read_number,
    read_text,
    short_id,
)
from dcp_checkfreq.data.order.turns import Turns
from dcp_checkfreq.errors import DataStateError

_WHAT = "ResumableDALIReader"


def check_native_reader(
    pipeline: Any,
    reader_name: str,
    *,
    rank: int,
    world_size: int,
    independent: Sequence[str] = (),
) -> None:
    """Raise ValueError if a pipeline would lose or repeat items even without any failure.

    Without padding, what a batch takes beyond the end of its shard is missing in the next epoch:
    measured with DALI 2.4, 200 files and batches of 16, 8 to 42 items are lost and as many repeated
    from the second epoch on. With ``pad_last_batch=True`` and ``LastBatchPolicy.PARTIAL`` none is.
    All readers must be padded, of one shard and length and in one order, and there must be no
    external source: else what they give drifts apart.

    Args:
        pipeline: built.
        reader_name: ``name=`` of the reader in the pipeline that says how long an epoch is.
        rank: which shard the readers should read first.
        world_size: into how many shards they should cut the data.
        independent: names of readers of other data, whose length and order may differ, and of
            external sources that are functions of the number that DALI gives them.
    """
    check_readers(
        pipeline,
        reader_name,
        rank=rank,
        world_size=world_size,
        independent=independent,
        what=_WHAT,
    )


class ResumableDALIReader:
    """Resumes a pipeline that reads by itself (``fn.readers``), if nothing has changed.

    For pipelines that are there already. Each item comes once per epoch, and the batches after a
    resume are those that would have come, if nothing was changed: number of ranks, batch size,
    graph and its arguments, number of files, version of DALI. Anything else is refused, because
    DALI would lose and repeat items and not say so. `ResumableDALILoader` has no such
    limits.

    The state belongs to a rank: register ``PerRank(reader)``.

    Args:
        build: ``build(**options)`` returns a new `Pipeline` that gets ``options``. Its reader has
            ``pad_last_batch=True``, ``num_shards`` and ``shard_id``.
        output_map: a name for each output of the pipeline.
        reader_name: ``name=`` of the reader in the pipeline.
        rank: data-parallel rank; default: of the default process group.
        world_size: data-parallel ranks; pass both or neither.
        dataset_id: what the data is, in your words; a state is not loaded into other data.
        independent: names of readers of other data (not labelled, say), whose length and order may
            differ, and of external sources that are functions of the number that DALI gives them.
            Only the items of ``reader_name`` come once per epoch; the others continue exactly.

    Raises:
        ImportError: DALI is not installed.
        ValueError: a reader is not padded, reads another shard or another order, or there is an
            external source; see `check_native_reader`.
    """

    def __init__(
        self,
        build: Callable[..., Any],
        output_map: Sequence[str],
        reader_name: str,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        dataset_id: str = "",
        independent: Sequence[str] = (),
    ) -> None:
        self.epoch = 0
        self.batches = 0  # of this epoch, handed out to this rank
        self._build = build
        self._output_map = list(output_map)
        self._reader_name = reader_name
        self._independent = tuple(independent)
        self._place = resolve(rank, world_size)
        self._dataset = short_id(dataset_id)
        self._turns = Turns(_WHAT)
        self._use(self._new(None))

    def _new(self, checkpoint: bytes | None) -> tuple[Any, Any]:
        """Return a checked pipeline and its iterator."""
        plugin = import_plugin(_WHAT)
        pipeline = self._build(enable_checkpointing=True, checkpoint=checkpoint)
        pipeline.build()
        place = self._place
        check_native_reader(
            pipeline,
            self._reader_name,
            rank=place.rank,
            world_size=place.world_size,
            independent=self._independent,
        )
        batches = plugin.DALIGenericIterator(
            [pipeline],
            self._output_map,
            reader_name=self._reader_name,
            last_batch_policy=plugin.LastBatchPolicy.PARTIAL,
            auto_reset=False,
            prepare_first_batch=False,
        )
        return pipeline, batches

    def _use(self, made: tuple[Any, Any]) -> None:
        pipeline, self._iterator = made
        self._is_broken = False
        self._items = pipeline.reader_meta(self._reader_name)["epoch_size"]
        self._batch_size = pipeline.max_batch_size
        # All arguments of all operators: DALI compares only which operators there are.
        self._graph = hashlib.sha256(pipeline.serialize()).hexdigest()[:32]
        self._checkpoint: bytes = self._iterator.checkpoints()[0]

    def __len__(self) -> int:
        """Return how many batches the whole epoch has, wherever in it the position is."""
        return len(self._iterator)

    @property
    def steps_left(self) -> int:
        """Batches that are left of this epoch: what the next iterator hands out."""
        return len(self._iterator) - self.batches

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Return an iterator over the rest of the epoch; those made before become stale."""
        self._place.check(_WHAT)
        if self._is_broken:
            self._use(self._new(self._checkpoint))
        return _Iterator(self._next, self._turns.begin(), self.steps_left)

    def _next(self, turn: int, *, is_last: bool) -> dict[str, Any]:
        self._turns.check(turn)
        try:
            batch: dict[str, Any] = next(self._iterator)[0]
            if is_last:
                self._iterator.reset()  # at once, so that the position is in the next epoch
            checkpoint = self._iterator.checkpoints()[0]
        except BaseException:
            # The batches that follow would no longer be those that are counted.
            self._is_broken = True
            self._turns.begin()
            raise
        self._checkpoint = checkpoint
        self.epoch, self.batches = (
            (self.epoch + 1, 0) if is_last else (self.epoch, self.batches + 1)
        )
        return batch

    def state_dict(self) -> dict[str, str]:
        """Return the position after the last batch handed out, and DALI's checkpoint, as JSON."""
        state = {
            "format": FORMAT,
            "epoch": self.epoch,
            "batches": self.batches,
            "length": self._items,
            "graph": self._graph,
            "dataset": self._dataset,
        }
        return add_dali({"state": json.dumps(state)}, self._dali_state(self._checkpoint))

    def _dali_state(self, checkpoint: bytes | None) -> DALIState:
        version = import_plugin(_WHAT).version
        place = self._place
        return DALIState(version, place.rank, place.world_size, self._batch_size, checkpoint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved position; iterators made before become stale.

        Raises:
            DataStateError: it is no state, or anything is not as it was. The reader is as it was.
        """
        checkpoint = dali_of(state, self._dali_state(None), _WHAT)
        saved = parse(state.get("state"), _WHAT)
        pairs = [
            ("number of items", read_number(saved, "length", _WHAT), self._items),
            ("dataset_id", read_text(saved, "dataset", _WHAT), self._dataset),
            ("graph, with all arguments,", read_text(saved, "graph", _WHAT), self._graph),
        ]
        if changes := changed(pairs):
            raise DataStateError(
                _WHAT,
                f"{'; '.join(changes)}. DALI's checkpoint fits nothing else: bring back what was",
            )
        epoch, batches = read_number(saved, "epoch", _WHAT), read_number(saved, "batches", _WHAT)
        try:
            made = self._new(checkpoint)
        except RuntimeError as error:
            raise DataStateError(_WHAT, f"DALI does not take its checkpoint: {error}") from error
        self._use(made)
        self.epoch, self.batches = epoch, batches
        self._turns.begin()


class _Iterator:
    """Hands out so many batches."""

    def __init__(self, take: Callable[..., dict[str, Any]], turn: int, left: int) -> None:
        self._take = take
        self._turn = turn
        self._left = left

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._left == 0:
            raise StopIteration
        batch = self._take(self._turn, is_last=self._left == 1)
        self._left -= 1
        return batch
