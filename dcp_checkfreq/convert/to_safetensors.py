"""`export_safetensors`: tensors of a checkpoint as Hugging Face lays them out, piece by piece."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dcp_checkfreq.convert.blocks import Index, blocks
from dcp_checkfreq.convert.exported import Rename, chosen, dtype_of
from dcp_checkfreq.convert.safetensors_layout import (
    INDEX,
    ITEM_BYTES,
    Exporting,
    File,
    files,
    index,
    is_of_a_model,
)
from dcp_checkfreq.errors import BadLocation, UnsupportedState
from dcp_checkfreq.format.names import new_attempt
from dcp_checkfreq.opened.lazy import LazyTensor, read_together
from dcp_checkfreq.opened.open_checkpoint import open_checkpoint
from dcp_checkfreq.runtime import options
from dcp_checkfreq.runtime.crew import Crew, Task
from dcp_checkfreq.shards.codec import bytes_of
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.storage.open import Location, is_remote, open_tier
from dcp_checkfreq.storage.tier import Tier

_log = logging.getLogger(__name__)

_BLOCK_BYTES = 16 << 20
_AHEAD = 2  # blocks that are read while one is written
_KINDS = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.uint16: "U16", torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64",
    torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        files: names, in order.
        names: of the tensors.
        left_out: keys of values that are no tensors: safetensors has no place for them.
        size_bytes: of all files.
    """

    files: tuple[str, ...]
    names: tuple[str, ...]
    left_out: tuple[str, ...]
    size_bytes: int


def export_safetensors(
    path: Location,
    to: Location,
    *,
    prefix: str = "",
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
    threads: int = 2,
    storage_options: Mapping[str, Any] | None = None,
) -> Exported:
    """Write tensors of a checkpoint to safetensors files, with an index if they are several.

    Needs no process group and no GPU. Memory is bounded: a few blocks of 16 MiB, whatever the size
    of the tensors. All that is read is checked. A file gets its name when it is whole and durable,
    and the index comes last, so what an interruption leaves is never taken for a model.

    Args:
        path: of the checkpoint, as for `open_checkpoint`.
        to: folder, local or a URL; other files in it stay.
        prefix: of the keys that are wanted, such as ``"model."``; it is not part of the names.
        rename: name by name (``{"embed.weight": "wte.weight"}``), or a function of the name; what
            it returns None for is left out.
        dtype: that floating-point tensors are cast to.
        max_file_bytes: of elements in each file; a larger tensor has a file of its own.
        threads: reads at once.
        storage_options: for file systems of URLs.

    Raises:
        StateMismatch: there is nothing to export, or two tensors would have the same name.
        UnsupportedState: safetensors has no such dtype. Nothing was written.
        BadLocation: another model is in ``to`` already. Nothing was written.
        BrokenShard, BrokenMetadata: the checkpoint is damaged; files that were whole may be there,
            an index is not.
    """
    options.check(options.EXPORT_SAFETENSORS, locals())
    target = open_tier(to, storage_options=storage_options if is_remote(to) else None)
    with open_checkpoint(
        path,
        map_files=False,
        threads=threads,
        storage_options=storage_options if is_remote(path) else None,
    ) as opened:
        named, left_out = chosen(opened, prefix, rename)
        made = files((_exporting(name, one, dtype) for name, one in named.items()), max_file_bytes)
        target.make()
        _refuse_another_model(target)
        for file in made:
            _write(target, file.name, _pieces(file, named, dtype), file.size_bytes)
    if len(made) > 1:
        content = json.dumps(index(made), indent=2, sort_keys=True).encode()
        target.sync()  # the index is durable after what it names
        _write(target, INDEX, iter([memoryview(content)]), len(content))
    target.sync()
    if left_out:
        _log.warning("%s: not tensors, so not exported: %s", target.location, ", ".join(left_out))
    return Exported(
        tuple(file.name for file in made),
        tuple(named),
        tuple(left_out),
        sum(file.size_bytes for file in made),
    )


def _exporting(name: str, lazy: LazyTensor, cast_to: torch.dtype | None) -> Exporting:
    dtype = dtype_of(lazy, cast_to)
    kind = _KINDS.get(dtype)
    if kind is None:
        raise UnsupportedState(lazy.key, f"{dtype} tensor", "safetensors has no such dtype")
    assert ITEM_BYTES[kind] == dtype.itemsize
    return Exporting(lazy.key, name, tuple(lazy.shape), kind)


def _refuse_another_model(target: Tier) -> None:
    """Replace nothing: until all of the new one is there, it would be neither."""
    there = sorted(entry.name for entry in target.list() if is_of_a_model(entry.name))
    if there:
        raise BadLocation(
            target.location,
            f"another model is there ({there[0]}): export to another folder, or remove it first",
        )


def _write(target: Tier, name: str, pieces: Iterator[memoryview], size_bytes: int) -> None:
    """Write a file that has its name only when it is whole, as objects of object stores do."""
    if not isinstance(target, LocalTier):
        target.write_shard(name, pieces, size_bytes)
        return
    scratch = f".{name}.{new_attempt()}.tmp"
    try:
        target.write_shard(scratch, pieces, size_bytes)
        os.rename(os.path.join(target.location, scratch), os.path.join(target.location, name))
    except BaseException:
        target.delete(scratch)
        raise


def _pieces(
    file: File, named: Mapping[str, LazyTensor], cast_to: torch.dtype | None
) -> Iterator[memoryview]:
    """Yield the content of a file, the next blocks being read meanwhile."""
    yield memoryview(file.header)
    reads = (partial(_read, group, cast_to) for group in _groups(file, named))
    waiting: deque[Task[list[torch.Tensor]]] = deque()
    with Crew(_AHEAD, "checkfreq-export") as crew:
        with contextlib.suppress(StopIteration):
            while len(waiting) < _AHEAD:
                waiting.append(crew.start(next(reads)))
        while waiting:
            group = waiting.popleft().result()
            with contextlib.suppress(StopIteration):
                waiting.append(crew.start(next(reads)))
            yield from map(bytes_of, group)


def _groups(
    file: File, named: Mapping[str, LazyTensor]
) -> Iterator[list[tuple[LazyTensor, Index]]]:
    """Yield the blocks of a file in order, small ones together, to be read in one go."""
    group: list[tuple[LazyTensor, Index]] = []
    left_bytes = _BLOCK_BYTES
    for one in file.tensors:
        for part in blocks(one.shape, max(1, _BLOCK_BYTES // ITEM_BYTES[one.kind])):
            size_bytes = min(one.size_bytes, _BLOCK_BYTES)
            if group and size_bytes > left_bytes:
                yield group
                group, left_bytes = [], _BLOCK_BYTES
            group.append((named[one.name], part))
            left_bytes -= size_bytes
    if group:
        yield group


def _read(group: list[tuple[LazyTensor, Index]], cast_to: torch.dtype | None) -> list[torch.Tensor]:
    read = read_together(group)
    return [
        block.to(dtype_of(lazy, cast_to)).contiguous()
        for block, (lazy, _) in zip(read, group, strict=True)
    ]
