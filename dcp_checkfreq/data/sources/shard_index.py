"""What was found in shard files, kept as JSON, so that no start has to scan them again."""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import fsspec

from dcp_checkfreq.data.sources.shard_readers import MARK_EVERY, Layout

_log = logging.getLogger(__name__)

_FORMAT = 2  # 1: scans looked at nothing but the number of samples


@dataclass(frozen=True, slots=True)
class IndexedShard:
    """One shard in the index. It holds for a file of that size."""

    size_bytes: int
    layout: Layout


def load(location: str, options: Mapping[str, Any]) -> dict[str, IndexedShard]:
    """Return the entries by name of the shard; none if there is no index, or not one of ours."""
    filesystem, path = _placed(location, options)
    try:
        text = filesystem.cat_file(path)
    except FileNotFoundError:
        return {}
    try:
        return _decode(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("%s is no index of shards (%r): it is made anew", location, error)
        return {}


def store(location: str, entries: Mapping[str, IndexedShard], options: Mapping[str, Any]) -> None:
    """Write the index; a process that reads it meanwhile finds the old one or the new one.

    If it cannot be written that is a warning: the next start scans again.
    """
    text = json.dumps(_encode(entries), separators=(",", ":")).encode()
    filesystem, path = _placed(location, options)
    try:
        if not isinstance(filesystem, fsspec.get_filesystem_class("file")):
            filesystem.pipe_file(path, text)  # one put
            return
        partial = f"{path}.{uuid.uuid4().hex}"
        with open(partial, "xb") as file:
            file.write(text)
        os.replace(partial, path)
    except OSError as error:
        _log.warning("%s was not written, the next start scans the shards again: %s",
                     location, error)  # fmt: skip


def _placed(location: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    placed: tuple[Any, str] = fsspec.core.url_to_fs(
        location, **(options if "://" in location else {})
    )
    return placed


def _encode(entries: Mapping[str, IndexedShard]) -> dict[str, Any]:
    shards = {
        name: [entry.size_bytes, entry.layout.samples, list(entry.layout.marks)]
        for name, entry in entries.items()
    }
    return {"format": _FORMAT, "mark_every": MARK_EVERY, "shards": shards}


def _decode(index: Any) -> dict[str, IndexedShard]:
    if (index["format"], index["mark_every"]) != (_FORMAT, MARK_EVERY):
        raise ValueError(f"format {index['format']}, marks every {index['mark_every']}")
    return {
        name: IndexedShard(_number(size), Layout(_number(samples), tuple(map(_number, marks))))
        for name, (size, samples, marks) in index["shards"].items()
    }


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"not a whole number from 0 on: {value!r}")
    return value
