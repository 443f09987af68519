"""Nested dicts and lists, put together from the paths of their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from dcp_checkfreq.state.saved import Path
from dcp_checkfreq.state.wanted import AnyWanted, loaded

_NOTHING = object()


def tree_of(leaves: Iterable[tuple[Path, AnyWanted]]) -> Any:
    """Return what was loaded, nested as its paths say. Numbers in a path are places in a list."""
    return nested((path, loaded(one)) for path, one in leaves)


def nested(leaves: Iterable[tuple[Path, Any]]) -> Any:
    """Return values nested as their paths say; the value itself, if its path is empty."""
    root: Any = _NOTHING
    for path, value in leaves:
        if not path:
            return value
        if root is _NOTHING:
            root = {}
        at = root
        for step in path[:-1]:
            at = at.setdefault(step, {})
        at[path[-1]] = value
    return {} if root is _NOTHING else _with_lists(root)


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return nested dicts, lists and tuples with their tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: with_tensors(inner, change) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_tensors(inner, change) for inner in value)
    return value


def _with_lists(value: Any) -> Any:
    if type(value) is not dict:
        return value
    if value and all(isinstance(key, int) for key in value):
        return [_with_lists(value[key]) for key in sorted(value)]
    return {key: _with_lists(inner) for key, inner in value.items()}
