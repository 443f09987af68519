"""Metadata from stand-ins, every part of it checked: types, sizes, and that they agree.

A caller may rely on the result: keys are texts, sizes are whole numbers that a file could
have, a chunk lies inside of its tensor and has an entry that says where its bytes are, files are
plain names. Shared parts of a pickle are visited once per mention, so each walk is paid for in
advance (`_Budget`): a list of a million elements that is mentioned a million times is refused.
"""

from __future__ import annotations

import math
import operator
import pathlib
from collections import ChainMap, OrderedDict
from itertools import chain, islice, repeat
from typing import Any

from dcp_checkfreq.format import stand_ins as made
from dcp_checkfreq.format.forms import Forms
from dcp_checkfreq.format.names import is_file_name
from dcp_checkfreq.format.opcodes import DICT_MARK, OddPickle
from dcp_checkfreq.format.stand_in_fields import columns_of, fields_of, kind_of, split, texts_and
from dcp_checkfreq.format.texts import is_text, plain, shown

LARGEST = 1 << 62  # no file, tensor or offset is larger; sums of two still fit 64 bits
_MOST_DIMS = 255
_LONGEST_PATH = 64 << 10
_DEEPEST = 40
_MOST_ODD_KEYS = 2000  # keys that are no texts can be made to collide, and are then compared
_MOST_COLLIDING = 64  # so can offsets

_PROPERTIES = set(range(5, 20))  # torch 2.15 has a sixth, which none before it knows
_LARGEST_ITEM_BYTES = 16


class _Budget:
    """What may still be visited: each part of the pickle a few times on average."""

    def __init__(self, pickle_bytes: int) -> None:
        self.left = 1000 + 2 * pickle_bytes

    def spend(self, visits: int) -> None:
        self.left -= visits
        if self.left < 0:
            raise OddPickle("its parts mention each other too often")


def metadata_of(body: bytes, attribute: str, forms: Forms) -> tuple[Any, Any]:
    """Return the metadata that a pickle holds, and what was in its ``attribute``, unchecked.

    The former is made of the classes of ``forms``. The latter is of builtins, None if there is
    none. Whether each chunk has an entry is up to `lost_chunk`.

    Raises:
        OddPickle: it is not DCP metadata, or contradicts itself.
    """
    budget = _Budget(len(body))
    root = made.unpickled(body, forms)
    if type(root) is not made.MadeMetadata:
        raise OddPickle(f"it holds {kind_of(root)}, not DCP metadata")
    fields = fields_of(root, made.MadeMetadata)
    kept = _kept_metadata(fields.pop("state_dict_metadata", None), budget, forms)
    metadata = forms.metadata(kept)
    metadata.storage_data = _entries(fields.pop("storage_data", None), budget, forms)
    meta = fields.pop("storage_meta", None)
    metadata.storage_meta = None if meta is None else _storage_meta(meta, forms)
    record = fields.pop(attribute, None)
    if record is not None:
        record = _record(record)
    paths = _paths(fields.get("planner_data"), budget)
    if paths is not None:
        metadata.planner_data = paths
        del fields["planner_data"]
    if any(value is not None and type(value) is not str for value in fields.values()):
        # Of another planner than DCP's. What is a dict and what a list takes a second look.
        marked = fields_of(
            made.unpickled(body, forms, tell_dicts=True), made.MadeMetadata, marked=True
        )
        fields = {name: _plain(marked[name], budget, forms) for name in fields}
    for name, value in fields.items():
        if not name.isidentifier() or name.startswith("__"):
            raise OddPickle(f"it has an attribute {shown(name)}")
        setattr(metadata, name, value)
    return metadata, record


def _record(flat: Any) -> dict[str, Any]:
    """Return our record, which has dicts in it and no lists."""
    record = texts_and(flat)
    return {name: texts_and(v) if type(v) is list else v for name, v in record.items()}


