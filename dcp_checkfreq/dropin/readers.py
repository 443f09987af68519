"""What the methods of stock's `FileSystemReader` do while the drop-in is on.

Each has stock's own function first. Stock's own fields are filled in as well, so that stock can go
on with any load that was begun here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from dcp_checkfreq.dropin.behind import behind_reader
from dcp_checkfreq.dropin.fitting import tell_once
from dcp_checkfreq.errors import BrokenMetadata
from dcp_checkfreq.format import names
from dcp_checkfreq.format.metadata import is_ours

_Stock = Callable[..., Any]


def read_metadata(stock: _Stock, reader: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
    """Read and check ``.metadata``.

    Raises:
        FileNotFoundError: it is not there; scripts ask by that whether there is a checkpoint.
        BrokenMetadata: it is damaged.
    """
    behind = behind_reader(reader)
    rank = kwargs.get("rank")
    ours = behind.ours if rank is not None and behind.ours else behind.begin(reader)
    metadata: Metadata
    if ours is None:
        metadata = stock(reader, *args, **kwargs)
        return metadata
    try:
        metadata = ours.read_metadata(*args, **kwargs)
    except BrokenMetadata as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from error
        if not _is_of_others(reader, rank):
            raise
        tell_once(f"read by stock's FileSystemReader, as its pickle has more than DCP's: {error}")
        behind.ours = None
        metadata = stock(reader, *args, **kwargs)
        return metadata
    reader.load_id = ours.load_id
    behind.metadata = metadata
    return metadata


def _is_of_others(reader: FileSystemReader, rank: int | None) -> bool:
    """Tell whether the file is whole and none of ours: stock may know what is in it."""
    name = names.METADATA if rank is None else f"__{rank}{names.METADATA}"
    with reader.fs.create_stream(reader.fs.concat_path(reader.path, name), "rb") as file:
        content = file.read()
    return not is_ours(content) and content.endswith(b".")  # the end of a pickle


# DCP passes rank and use_collectives only to a parameter that is named `kwargs`.
def set_up_storage_reader(
    stock: _Stock,
    reader: FileSystemReader,
    metadata: Metadata,
    is_coordinator: bool,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Take over the metadata."""
    behind = behind_reader(reader)
    if behind.ours is None:
        behind.place(reader)  # one that reads metadata in a way of its own has not said so yet
    elif behind.metadata is not metadata:
        behind.ours = None  # it comes from somewhere else: stock believes it
    if behind.ours is not None and _is_transformed(metadata):
        tell_once("what was written through stream extensions is read by stock's FileSystemReader")
        behind.ours = None
    if behind.ours is not None:
        behind.ours.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
    stock(reader, metadata, is_coordinator, *args, **kwargs)


def _is_transformed(metadata: Metadata) -> bool:
    places = (metadata.storage_data or {}).values()
    return any(getattr(place, "transform_descriptors", None) for place in places)


def read_data(
    stock: _Stock, reader: FileSystemReader, plan: LoadPlan, planner: LoadPlanner
) -> Future[None]:
    """Read the items of a plan."""
    ours = behind_reader(reader).ours
    read: Future[None] = (
        stock(reader, plan, planner) if ours is None else ours.read_data(plan, planner)
    )
    return read


METHODS: dict[str, Callable[..., Any]] = {
    method.__name__: method for method in (read_metadata, set_up_storage_reader, read_data)
}
