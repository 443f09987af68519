"""What a checkpoint holds, by its ``.metadata`` alone: read without torch."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from dcp_checkfreq.errors import BadLocation, BrokenMetadata
from dcp_checkfreq.format import sealed
from dcp_checkfreq.format.forms import PLAIN, PlainMetadata
from dcp_checkfreq.format.index import Record
from dcp_checkfreq.format.names import METADATA, parse_step
from dcp_checkfreq.recovery.files import content_of
from dcp_checkfreq.storage.tier import Tier


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor or value.

    Attributes:
        key: flat, as DCP has it.
        shape: of the tensor; None: a value.
        dtype: of the tensor; empty: a value.
        size_bytes: of its elements, or of the value as it was written.
        chunks: pieces in which it was saved.
    """

    key: str
    shape: tuple[int, ...] | None
    dtype: str
    size_bytes: int
    chunks: int


@dataclass(frozen=True, slots=True)
class Summary:
    """One checkpoint.

    Attributes:
        step, run_id, written_by: None or empty where the writer has not told.
        ranks: that wrote it; None: stock DCP did.
        files: sizes in bytes, by name; of stock checkpoints as far as items reach.
        items: in the order of the metadata.
    """

    path: str
    step: int | None
    run_id: str
    ranks: int | None
    written_by: str
    files: dict[str, int]
    items: tuple[Item, ...]

    @property
    def size_bytes(self) -> int:
        """Of all items."""
        return sum(item.size_bytes for item in self.items)

    @property
    def bytes_by_rank(self) -> dict[int, int]:
        """What each rank wrote, by the names of the files."""
        sizes: Counter[int] = Counter()
        for name, size in self.files.items():
            rank = name.removeprefix("__").partition("_")[0]
            if rank.isdecimal():
                sizes[int(rank)] += size
        return dict(sorted(sizes.items()))


def summary_of(folder: Tier) -> Summary:
    """Return what a checkpoint holds.

    Raises:
        BadLocation: there is none, but something else.
        BrokenMetadata: ``.metadata`` is cut short, damaged, or not a checkpoint's.
        NewerFormat: written by a newer version of this package.
        OSError: of the storage.
    """
    try:
        content = content_of(folder)
    except FileNotFoundError as error:
        entries = folder.list()
        steps = [entry.name for entry in entries if parse_step(entry.name) is not None]
        if steps:
            why = f"this is a root, not a checkpoint: try {steps[0]!r} in it, or `list`"
            raise BadLocation(folder.location, why) from error
        if not entries:
            raise BadLocation(folder.location, "nothing is there") from error
        raise BrokenMetadata(folder.location, f"there is no {METADATA}") from error
    metadata, record = sealed.load(content, folder.location, PLAIN)
    return Summary(
        folder.location,
        record.step if record else None,
        record.lineage.run_id if record and record.lineage else "",
        record.world_size if record else None,
        record.written_by if record else "",
        _files(metadata, record),
        _items(metadata, record),
    )


def _files(metadata: PlainMetadata, record: Record | None) -> dict[str, int]:
    if record is not None:
        return dict(record.files)
    ends: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        end = info.offset + info.length
        ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
    return ends


def _items(metadata: PlainMetadata, record: Record | None) -> tuple[Item, ...]:
    entries = metadata.storage_data or {}
    sizes = [info.length for info in entries.values()]
    if record is not None:
        sizes = list(record.columns.payload_bytes)
    by_key = Counter[str]()
    for place, size in zip(entries, sizes, strict=True):
        by_key[place.fqn] += size
    items = []
    for key, kept in metadata.state_dict_metadata.items():
        chunks = getattr(kept, "chunks", None)
        if chunks is None:
            items.append(Item(key, None, "", by_key[key], 1))
            continue
        dtype = kept.properties.dtype  # type: ignore[union-attr]
        shape = kept.size  # type: ignore[union-attr]
        items.append(Item(key, shape, str(dtype), math.prod(shape) * dtype.itemsize, len(chunks)))
    return tuple(items)
