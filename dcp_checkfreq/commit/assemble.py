"""On the coordinator: from every rank's report to the content of ``.metadata``."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import compress
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_checkfreq.errors import ItemsMissing
from dcp_checkfreq.format.index import Columns
from dcp_checkfreq.format.torch_private import StorageInfo
from dcp_checkfreq.shards.layout import RankReport


def assemble(metadata: Metadata, reports: Sequence[RankReport], where: str) -> Columns:
    """Fill in ``metadata.storage_data`` and return the columns that run parallel to it.

    Raises:
        ItemsMissing: an item of the global plan is in no report. ``where`` is named in it.
    """
    entries: dict[MetadataIndex, StorageInfo] = {}
    for report in reports:
        entries.update(
            zip(
                report.indices,
                map(StorageInfo, report.file_name, report.start, report.item_bytes),
                strict=True,
            )
        )
    if len(entries) != sum(len(report.indices) for report in reports):
        # A planner let several ranks write the same item: the first of them counts.
        return assemble(metadata, _each_once(reports), where)
    written = {(index.fqn, index.offset) for index in entries}
    missing = [item for item in _planned(metadata) if item not in written]
    if missing:
        raise ItemsMissing(where, [_describe(*item) for item in missing])
    _share_equal_parts(metadata)
    metadata.storage_data = entries
    return Columns(
        payload_offset=[value for report in reports for value in report.payload_offset],
        payload_bytes=[value for report in reports for value in report.payload_bytes],
        block_bytes=[value for report in reports for value in report.block_bytes],
        digests=[value for report in reports for digests in report.digests for value in digests],
    )


def _planned(metadata: Metadata) -> Iterator[tuple[str, torch.Size | None]]:
    """Yield key and offset of every item that the global plan says must be there."""
    for key, kept in metadata.state_dict_metadata.items():
        if isinstance(kept, TensorStorageMetadata):
            for chunk in kept.chunks:
                yield key, chunk.offsets
        else:
            yield key, None


def _each_once(reports: Sequence[RankReport]) -> list[RankReport]:
    seen: set[MetadataIndex] = set()
    made = []
    for report in reports:
        first = []
        for index in report.indices:
            first.append(index not in seen)
            seen.add(index)
        columns: dict[str, Any] = {
            field.name: list(compress(getattr(report, field.name), first))
            for field in fields(report)
            if field.name != "files"
        }
        made.append(replace(report, **columns))
    return made


def _share_equal_parts(metadata: Metadata) -> None:
    """Let equal properties and chunks be one object, which pickle then writes once.

    With 10,000 tensors this halves the time to write and to read ``.metadata``.
    """
    properties: dict[tuple[object, ...], TensorProperties] = {}
    chunks: dict[tuple[object, ...], ChunkStorageMetadata] = {}
    for kept in metadata.state_dict_metadata.values():
        if isinstance(kept, TensorStorageMetadata):
            own = kept.properties
            kind: Any = type(own)
            kept.properties = properties.setdefault(_values_of(kind)(own), own)
            kept.chunks = [
                chunks.setdefault((chunk.offsets, chunk.sizes), chunk) for chunk in kept.chunks
            ]


@functools.cache
def _values_of(kind: type[Any]) -> Callable[[TensorProperties], tuple[object, ...]]:
    """Return what gets all fields of it: since torch 2.15 the strides are one, too."""
    return operator.attrgetter(*(field.name for field in fields(kind)))


def _describe(key: str, offset: torch.Size | None) -> str:
    return key if offset is None else f"{key} at {list(offset)}"
