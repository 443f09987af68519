"""Values as DCP keeps them best: one byte item that is as it was, with large tensors beside it.

DCP takes dicts and lists apart, turns all keys into text and forgets tuples. What is in a tuple is
left alone, and so a packed value keeps key types, tuples and counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from dcp_checkfreq.shards.self_described import describes_itself
from dcp_checkfreq.state.wrappers import is_taken_apart, stored

TREE, TENSORS = "tree", "tensors"
_SLOT = "__dcp_checkfreq_tensor__"
# Makes a tensor of what `wrappers.stored` has made of one.
Make = Callable[[Mapping[str, Any]], Any]
# Smaller tensors stay in the byte item: a file place of their own would cost more than they hold.
_OWN_ITEM_FROM_BYTES = 16 << 10


def pack(value: object) -> dict[str, Any]:
    """Return ``{"tree": (value without its large tensors,), "tensors": [those]}``."""
    tensors: list[torch.Tensor] = []
    return {TREE: (_take_out(value, tensors),), TENSORS: tensors}


def _left_apart(parts: Mapping[str, Any]) -> Any:
    return parts


def unpack(packed: Mapping[str, Any], make: Make = _left_apart) -> Any:
    """Return the value of which `pack` made ``packed``.

    Args:
        packed: what it made.
        make: puts wrappers together; default: they stay dicts of their inner tensors.
    """
    return _put_back(packed[TREE][0], packed[TENSORS], make)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, where `pack` looks for them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) is dict:
        for inner in value.values():
            yield from tensors_in(inner)
    elif type(value) in (list, tuple):
        assert isinstance(value, (list, tuple))
        for inner in value:
            yield from tensors_in(inner)


def is_packed(value: object) -> bool:
    """Tell whether `pack` has made a value. Dicts of users are packed, so they do not look so."""
    if type(value) is not dict or set(value) != {TREE, TENSORS}:
        return False
    return type(value[TREE]) is tuple and len(value[TREE]) == 1 and type(value[TENSORS]) is list


def _take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if _fits_into_tree(value):
            return value
        value = stored(value)
        if is_taken_apart(value):
            return _take_out(value, tensors)
        tensors.append(value)
        return (_SLOT, len(tensors) - 1)
    # Only exact types can be rebuilt from their items; others (Counter, ...) stay as they are.
    if type(value) is dict:
        return {key: _take_out(inner, tensors) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take_out(inner, tensors) for inner in value)
    return value


def _fits_into_tree(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is small and plain; any other is looked at as an item of its own."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
        and tensor.nbytes < _OWN_ITEM_FROM_BYTES
        and not describes_itself(tensor)
    )


def _put_back(value: Any, tensors: list[torch.Tensor], make: Make) -> Any:
    if type(value) is tuple and len(value) == 2 and value[0] == _SLOT:
        return tensors[value[1]]
    if type(value) is dict:
        found = {key: _put_back(inner, tensors, make) for key, inner in value.items()}
        return make(found) if is_taken_apart(found) else found
    if type(value) in (list, tuple):
        return type(value)(_put_back(inner, tensors, make) for inner in value)
    return value
