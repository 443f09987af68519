"""Reads the ``.metadata`` of a checkpoint."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import Metadata

from dcp_checkfreq.errors import BrokenMetadata
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.format.index import Record
from dcp_checkfreq.format.names import METADATA
from dcp_checkfreq.recovery.files import content_of
from dcp_checkfreq.storage.tier import Tier


def read_metadata(folder: Tier, name: str = METADATA) -> tuple[Metadata, Record | None]:
    """Return what a folder's ``.metadata`` says; the record is None for one of stock DCP.

    Raises:
        BrokenMetadata: missing, cut short, damaged, or not a checkpoint's.
        NewerFormat: written by a newer version of this package.
    """
    try:
        content = content_of(folder, name)
    except FileNotFoundError as error:
        raise BrokenMetadata(folder.location, f"there is no {name}") from error
    except OSError as error:
        raise BrokenMetadata(folder.location, f"{name}: {error}") from error
    return metadata_format.load(content, folder.location)
