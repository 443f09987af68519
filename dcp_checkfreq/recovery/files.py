"""Which files make a checkpoint: the one definition that scanning, cleaning and deleting share."""

from __future__ import annotations

from typing import Any

from dcp_checkfreq.errors import BrokenMetadata, LoadFailed
from dcp_checkfreq.format import sealed
from dcp_checkfreq.format.forms import PLAIN
from dcp_checkfreq.format.index import Record
from dcp_checkfreq.format.names import METADATA
from dcp_checkfreq.storage.tier import LARGEST_SMALL_FILE_BYTES, OddFile, Tier, read_small


def content_of(folder: Tier, name: str = METADATA) -> bytes:
    """Return the content of a folder's ``.metadata``.

    Raises:
        FileNotFoundError: there is none.
        BrokenMetadata: there is something else in its place: a folder, a fifo, an endless file.
        OSError: of the storage.
    """
    try:
        return read_small(folder, name, at_most_bytes=LARGEST_SMALL_FILE_BYTES)
    except (OddFile, IsADirectoryError) as error:
        raise BrokenMetadata(folder.location, f"{name}: {error.strerror or error}") from error


def files_of(metadata: Any, record: Record | None) -> frozenset[str]:
    """Return the shard files of a checkpoint: those that hold an item, and all of the record's.

    A record may list files that hold no item of its own: a planner let several ranks write one.
    """
    holding = {info.relative_path for info in (metadata.storage_data or {}).values()}
    return frozenset(holding) | frozenset(record.files if record is not None else ())


def is_published(folder: Tier) -> bool:
    """Tell whether there is a ``.metadata``, whatever is in it."""
    try:
        folder.size(METADATA)
    except FileNotFoundError:
        return False
    return True


def named_in(content: bytes, where: str) -> frozenset[str] | None:
    """Return the files that a ``.metadata`` names; None if it cannot be read."""
    try:
        return files_of(*sealed.load(content, where, PLAIN))
    except LoadFailed:
        return None


def named_files(folder: Tier) -> frozenset[str] | None:
    """Return the files that the folder's ``.metadata`` names; none if there is no ``.metadata``.

    None if it cannot be read: then nothing is known of the files, and none may go.
    """
    try:
        content = content_of(folder)
    except FileNotFoundError:
        return frozenset()
    except LoadFailed:
        return None
    return named_in(content, folder.location)
