"""`ResumableParquetLoader`: rows of Parquet files, exactly once, from any point of an epoch."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import torch
from numpy.typing import NDArray
from pyarrow.fs import FSSpecHandler, PyFileSystem
from torch.utils.data import default_collate

from dcp_checkfreq.data.loaders.read_ahead import (
    Counts,
    Maker,
    Raw,
    ReadingLoader,
)
from dcp_checkfreq.data.order.interleave import (
    DEFAULT_LANES,
    LANES_VERSION,
    LaneOrder,
    Run,
)
from dcp_checkfreq.data.order.permutation import SEQUENTIAL
from dcp_checkfreq.data.order.position import Last, OnMismatch, Share
from dcp_checkfreq.data.random.per_sample import AugmentRng, SampleSeeds
from dcp_checkfreq.data.sources.parquet_schema import check_schemas
from dcp_checkfreq.data.sources.paths import is_local, located, relative_names
from dcp_checkfreq.errors import DataStateError

_log = logging.getLogger(__name__)

_MAX_TOLD = 5
_READ_THREADS = 8  # footers, and row groups that are needed at once: mostly waiting for storage


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One row group of one file; ``number`` counts within the file."""

    path: str
    number: int
    rows: int


class ParquetSource:
    """Parquet files as one data set. Making it reads the footers only.

    Args:
        paths: a file or a folder (files sorted by path, ``key=value`` folders become columns), or
            several files, which keep their order. Local paths or fsspec URLs.
        filesystem: pyarrow's or fsspec's, which knows the paths as they are; default: the local
            one, or that of the URLs.
        storage_options: for the file system of the URLs (keys, endpoint), as fsspec takes them.
        columns: to be read; default: all.
        lanes: row groups that are open at a time, over all ranks. The same for the life of a job,
            and best a multiple of all numbers of ranks it may have. More lanes mix the rows of
            more row groups, and take more memory.

    Raises:
        ValueError: there are no rows, a file is named twice, cut short or no Parquet, has other
            columns than the first one, or URLs of several file systems are given.
        FileNotFoundError: a path is not there.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        filesystem: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        columns: Sequence[str] | None = None,
        lanes: int = DEFAULT_LANES,
    ) -> None:
        if lanes < 1:
            raise ValueError(f"lanes must be at least 1, got {lanes}")
        self.lanes = lanes
        self.columns = None if columns is None else list(columns)
        found, filesystem = located(paths, filesystem, storage_options)
        if isinstance(filesystem, fsspec.AbstractFileSystem) and not is_local(filesystem):
            filesystem = PyFileSystem(_NoReadAhead(filesystem))
        self._dataset = ds.dataset(
            found, filesystem=filesystem, format="parquet", partitioning="hive"
        )
        self._fragments = list(self._dataset.get_fragments())
        if isinstance(found, str):
            self._fragments.sort(key=lambda fragment: fragment.path)
        with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="checkfreq-footers") as pool:
            footers = list(pool.map(_footer, self._fragments))
        paths_found = [fragment.path for fragment in self._fragments]
        numbers = [rows for rows, _ in footers]
        self._places = [(fragment, group) for fragment, groups in enumerate(numbers)
                        for group, rows in enumerate(groups) if rows]  # fmt: skip
        self.row_groups = tuple(
            RowGroup(self._fragments[fragment].path, group, numbers[fragment][group])
            for fragment, group in self._places
        )
        if not self.row_groups:
            raise ValueError(f"there are no rows in {paths!r:.200}")
        filled = [n for n, rows in enumerate(numbers) if any(rows)]
        if len(filled) < len(numbers):
            empty = [path for n, path in enumerate(paths_found) if not any(numbers[n])]
            _log.warning(
                "%d of %d files have no rows: %s%s",
                *(len(empty), len(numbers), ", ".join(empty[:_MAX_TOLD])),
                " ..." if len(empty) > _MAX_TOLD else "",
            )
        check_schemas(((paths_found[n], footers[n][1]) for n in filled), self.columns)
        # Of the first file with rows: one without often has no types either. And those of folders.
        of_files = {name for _, schema in footers for name in schema.names}
        of_folders = [field for field in self._dataset.schema if field.name not in of_files]
        self._schema = pa.schema([*footers[filled[0]][1], *of_folders])
        missing = set(self.columns or ()) - set(self._schema.names)
        if missing:
            raise ValueError(f"there are no columns {sorted(missing)}, only {self._schema.names}")

    def __len__(self) -> int:
        """Return the number of rows."""
        return sum(self.sizes)

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each row group."""
        return [group.rows for group in self.row_groups]

    @cached_property
    def fingerprint(self) -> str:
        """Names the data: the names of the files in their folder, and the rows of each row group.

        The same for a copy elsewhere. What is in the rows is not part of it.
        """
        names = relative_names([group.path for group in self.row_groups])
        digest = hashlib.sha256()
        for name, group in zip(names, self.row_groups, strict=True):
            digest.update(f"{name}\0{group.number}\0{group.rows}\n".encode())
        return digest.hexdigest()

    def read(self, index: int) -> pa.Table:
        """Read row group ``index`` of `row_groups`.

        Raises:
            DataStateError: it has not as many rows as it had.
        """
        fragment, number = self._places[index]
        table = (
            self._fragments[fragment]
            .subset(row_group_ids=[number])
            .to_table(schema=self._schema, columns=self.columns)
        )
        group = self.row_groups[index]
        if table.num_rows != group.rows:
            raise DataStateError(
                "ParquetSource",
                f"row group {number} of {group.path} had {group.rows} rows, now it has "
                f"{table.num_rows}",
            )
        return table


