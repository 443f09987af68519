"""Whether a state could be saved, and restored; what cannot is named by its whole inner key."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_checkfreq.errors import UnsupportedState
from dcp_checkfreq.format.value_checks import ValueChecks, parts_of_value, serialised
from dcp_checkfreq.shards.boxes import check_placements
from dcp_checkfreq.shards.codec import check_not_sharded_tensor, check_storable, local_of
from dcp_checkfreq.shards.self_described import describes_itself, parts_of
from dcp_checkfreq.state.packed import TENSORS, TREE, is_packed, pack
from dcp_checkfreq.state.unpacked import unpack
from dcp_checkfreq.state.wrapper_kinds import HOW_TO_KNOW, Kinds
from dcp_checkfreq.state.wrapper_record import RECORD, record_of
from dcp_checkfreq.state.wrappers import is_taken_apart

_WHERE = "the state"


def check_leaves(
    key: str,
    value: Any,
    *,
    allow_pickle: bool,
    kinds: Kinds | None = None,
    has_live: bool = False,
) -> None:
    """Look at all leaves of a state, where DCP looks for them.

    Args:
        key: of the state.
        value: the state.
        allow_pickle: values that need code to unpickle are right.
        kinds: the classes that wrapper subclasses may be made of; None: those that are here.
        has_live: what it is restored into has all its wrappers, and none needs to be made.

    Raises:
        UnsupportedState: of the first that cannot be saved or could not be restored, by its key.
    """
    if is_packed(value):
        raw = unpack(value, functools.partial(_check_wrapper, key, kinds), is_dressed=False)
        own_items = set(map(id, value[TENSORS]))
        for inner_key, inner in _inside(key, raw):
            if isinstance(inner, torch.Tensor) and id(inner) in own_items:
                _check_tensor(inner_key, inner)
        stream = serialised(value[TREE], key, raw, _tree_of)
        if not allow_pickle:
            ValueChecks().check(key, stream, _WHERE, lambda: raw, form=_tree_of)
    elif isinstance(value, (Mapping, list)) and (value or isinstance(value, Mapping)):
        if isinstance(value, Mapping) and is_taken_apart(value) and not has_live:
            _check_wrapper(key, kinds, value)
        inside = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, inner in inside:
            check_leaves(
                f"{key}.{name}",
                inner,
                allow_pickle=allow_pickle,
                kinds=kinds,
                has_live=has_live,
            )
    elif isinstance(value, torch.Tensor):
        _check_tensor(key, value)
    else:
        _check_value(key, value, allow_pickle=allow_pickle)


def _check_wrapper(key: str, kinds: Kinds | None, parts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Make sure that a wrapper could be put together where there is none; return its parts."""
    record = record_of(parts)
    if not (record.is_plain if kinds is None else kinds.knows(parts[RECORD])):
        kind = record.kind
        raise UnsupportedState(key, kind, f"nothing could make one at a restart. {HOW_TO_KNOW}")
    return parts


def _check_tensor(key: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        check_placements(tensor, key)
    if describes_itself(tensor):
        for part in parts_of(key, tensor):
            check_storable(part.tensor, key)
    else:
        check_not_sharded_tensor(tensor, key)
        check_storable(local_of(tensor), key)


def _check_value(key: str, value: object, *, allow_pickle: bool) -> None:
    stream = serialised(value, key)
    if not allow_pickle:
        ValueChecks().check(key, stream, _WHERE, functools.partial(_same, value))


def _same(value: object) -> object:
    return value


def _tree_of(value: object) -> object:
    return pack(value)[TREE]


def _inside(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the leaves of the containers that `pack` looks into."""
    parts = parts_of_value(value)
    if parts is None:
        yield key, value
    else:
        for name, inner in parts:
            yield from _inside(f"{key}.{name}", inner)
