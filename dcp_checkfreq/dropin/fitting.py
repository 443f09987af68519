"""Which writers and readers of stock's ours may stand behind, and how ours are made for them."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)

from dcp_checkfreq.errors import BadLocation
from dcp_checkfreq.format.torch_private import fsspec_file_system, fsspec_storage
from dcp_checkfreq.storage.open import open_tier

_log = logging.getLogger(__name__)

# What a subclass may have of its own: none of it has to do with files.
_FREE = {
    "checkpoint_id",
    "close",
    "should_synchronize_after_execute",
    "synchronize_staging",
    "validate_checkpoint_id",
}

_told: set[str] = set()


class StaysStock(Exception):
    """Stock's own code does this, for the reason in the text."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an object of stock's saves to or loads from.

    Attributes:
        path: a local one is absolute: to stock ``~`` is a name like any other.
        storage_options: for the file system of a URL.
    """

    path: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Options:
    """What a writer of stock's was given, in our terms."""

    threads: int
    overwrite: bool
    file_for_each: bool


def tell_once(text: str) -> None:
    """Log a line, the first time that it is to be logged in this process."""
    if text not in _told:
        _told.add(text)
        _log.info("drop-in: %s", text)


def options_of(writer: FileSystemWriter) -> Options:
    """Return what a writer was given.

    Raises:
        StaysStock: it was given what only stock can do.
    """
    if getattr(writer.transforms, "extensions", None):
        raise StaysStock("stream extensions are written by stock's FileSystemWriter")
    kind = getattr(writer.serialization_format, "value", "torch_save")
    if kind != "torch_save":
        raise StaysStock(f"serialization_format={kind} is written by stock's FileSystemWriter")
    return Options(
        threads=max(1, int(writer.thread_count)),
        overwrite=bool(writer.overwrite),
        file_for_each=not writer.single_file_per_rank,
    )


def place_of(stock: FileSystemWriter | FileSystemReader) -> Place:
    """Return where it saves to or loads from, as it says now.

    Raises:
        StaysStock: it does something in a way of its own, or in a place that is not for us.
    """
    is_writer = isinstance(stock, FileSystemWriter)
    own = _of_its_own(stock, FileSystemWriter if is_writer else FileSystemReader)
    if own:
        raise StaysStock(f"{own} is not stock's, so all of {type(stock).__name__} stays as it is")
    place = _place_in(getattr(stock, "fs", None), getattr(stock, "path", ""))
    try:
        open_tier(place.path, storage_options=place.storage_options)
    except BadLocation as error:
        raise StaysStock(f"this place is left to stock's classes: {error}") from error
    return place


def _place_in(files: Any, path: str | os.PathLike[str]) -> Place:
    if type(files) is FileSystem:
        return Place(os.path.abspath(path))
    if not _is_of_fsspec(files):
        raise StaysStock(f"files through {type(files).__name__} are left to stock's classes")
    text = os.fspath(path)
    if "://" not in text and "::" not in text:
        return Place(os.path.abspath(text))
    return Place(text, dict(files.fs.storage_options))


def _is_of_fsspec(files: object) -> bool:
    return type(files) is fsspec_file_system()


def _of_its_own(stock: object, home: type) -> str:
    """Return the name of something that is not stock's, on the object or in a class of it."""
    names = _methods_of(home)
    own = [name for name, value in vars(stock).items() if name in names and callable(value)]
    if own:
        return f"{type(stock).__name__}.{own[0]} of this object"
    storage = fsspec_storage()
    stocks = (storage.FsspecWriter, storage.FsspecReader)
    for kind in type(stock).__mro__:
        if kind is home:
            break
        own = [] if kind in stocks else sorted(names & vars(kind).keys())
        if own:
            return f"{kind.__name__}.{own[0]}"
    return ""


@functools.cache
def _methods_of(home: type) -> frozenset[str]:
    kinds = (classmethod, staticmethod, property)
    return frozenset(
        name
        for kind in home.__mro__
        for name, value in vars(kind).items()
        if (inspect.isfunction(value) or isinstance(value, kinds))
        and not name.startswith("__")
        and name not in _FREE
    )