def lost_chunk(metadata: Any) -> str | None:
    """Return the key of a chunk or value of which no entry says where it is; None: all have one."""
    wanted: list[tuple[str, Any]] = []
    values: list[str] = []
    for key, kept in metadata.state_dict_metadata.items():
        chunks = getattr(kept, "chunks", None)
        if chunks is not None:
            wanted += [(key, chunk.offsets) for chunk in chunks]
        else:
            values.append(key)
    # Their hashes were looked at (`_refuse_collisions`), so a look-up among them is quick.
    present = {(index.fqn, index.offset) for index in metadata.storage_data or ()}
    if not present.issuperset(wanted):
        return next(key for key, offset in wanted if (key, offset) not in present)
    return min(set(values) - {key for key, _ in present}, default=None) if values else None


# --- what is kept of each key --------------------------------------------------------------


def _kept_metadata(flat: Any, budget: _Budget, forms: Forms) -> dict[str, Any]:
    kept = texts_and(flat)
    tensors = {key: thing for key, thing in kept.items() if type(thing) is made.MadeTensor}
    for key, thing in kept.items():
        if type(thing) is not made.MadeTensor and type(thing) is not made.MadeBytes:
            raise OddPickle(f"{shown(key)} is {kind_of(thing)}")
    built = _tensors(list(tensors), list(tensors.values()), budget, forms)
    if len(built) == len(kept):
        return dict(zip(kept, built, strict=True))
    by_key = dict(zip(tensors, built, strict=True))
    return {key: by_key.get(key) or forms.value() for key in kept}


def _tensors(keys: list[str], things: list[Any], budget: _Budget, forms: Forms) -> list[Any]:
    properties, dims, chunks = columns_of(things, made.MadeTensor, ["properties", "size", "chunks"])
    sizes = _sizes(dims, budget, forms)
    largest = max(map(math.prod, sizes), default=0)
    if largest > LARGEST // _LARGEST_ITEM_BYTES:
        raise OddPickle("a tensor is larger than anything")
    if not set(map(type, chunks)) <= {list}:
        raise OddPickle("the chunks of a tensor are no list")
    counts = list(map(len, chunks))
    budget.spend(sum(counts))
    offsets, lengths = columns_of(
        list(chain.from_iterable(chunks)), made.MadeChunk, ["offsets", "sizes"]
    )
    starts, extents = _sizes(offsets, budget, forms), _sizes(lengths, budget, forms)
    wholes = list(chain.from_iterable(map(repeat, sizes, counts)))
    if not _all_inside(starts, extents, wholes):
        owners = chain.from_iterable(map(repeat, keys, counts))
        for key, *box in zip(owners, starts, extents, wholes, strict=True):
            if not _all_inside(*([part] for part in box)):
                start, extent, whole = map(shown, box)
                raise OddPickle(
                    f"a chunk of {extent} at {start} is not inside of {shown(key)}, {whole}"
                )
    boxes = map(forms.chunk, starts, extents)
    return [
        forms.tensor(kept, size, list(islice(boxes, count)))
        for kept, size, count in zip(_properties(properties, forms), sizes, counts, strict=True)
    ]


def _all_inside(starts: list[Any], extents: list[Any], wholes: list[Any]) -> bool:
    dims = list(map(len, wholes))
    if dims != list(map(len, starts)) or dims != list(map(len, extents)):
        return False
    every = chain.from_iterable
    return all(map(operator.le, map(operator.add, every(starts), every(extents)), every(wholes)))


def _sizes(dims: list[Any], budget: _Budget, forms: Forms) -> list[Any]:
    if not set(map(type, dims)) <= {tuple, list}:
        odd = next(one for one in dims if type(one) not in (tuple, list))
        raise OddPickle(f"{kind_of(odd)} is where a size should be")
    if max(map(len, dims), default=0) > _MOST_DIMS:
        raise OddPickle("a tensor has too many dimensions")
    budget.spend(sum(map(len, dims)))
    _check_counts(list(chain.from_iterable(dims)))
    return list(map(forms.size, dims))


def _check_counts(numbers: list[Any]) -> None:
    if not set(map(type, numbers)) <= {int}:
        odd = next(one for one in numbers if type(one) is not int)
        raise OddPickle(f"{kind_of(odd)} is where a size should be")
    least, most = min(numbers, default=0), max(numbers, default=0)
    if least < 0 or most > LARGEST:
        raise OddPickle(f"{shown(least if least < 0 else most)} is where a size should be")


