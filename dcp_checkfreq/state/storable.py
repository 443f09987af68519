"""Whether a state could be saved, and restored; what cannot is named by its whole inner key."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dcp_checkfreq.format.value_checks import ValueChecks, serialised
from dcp_checkfreq.shards.codec import check_storable, is_sharded_tensor, local_of
from dcp_checkfreq.state.packed import TENSORS, TREE, is_packed, unpack

_WHERE = "the state"


def check_leaves(key: str, value: Any, *, allow_pickle: bool) -> None:
    """Look at all leaves of a state, where DCP looks for them.

    Raises:
        UnsupportedState: of the first that cannot be saved or could not be restored, by its key.
    """
    if is_packed(value):
        raw = unpack(value)
        for inner_key, inner in _inside(key, raw):
            if isinstance(inner, torch.Tensor):
                _check_tensor(inner_key, inner)
        _check_value(key, value[TREE][0] if value[TENSORS] else raw, allow_pickle=allow_pickle)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            check_leaves(f"{key}.{name}", inner, allow_pickle=allow_pickle)
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            check_leaves(f"{key}.{number}", inner, allow_pickle=allow_pickle)
    elif isinstance(value, torch.Tensor):
        _check_tensor(key, value)
    else:
        _check_value(key, value, allow_pickle=allow_pickle)


def _check_tensor(key: str, tensor: torch.Tensor) -> None:
    if not is_sharded_tensor(tensor):
        check_storable(local_of(tensor), key)


def _check_value(key: str, value: object, *, allow_pickle: bool) -> None:
    stream = serialised(value, key)
    if not allow_pickle:
        ValueChecks().check(key, stream, _WHERE, functools.partial(_same, value))


def _same(value: object) -> object:
    return value


def _inside(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the leaves of the containers that `pack` looks into."""
    if type(value) is dict:
        for name, inner in value.items():
            yield from _inside(f"{key}.{name}", inner)
    elif type(value) in (list, tuple):
        assert isinstance(value, (list, tuple))
        for number, inner in enumerate(value):
            yield from _inside(f"{key}.{number}", inner)
    else:
        yield key, value
