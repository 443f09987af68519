"""The record that rides in ``.metadata``: which files make the checkpoint, and what is in them.

Pure. It is an attribute ``dcp_checkfreq`` of DCP's `Metadata`, made of plain builtins only.
Item columns are packed little-endian and run parallel to the entries of ``Metadata.storage_data``,
so 10,000 items cost four short byte strings instead of 10,000 objects. Stock readers ignore it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_checkfreq.format.texts import clipped, is_text, shown

FORMAT_VERSION = 1
_LARGEST_COUNT = 1 << 127


class RecordError(ValueError):
    """The record is not one that this version can read; the text says why."""


class RecordTooNew(RecordError):
    """The record was written by a newer format version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where a checkpoint stands in the history of a job.

    ``abandons`` maps a run id to the first of its steps that this history left behind: a run that
    restored step 300 of run A holds ``{"A": 301}``, and A's step 5000 is an abandoned branch.
    ``abandons_folders`` does the same for checkpoints without a run id (stock DCP, a writer without
    a `Checkpointer`): folder name to the identity of the commit record that was left behind there.
    """

    run_id: str
    parent_step: int | None = None
    abandons: Mapping[str, int] = field(default_factory=dict)
    abandons_folders: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What is known of each item; all sequences have one entry per item, in storage order."""

    payload_offset: Sequence[int]  # bytes from the start of the file
    payload_bytes: Sequence[int]
    block_bytes: Sequence[int]
    digests: Sequence[int]  # all blocks of item 0, then of item 1, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The whole record."""

    attempt: str
    world_size: int
    files: Mapping[str, int]  # name: exact size in bytes
    columns: Columns
    step: int | None = None
    lineage: Lineage | None = None
    written_by: str = ""
    digest_algorithm: str = "xxh3_64"


def _pack(code: str, values: Sequence[int]) -> bytes:
    packed = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(code: str, data: object) -> array[int]:
    if not isinstance(data, bytes):
        raise RecordError(f"a column is {type(data).__name__}, not bytes")
    values: array[int] = array(code)
    if len(data) % values.itemsize:
        raise RecordError(f"a column has {len(data)} bytes, not a multiple of {values.itemsize}")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def encode(record: Record) -> dict[str, Any]:
    """Return the record as a dict of builtins. `decode` is its inverse."""
    columns, lineage = record.columns, record.lineage
    # Only where it says something, so that all other records are what they were before it.
    folders = dict(lineage.abandons_folders) if lineage else {}
    return ({"abandons_folders": folders} if folders else {}) | {
        "format": FORMAT_VERSION,
        "attempt": record.attempt,
        "world_size": record.world_size,
        "written_by": record.written_by,
        "step": record.step,
        "run_id": lineage.run_id if lineage else None,
        "parent_step": lineage.parent_step if lineage else None,
        "abandons": dict(lineage.abandons) if lineage else {},
        "files": dict(record.files),
        "digest": record.digest_algorithm,
        "payload_offset": _pack("Q", columns.payload_offset),
        "payload_bytes": _pack("Q", columns.payload_bytes),
        "block_bytes": _pack("I", columns.block_bytes),
        "digests": _pack("Q", columns.digests),
    }


def decode(data: object) -> Record:
    """Return the record of what `encode` made. Unknown extra keys are ignored.

    Raises:
        RecordTooNew: a newer format version.
        RecordError: not a record, or one that contradicts itself.
    """
    if not isinstance(data, dict):
        raise RecordError(f"the record is a {type(data).__name__}, not a dict")
    version = data.get("format")
    if type(version) is not int or version < 1:
        raise RecordError(f"the record has format version {shown(version)}")
    if version > FORMAT_VERSION:
        raise RecordTooNew(
            f"format version {shown(version)}, written by {_writer(data)}; "
            f"this version reads up to {FORMAT_VERSION}"
        )
    try:
        files = {_text(name): _count(size) for name, size in _dict(data["files"]).items()}
        run_id = data["run_id"]
        lineage = None
        if run_id is not None:
            parent = data["parent_step"]
            lineage = Lineage(
                run_id=_text(run_id),
                parent_step=None if parent is None else _count(parent),
                abandons={_text(k): _count(v) for k, v in _dict(data["abandons"]).items()},
                abandons_folders={
                    _text(k): _text(v) for k, v in _dict(data.get("abandons_folders", {})).items()
                },
            )
        step = data["step"]
        record = Record(
            attempt=_text(data["attempt"]),
            world_size=_count(data["world_size"]),
            written_by=_text(data["written_by"]),
            step=None if step is None else _count(step),
            lineage=lineage,
            files=files,
            digest_algorithm=_text(data["digest"]),
            columns=Columns(
                payload_offset=_unpack("Q", data["payload_offset"]),
                payload_bytes=_unpack("Q", data["payload_bytes"]),
                block_bytes=_unpack("I", data["block_bytes"]),
                digests=_unpack("Q", data["digests"]),
            ),
        )
    except KeyError as error:
        raise RecordError(f"the record lacks {error}") from error
    _check(record.columns)
    return record


def _writer(data: Mapping[str, object]) -> str:
    writer = data.get("written_by", "?")
    return clipped(writer) if is_text(writer) else shown(writer)  # type: ignore[arg-type]


def _text(value: object) -> str:
    if not is_text(value):
        raise RecordError(f"expected a text, got {shown(value)}")
    return value  # type: ignore[return-value]


def _dict(value: object) -> dict[object, object]:
    if not isinstance(value, dict):
        raise RecordError(f"expected a dict, got {shown(value)}")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST_COUNT:
        raise RecordError(f"expected a count, got {shown(value)}")
    return value


def _check(columns: Columns) -> None:
    sizes = {len(columns.payload_offset), len(columns.payload_bytes), len(columns.block_bytes)}
    if len(sizes) != 1:
        raise RecordError(f"the columns have different lengths: {sorted(sizes)}")
    if min(columns.block_bytes, default=1) <= 0:
        raise RecordError("a digest block of no bytes")
    blocks = digest_starts(columns)[-1]
    if blocks != len(columns.digests):
        raise RecordError(f"{len(columns.digests)} digests for {blocks} blocks")


def digest_starts(columns: Columns) -> list[int]:
    """Return where each item's digests start in ``columns.digests``, and the total at the end."""
    starts = [0]
    total = 0
    for size, block in zip(columns.payload_bytes, columns.block_bytes, strict=True):
        total += -(-size // block)
        starts.append(total)
    return starts