class _NoReadAhead(FSSpecHandler):  # type: ignore[misc]
    """Reads what pyarrow asks for: it knows where the columns of a row group lie.

    As fsspec opens a file on S3, each read would bring up to 50 MiB of what lies behind.
    """

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(self.fs.open(path, mode="rb", cache_type="none"), mode="r")


def _footer(fragment: Any) -> tuple[list[int], pa.Schema]:
    """Return the rows of each row group, and the columns.

    Raises:
        ValueError: it is no Parquet file, or is cut short.
    """
    try:
        return [group.num_rows for group in fragment.row_groups], fragment.physical_schema
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"{fragment.path} cannot be read as Parquet: {error}") from error


class ResumableParquetLoader(ReadingLoader):
    """Batches of rows; knows exactly which were trained.

    Every row comes exactly once per epoch, also if the job is cut at any batch and goes on with
    another number of ranks or workers or another batch size. To go on, a rank reads the row groups
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
        world_size: data-parallel ranks; tell both or neither.
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
        self._lanes = partial(_lanes_of, source, seed, shuffle)
        lanes = source.lanes if shuffle else 1
        is_ours = transform is None and collate_fn is None  # nothing that could draw numbers
        maker = Maker(
            None if transform is None else _rows_of,
            transform,
            collate_fn or (as_tensors if transform is None else default_collate),
            SampleSeeds(seed, "none" if is_ours else augment_rng),
        )
        super().__init__(
            len(source),
            batch_size,
            global_batch,
            maker,
            partial(_RowGroups, source, self._lanes, shuffle),
            lanes=lanes,
            order=f"lanes{lanes}-{LANES_VERSION}" if shuffle else SEQUENTIAL,
            seed=seed,
            last=last,
            rank=rank,
            world_size=world_size,
            num_workers=num_workers,
            batches_ahead=batches_ahead,
            dataset_id=f"{source.fingerprint}/{dataset_id}",
            on_mismatch=on_mismatch,
            options=dataloader_kwargs,
        )

    def completed_row_groups(self) -> list[RowGroup]:
        """Return the row groups whose rows were all handed out in this epoch, over all ranks."""
        consumed = self._lanes(self.epoch).consumed(self.samples)
        groups = zip(self.source.row_groups, consumed, strict=True)
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


def _lanes_of(source: ParquetSource, seed: int, shuffle: bool, epoch: int) -> LaneOrder:
    return LaneOrder(source.sizes, source.lanes, seed=seed, epoch=epoch, shuffle=shuffle)


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


class _RowGroups:
    """Reads batches. Holds, for each lane that this rank meets, the row group that it is in."""

    def __init__(
        self,
        source: ParquetSource,
        lanes_of: Callable[[int], LaneOrder],
        shuffle: bool,
        counts: Counts,
    ) -> None:
        self._source = source
        self._lanes_of = lanes_of
        self._shuffle = shuffle
        self._counts = counts
        self._first_rows = list(accumulate(source.sizes, initial=0))
        self._epochs: dict[int, LaneOrder] = {}
        self._held: dict[tuple[int, int], _Held] = {}  # by (epoch, row group)
        self._lanes: dict[int, tuple[int, int]] = {}  # the key that each lane is at
        self._pool = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="checkfreq-parquet")

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, share: Share) -> Raw:
        tables: list[pa.Table] = []
        slots: list[int] = []
        keys = []
        for epoch, positions in share.runs:
            before = len(slots)
            numbers = [0] * len(positions)
            runs = list(self._order(epoch).runs(positions))
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

    def _order(self, epoch: int) -> LaneOrder:
        if epoch not in self._epochs:
            # A batch may straddle epochs, and end with rows of the first one.
            for old in [e for e in self._epochs if e < epoch - 1]:
                del self._epochs[old]
            self._epochs[epoch] = self._lanes_of(epoch)
        return self._epochs[epoch]

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
        order = self._epochs[epoch].within(piece, range(table.num_rows))
        rows = order.array(np.arange(table.num_rows))
        if self._shuffle:
            table = table.take(pa.array(rows))
        return _Held(table.combine_chunks(), rows + self._first_rows[piece])

    def _forget(self) -> None:
        """Let go of row groups that no lane is in any more."""
        in_use = set(self._lanes.values())
        self._held = {key: held for key, held in self._held.items() if key in in_use}
