"""What the bytes of ``.metadata`` say: the seal is looked at, all is checked, and no code is run.

``.metadata`` is DCP's pickle, as stock readers expect, then 32 bytes that they never look at::

    magic (8) | length of the pickle (8, little-endian) | xxh3-128 of the pickle (16)

Reading it runs no code and believes nothing: see `format/opcodes`, `stand_ins` and `build`.
"""

from __future__ import annotations

import pickle
from typing import Any

import xxhash

from dcp_checkfreq.errors import BrokenMetadata, NewerFormat
from dcp_checkfreq.format.build import lost_chunk, metadata_of
from dcp_checkfreq.format.forms import Forms
from dcp_checkfreq.format.index import Record, RecordError, RecordTooNew, decode
from dcp_checkfreq.format.names import is_file_name
from dcp_checkfreq.format.opcodes import OddPickle
from dcp_checkfreq.format.texts import shown
from dcp_checkfreq.runtime.gc_paused import collector_held

MAGIC = b"\x89dcpcf\r\n"
TRAILER_BYTES = len(MAGIC) + 8 + 16
ATTRIBUTE = "dcp_checkfreq"


def trailer(body: bytes) -> bytes:
    """Return the 32 bytes that follow a pickle."""
    return MAGIC + len(body).to_bytes(8, "little") + xxhash.xxh3_128_digest(body)


def load(data: bytes, where: str, forms: Forms) -> tuple[Any, Record | None]:
    """Return the metadata and our record, which is None for a checkpoint of stock DCP.

    Runs no code from ``data``.

    Args:
        data: the content of ``.metadata``.
        where: it is, for errors.
        forms: of which the metadata is made.

    Raises:
        NewerFormat: written by a newer version of this package.
        BrokenMetadata: cut short, damaged, or not a DCP checkpoint.
    """
    body, sealed = _unseal(data, where)
    try:
        with collector_held():  # so many objects at once keep it busy for nothing
            metadata, raw = metadata_of(body, ATTRIBUTE, forms)
    except OddPickle as error:
        if not sealed and not data.endswith(pickle.STOP):
            # Every whole file ends with a trailer of ours, or as a pickle does.
            raise BrokenMetadata(
                where, f"cut short at {len(data)} bytes: its end is missing"
            ) from error
        raise BrokenMetadata(where, f"not readable as DCP metadata: {error}") from error
    if raw is None:
        if sealed:
            raise BrokenMetadata(where, "sealed by this package but holds no record")
        _refuse_lost_chunks(metadata, where)
        return metadata, None
    if not sealed:
        raise BrokenMetadata(where, "cut short: the trailer is missing")
    try:
        record = decode(raw)
    except RecordTooNew as error:
        raise NewerFormat(where, str(error)) from error
    except RecordError as error:
        raise BrokenMetadata(where, str(error)) from error
    problem = _contradiction(metadata, record)
    if problem is not None:
        raise BrokenMetadata(where, problem)
    _refuse_lost_chunks(metadata, where)
    return metadata, record


def is_ours(data: bytes) -> bool:
    """Tell whether this package wrote it, whole or cut short, as far as there are signs of that."""
    return ATTRIBUTE.encode() in data or data[-TRAILER_BYTES:].startswith(MAGIC)


def _refuse_lost_chunks(metadata: Any, where: str) -> None:
    try:
        lost = lost_chunk(metadata)
    except OddPickle as error:
        raise BrokenMetadata(where, str(error)) from error
    if lost is not None:
        raise BrokenMetadata(where, f"it does not say where all of {shown(lost)} is")


def _contradiction(metadata: Any, record: Record) -> str | None:
    """Return what the record says otherwise than the entries do."""
    entries = metadata.storage_data or {}
    columns = record.columns
    if len(columns.payload_offset) != len(entries):
        return f"{len(entries)} items, the record knows others"
    sizes = record.files
    for file in sizes:
        if not is_file_name(file):
            return f"the record has a file {shown(file)}, which is no plain file name"
    for index, info, start, size in zip(
        entries, entries.values(), columns.payload_offset, columns.payload_bytes, strict=True
    ):
        stop = info.offset + info.length
        if not info.offset <= start <= start + size <= stop:
            return f"the bytes of {shown(index.fqn)} are not inside of its item"
        if stop > sizes.get(info.relative_path, -1):
            return f"{shown(index.fqn)} is not inside of a file of the record"
    return None


def _told_damage(body: bytes, trailer: bytes) -> str:
    size_bytes = int.from_bytes(trailer[len(MAGIC) : len(MAGIC) + 8], "little")
    if size_bytes != len(body):
        return f"damaged: it has {len(body)} bytes, it was saved with {size_bytes}"
    return (
        f"damaged: it does not match its digest, it was saved with xxh3_128 {trailer[-16:].hex()}, "
        f"there is {xxhash.xxh3_128_hexdigest(body)}"
    )


def _unseal(data: bytes, where: str) -> tuple[bytes, bool]:
    start = len(data) - TRAILER_BYTES
    if start < 0 or data[start : start + len(MAGIC)] != MAGIC:
        return data, False
    body = data[:start]
    if data[start:] != trailer(body):
        raise BrokenMetadata(where, _told_damage(body, data[start:]))
    return body, True
