"""DCP's `Metadata` to bytes and back: our record in it, a trailer behind it, no code run from it.

``.metadata`` is DCP's pickle, as stock readers expect, then 32 bytes that they never look at::

    magic (8) | length of the pickle (8, little-endian) | xxh3-128 of the pickle (16)

The unpickler admits the DCP metadata classes and plain builtins by name, nothing else.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections import ChainMap, OrderedDict
from typing import Any, NoReturn

import torch
import xxhash
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from dcp_checkfreq.errors import BrokenMetadata, NewerFormat
from dcp_checkfreq.format.index import Record, RecordError, RecordTooNew, decode, encode
from dcp_checkfreq.format.torch_private import MemoryFormat, StorageInfo, StoragePrefix, get_layout

MAGIC = b"\x89dcpcf\r\n"
TRAILER_BYTES = len(MAGIC) + 8 + 16
ATTRIBUTE = "dcp_checkfreq"


# What a damaged pickle's opcodes can raise; to the caller all of them mean the same.
_UNPICKLING_ERRORS = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


class _AnyTensorProperties(TensorProperties):
    """Reads the state of every supported torch: 2.15 has a sixth field that 2.13 stumbles over."""

    def __setstate__(self, state: Any) -> None:
        self.__class__ = TensorProperties  # type: ignore[assignment]
        try:
            TensorProperties.__setstate__(self, state)  # type: ignore[no-untyped-call]
        except ValueError:
            TensorProperties.__setstate__(self, state[:5])  # type: ignore[no-untyped-call]


def _path(*parts: str) -> str:
    """Stock writers keep their folder as a Path; a text does as well and needs no file system."""
    return str(pathlib.PurePosixPath(*parts))


_ADMITTED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): get_layout,
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): _AnyTensorProperties,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): MemoryFormat,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageInfo,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): StoragePrefix,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "ChainMap"): ChainMap,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "list"): list,
    ("builtins", "dict"): dict,
    ("builtins", "tuple"): tuple,
}
for _module in ("pathlib", "pathlib._local"):
    for _name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"):
        _ADMITTED[_module, _name] = _path
for _name in (
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
):
    _ADMITTED["torch.distributed.checkpoint.metadata", _name] = getattr(dcp_metadata, _name)


def _can_be_marked(thing: Any) -> bool:
    """Tell whether attributes of a class or function can be set at all."""
    return not isinstance(thing, type) or bool(thing.__flags__ & (1 << 9))  # Py_TPFLAGS_HEAPTYPE


class _ClosedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        admitted = _ADMITTED.get((module, name))
        if admitted is not None:
            return admitted
        if module == "torch":
            dtype = getattr(torch, name, None)
            if isinstance(dtype, torch.dtype):
                return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no DCP metadata needs")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside of itself")


def dump(metadata: Metadata, record: Record) -> bytes:
    """Return the content of ``.metadata``: ``metadata`` with ``record`` in it, and the trailer."""
    setattr(metadata, ATTRIBUTE, encode(record))
    body = pickle.dumps(metadata, protocol=4)
    return body + _trailer(body)


def _trailer(body: bytes) -> bytes:
    return MAGIC + len(body).to_bytes(8, "little") + xxhash.xxh3_128_digest(body)


def load(data: bytes, where: str) -> tuple[Metadata, Record | None]:
    """Return the metadata and our record, which is None for a checkpoint of stock DCP.

    Runs no code from ``data``. ``where`` is named in errors.

    Raises:
        NewerFormat: written by a newer version of this package.
        BrokenMetadata: cut short, damaged, or not a DCP checkpoint.
    """
    body, sealed = _unseal(data, where)
    metadata = _unpickle(body, where)
    if not isinstance(metadata, Metadata):
        raise BrokenMetadata(where, f"holds a {type(metadata).__name__}, not DCP metadata")
    _check_names(metadata, where)
    raw = metadata.__dict__.get(ATTRIBUTE)
    if raw is None:
        if sealed:
            raise BrokenMetadata(where, "sealed by this package but holds no record")
        return metadata, None
    if not sealed:
        raise BrokenMetadata(where, "cut short: the trailer is missing")
    try:
        record = decode(raw)
    except RecordTooNew as error:
        raise NewerFormat(where, str(error)) from error
    except RecordError as error:
        raise BrokenMetadata(where, str(error)) from error
    entries = len(metadata.storage_data or ())
    if len(record.columns.payload_offset) != entries:
        raise BrokenMetadata(where, f"{entries} items, the record knows others")
    return metadata, record


def _check_names(metadata: Metadata, where: str) -> None:
    """Refuse entries that would be read, or deleted, outside of the checkpoint's folder."""
    try:
        files = {info.relative_path for info in (metadata.storage_data or {}).values()}
        odd = [file for file in files if file in ("", ".", "..") or "/" in file or "\0" in file]
    except (AttributeError, TypeError) as error:
        raise BrokenMetadata(where, f"its entries name no files: {error}") from error
    if odd:
        raise BrokenMetadata(where, f"an item is in {min(odd)!r}, which is no plain file name")


def _unseal(data: bytes, where: str) -> tuple[bytes, bool]:
    start = len(data) - TRAILER_BYTES
    if start < 0 or data[start : start + len(MAGIC)] != MAGIC:
        return data, False
    body = data[:start]
    if data[start:] != _trailer(body):
        raise BrokenMetadata(where, "damaged: it does not match its digest")
    return body, True


# Pickle can set attributes not only of the objects that it makes but of the classes themselves.
_SHARED = [
    thing for thing in {id(t): t for t in _ADMITTED.values()}.values() if _can_be_marked(thing)
]


def _unpickle(body: bytes, where: str) -> Any:
    before = [dict(vars(thing)) for thing in _SHARED]
    try:
        loaded = _ClosedUnpickler(io.BytesIO(body)).load()
    except _UNPICKLING_ERRORS as error:
        raise BrokenMetadata(where, f"not readable as DCP metadata: {error}") from error
    finally:
        marked = [_restore(thing, was) for thing, was in zip(_SHARED, before, strict=True)]
    if any(marked):
        raise BrokenMetadata(where, "it changes classes of this process")
    return loaded


def _restore(thing: Any, was: dict[str, Any]) -> bool:
    """Undo what was set on a class or function; tell whether anything was."""
    now = dict(vars(thing))
    changed = [name for name in now if now[name] is not was.get(name)]
    for name in changed:
        if name in was:
            setattr(thing, name, was[name])
        else:
            delattr(thing, name)
    return bool(changed)
