"""`ResumableParquetLoader`: rows of Parquet files, exactly once, from any point of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from dcp_checkfreq.data.loaders.base import Keys
from dcp_checkfreq.data.loaders.read_ahead import Counts, Maker, PieceReader, Raw, ReadingLoader
from dcp_checkfreq.data.order.interleave import LaneRule, Run
from dcp_checkfreq.data.order.options import LoaderOptions
from dcp_checkfreq.data.order.position import Last, Share
from dcp_checkfreq.data.order.saved_position import OnMismatch
from dcp_checkfreq.data.random.per_sample import AugmentRng, SampleSeeds
from dcp_checkfreq.data.sources.parquet_source import ParquetSource, RowGroup


class ResumableParquetLoader(ReadingLoader):
    """Batches of rows; knows exactly which were trained.

    Every row comes exactly once per epoch, also if the job is cut at any batch and resumes with
    another number of ranks or workers or another batch size. To resume, a rank reads the row groups
    that its lanes are in, and nothing before them. Register it with `Checkpointer`, or save
    `state_dict()` after the optimizer's step and before the next batch is taken.

    ::

        loader = ResumableParquetLoader(ParquetSource("s3://bucket/train"), 256, seed=1)
        for epoch in range(loader.epoch, epochs):
            for batch in loader:  # column to tensor or list, the rest of the epoch
                ...

    Args:
        source: what to read.
        batch_size: rows per rank and step.
        global_batch: rows of all ranks in a step, instead: the same on any number of ranks that
            divides it.
        seed: of the order and of the rows' random numbers, in ``[0, 2**64)``.
        shuffle: False keeps the order of the rows; then every rank reads all row groups.
        last: what becomes of the last rows of an epoch; see `Deal`.
        rank: data-parallel rank; default: of the default process group.
        world_size: data-parallel ranks; pass both or neither.
        transform: makes a sample of one row (dict of column to Python value). Its random numbers
            are a function of (seed, epoch, row).
        collate_fn: makes a batch of the samples; default: `default_collate`. Without
            ``transform`` it gets the rows as a `pyarrow.Table`; default: `as_tensors`.
        num_workers: processes for ``transform`` and ``collate_fn``. Files are read in the training
            process, once.
        batches_ahead: read before they are asked for, besides what workers hold.
        augment_rng: what is seeded before ``transform`` and ``collate_fn``; see `ResumableLoader`.
        dataset_id: what the data is, in your words, besides `ParquetSource.fingerprint`.
        on_mismatch: what `load_state_dict` does by default if the data is another.
        dataloader_kwargs: pin_memory, prefetch_factor, timeout, worker_init_fn,
            multiprocessing_context: go to `DataLoader`.

    Raises:
        TypeError: another option of `DataLoader`.
        ValueError: numbers that cannot be.
    """

    def __init__(
        self,
        source: ParquetSource,
        batch_size: int | None = None,
        *,
        global_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        last: Last = "partial",
        rank: int | None = None,
        world_size: int | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        batches_ahead: int = 4,
        augment_rng: AugmentRng = "global",
        dataset_id: str = "",
        on_mismatch: OnMismatch = "error",
        **dataloader_kwargs: Any,
    ) -> None:
        self.source = source
        options = LoaderOptions(
            batch_size=batch_size, global_batch=global_batch, seed=seed, shuffle=shuffle, last=last,
            rank=rank, world_size=world_size, num_workers=num_workers, batches_ahead=batches_ahead,
            augment_rng=augment_rng, dataset_id=f"{source.fingerprint}/{dataset_id}",
            on_mismatch=on_mismatch,
        )  # fmt: skip
        is_ours = transform is None and collate_fn is None  # nothing that could draw numbers
        maker = Maker(
            None if transform is None else _rows_of,
            transform,
            collate_fn or (as_tensors if transform is None else default_collate),
            SampleSeeds(seed, "none" if is_ours else augment_rng),
        )
        rule = LaneRule(source.sizes, source.lanes, None, seed, shuffle)
        super().__init__(options, rule, maker, partial(_RowGroups, source), dataloader_kwargs)

    def completed_row_groups(self) -> list[RowGroup]:
        """Return the row groups whose rows were all handed out in this epoch, over all ranks."""
        groups = zip(self.source.row_groups, self._handed_out(), strict=True)
        return [group for group, rows in groups if rows == group.rows]


def as_tensors(table: pa.Table) -> dict[str, Any]:
    """Return each column by name.

    Numbers and booleans are tensors [rows], lists of them of one fixed size [rows, size];
    everything else is a list of Python values.

    Raises:
        ValueError: a column of numbers has nulls.
    """
    return {
        name: _as_tensor(name, column.combine_chunks())
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def _as_tensor(name: str, column: Any) -> Any:
    if pa.types.is_fixed_size_list(column.type) and _is_number(column.type.value_type):
        inner = _as_tensor(name, column.flatten())
        # a null list has no values, so it shows in the count
        if len(inner) == len(column) * column.type.list_size:
            return inner.reshape(len(column), column.type.list_size)
        raise _has_nulls(name, column)
    if not _is_number(column.type):
        return column.to_pylist()
    if column.null_count:
        raise _has_nulls(name, column)
    values = column.to_numpy(zero_copy_only=False)
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _is_number(kind: pa.DataType) -> bool:
    is_kind = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    return any(check(kind) for check in is_kind)


def _has_nulls(name: str, column: Any) -> ValueError:
    return ValueError(
        f"column {name!r} has {column.null_count} nulls in this batch, which no tensor can hold: "
        "pass a collate_fn or a transform"
    )


def _rows_of(table: pa.Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


@dataclass(slots=True)
class _Held:
    """A row group in memory, its rows in the order of the epoch."""

    table: pa.Table
    items: NDArray[np.int64]  # number in the data set, of each row of the table

    def rows(self, places: range) -> pa.Table:
        if places.step == 1:
            return self.table.slice(places.start, len(places))
        return self.table.take(pa.array(places))

    def numbers(self, places: range) -> list[int]:
        numbers: list[int] = self.items[places.start : places.stop : places.step].tolist()
        return numbers


class _RowGroups(PieceReader):
    """Reads batches. Holds, for each lane that this rank meets, the row group that it is in."""

    def __init__(self, source: ParquetSource, rule: LaneRule, counts: Counts) -> None:
        super().__init__(rule, counts, "checkfreq-parquet")
        self._source = source
        self._shuffle = rule.shuffle
        self._held: dict[tuple[int, int], _Held] = {}  # by (epoch, row group)
        self._lanes: dict[int, tuple[int, int]] = {}  # the key that each lane is at

    def read(self, share: Share) -> Raw:
        tables: list[pa.Table] = []
        slots: list[int] = []
        keys: Keys = []
        for epoch, positions in share.runs:
            before = len(slots)
            numbers = [0] * len(positions)
            runs = list(self._orders.of(epoch).runs(positions))
            self._fetch(epoch, runs)
            for run in runs:
                held = self._held[epoch, run.piece]
                self._lanes[run.lane] = (epoch, run.piece)
                tables.append(held.rows(run.places))
                slots += [before + slot for slot in run.slots]
                numbers[run.slots.start : run.slots.stop : run.slots.step] = held.numbers(
                    run.places
                )
            keys.append((epoch, numbers))
        self._forget()
        self._counts.add(used=len(slots))
        table = pa.concat_tables(tables)
        at = [0] * len(slots)
        for row, slot in enumerate(slots):
            at[slot] = row
        # Also copies: what a batch keeps alive is its own rows, not whole row groups.
        return Raw(keys, table.take(pa.array(at)))

    def _fetch(self, epoch: int, runs: list[Run]) -> None:
        """Read the row groups that are not held, several at once: at a start there are many."""
        missing = {run.piece for run in runs if (epoch, run.piece) not in self._held}
        for piece, held in zip(
            missing, self._pool.map(lambda piece: self._read(epoch, piece), missing), strict=True
        ):
            self._held[epoch, piece] = held
            self._counts.add(pieces=1, items=held.table.num_rows)

    def _read(self, epoch: int, piece: int) -> _Held:
        table = self._source.read(piece)
        order = self._orders.of(epoch).within(piece, range(table.num_rows))
        rows = order.array(np.arange(table.num_rows))
        if self._shuffle:
            table = table.take(pa.array(rows))
        return _Held(table.combine_chunks(), rows + self._first_items[piece])

    def _forget(self) -> None:
        """Drop row groups that no lane is in any more."""
        in_use = set(self._lanes.values())
        self._held = {key: held for key, held in self._held.items() if key in in_use}