def _properties(things: list[Any], forms: Forms) -> list[Any]:
    if not set(map(type, things)) <= {made.MadeProperties} or not set(map(len, things)) <= {1}:
        raise OddPickle("a tensor has no properties")
    states = list(chain.from_iterable(things))
    if not set(map(type, states)) <= {tuple} or not set(map(len, states)) <= _PROPERTIES:
        raise OddPickle("a tensor has other properties")
    columns = [list(map(operator.itemgetter(n), states)) for n in range(5)]
    kinds = (forms.dtype_type, forms.layout_type, bool, forms.encoding_type, bool)
    for column, kind in zip(columns, kinds, strict=True):
        if not set(map(type, column)) <= {kind}:
            odd = next(one for one in column if type(one) is not kind)
            raise OddPickle(f"{kind_of(odd)} is where a {kind.__name__} should be")
    columns[3] = [forms.memory_formats[encoding] for encoding in columns[3]]
    built = list(map(forms.properties, *columns)) if states else []
    if forms.has_strides:
        for properties, state in zip(built, states, strict=True):
            setattr(properties, "strides", _strides(state[5:]))  # noqa: B010  not in older torch
    return built


def _strides(rest: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Return the sixth field if it is what torch 2.15 has there. An older torch looks at none."""
    strides = rest[0] if rest else None
    if type(strides) is not tuple or len(strides) > _MOST_DIMS:
        return None
    if not all(type(stride) is int and 0 <= stride <= LARGEST for stride in strides):
        return None
    return strides


# --- where the bytes are -------------------------------------------------------------------


def _entries(flat: Any, budget: _Budget, forms: Forms) -> dict[Any, Any] | None:
    if flat is None:
        return None
    keys, values = split(flat)
    budget.spend(len(keys))
    indices = _indices(keys, budget, forms)
    _refuse_collisions([(index.fqn, index.offset) for index in indices])
    return dict(zip(indices, _infos(values, forms), strict=True))


def _indices(things: list[Any], budget: _Budget, forms: Forms) -> list[Any]:
    keys, hints, offsets = columns_of(things, made.MadeIndex, ["fqn", "index", "offset"])
    if not set(map(type, keys)) <= {str}:
        raise OddPickle("the key of an entry is no text")
    _check_counts([hint for hint in hints if hint is not None])
    starts = iter(_sizes([one for one in offsets if one is not None], budget, forms))
    indices = []
    for key, hint, offset in zip(keys, hints, offsets, strict=True):
        index: Any = object.__new__(forms.index)  # its own constructor looks at each number again
        fields = index.__dict__
        fields["fqn"] = key
        fields["index"] = hint
        fields["offset"] = None if offset is None else next(starts)
        indices.append(index)
    return indices


def _infos(things: list[Any], forms: Forms) -> list[Any]:
    files, offsets, lengths, transforms = columns_of(
        things, made.MadeInfo, ["relative_path", "offset", "length", "transform_descriptors"]
    )
    if not set(map(type, files)) <= {str}:
        raise OddPickle("an entry names no file")
    for file in set(files):
        if not is_file_name(file):
            raise OddPickle(f"an item is in {shown(file)}, which is no plain file name")
    _check_counts(offsets)
    _check_counts(lengths)
    if any(names is not None for names in transforms):
        transforms = [None if names is None else _transforms(names) for names in transforms]
        return list(map(forms.info, files, offsets, lengths, transforms))
    return list(map(forms.info, files, offsets, lengths))


def _transforms(names: Any) -> list[str]:
    if type(names) not in (list, tuple) or len(names) > 8:
        raise OddPickle(f"{kind_of(names)} is where names of transforms should be")
    if not all(is_text(name) and len(name) < 100 for name in names):
        raise OddPickle("the name of a transform is no text")
    return list(names)


def _refuse_collisions(keys: list[Any]) -> None:
    """Offsets can be made up so that all have one hash; a dict then compares each to each."""
    if len(keys) <= _MOST_COLLIDING:
        return
    hashes = sorted(map(hash, keys))
    if any(map(operator.eq, hashes, hashes[_MOST_COLLIDING:])):
        raise OddPickle("offsets of its chunks are made up to collide")


# --- the rest ------------------------------------------------------------------------------


def _storage_meta(thing: Any, forms: Forms) -> Any:
    fields = fields_of(thing, made.MadeStorageMeta)
    meta = forms.storage_meta()
    for name in ("checkpoint_id", "save_id", "load_id"):
        value = fields.get(name)
        if type(value) is made.MadePath:
            value = _path(value)
        if isinstance(value, str):
            value = plain(value)  # of a root whose name is not UTF-8, say; it is only shown
        if value is not None and not (is_text(value) and len(value) <= _LONGEST_PATH):
            raise OddPickle(f"{shown(value)} is where the {name} should be")
        setattr(meta, name, value)
    modules = fields.get("modules", [])
    if type(modules) is not list or len(modules) > 1000 or not all(map(is_text, modules)):
        raise OddPickle("its modules are no texts")
    meta.modules = modules
    return meta


def _path(thing: made.MadePath) -> str:
    """Stock writers keep their folder as a Path; a text does as well and needs no file system."""
    parts = thing[0] if len(thing) == 1 else ()
    if type(parts) is not tuple or len(parts) > _LONGEST_PATH or not all(map(is_text, parts)):
        raise OddPickle("a path is not of texts")
    if sum(map(len, parts)) > _LONGEST_PATH:
        raise OddPickle("a path is too long")
    return str(pathlib.PurePosixPath(*parts))


def _paths(flat: Any, budget: _Budget) -> dict[str, Any] | None:
    """Return what DCP's own planners keep: for each key its path in the state. None: not that."""
    if type(flat) is not list:
        return None
    keys, values = split(flat)
    if not set(map(type, keys)) <= {str} or not set(map(type, values)) <= {tuple}:
        return None
    budget.spend(sum(map(len, values)))
    if not set(map(type, chain.from_iterable(values))) <= {str, int}:
        return None
    return dict(zip(keys, values, strict=True))


def _plain(value: Any, budget: _Budget, forms: Forms, depth: int = 0) -> Any:
    """Return a value of another planner: containers, texts, numbers, sizes and paths.

    Sharing is lost: what is mentioned twice is made twice, and paid for twice.
    """
    budget.spend(1)
    if depth > _DEEPEST:
        raise OddPickle("its planner's data is nested too deeply")
    kind = type(value)
    if value is None or kind in (str, bytes, int, float, bool, forms.dtype_type):
        return value
    if kind is tuple:
        return tuple(_plain(inner, budget, forms, depth + 1) for inner in value)
    if kind is list and value[:1] == [DICT_MARK]:
        return _plain_dict(value[1:], budget, forms, depth)
    if kind is list:
        return [_plain(inner, budget, forms, depth + 1) for inner in value]
    if kind is made.MadePath:
        return _path(value)
    if kind in (made.MadeOrderedDict, made.MadeChainMap) and value and type(value[0]) is tuple:
        maps = [_plain(inner, budget, forms, depth + 1) for inner in value[0]]
        if not all(isinstance(one, dict) for one in maps):
            raise OddPickle("its planner's data is made of other things than dicts")
        if kind is made.MadeChainMap:
            return ChainMap(*maps)
        return OrderedDict(_plain_dict(value[1:], budget, forms, depth))
    raise OddPickle(f"its planner's data holds {kind_of(value)}")


def _plain_dict(flat: list[Any], budget: _Budget, forms: Forms, depth: int) -> dict[Any, Any]:
    keys, values = split(flat, marked=True)
    budget.spend(len(keys))
    odd = [key for key in keys if type(key) is not str]
    if len(odd) > _MOST_ODD_KEYS:
        raise OddPickle("its planner's data has too many keys that are no texts")
    for key in odd:
        if not _is_plain_key(key):
            raise OddPickle(f"its planner's data has {kind_of(key)} for a key")
    return {
        key: _plain(value, budget, forms, depth + 1)
        for key, value in zip(keys, values, strict=True)
    }


def _is_plain_key(key: Any) -> bool:
    if type(key) is tuple:
        return len(key) <= _MOST_DIMS and all(type(part) in (str, int) for part in key)
    return key is None or type(key) in (int, bytes, float, bool)
