"""`ParquetSource`: Parquet files as one data set of row groups."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.fs import FSSpecHandler, PyFileSystem

from dcp_checkfreq.data.order.interleave import DEFAULT_LANES
from dcp_checkfreq.data.sources.parquet_schema import check_schemas
from dcp_checkfreq.data.sources.paths import digest, is_local, listed, located, relative_names
from dcp_checkfreq.errors import DataStateError

_log = logging.getLogger(__name__)

_READ_THREADS = 8  # footers: mostly waiting for storage


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
            counts = len(empty), len(numbers)
            _log.warning("%d of %d files have no rows: %s", *counts, listed(empty))
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
        pairs = zip(names, self.row_groups, strict=True)
        return digest(f"{name}\0{group.number}\0{group.rows}" for name, group in pairs)

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
