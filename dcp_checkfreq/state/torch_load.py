"""What torch's `Optimizer.load_state_dict` changes in the state that it is given, and the cure.

It makes every iterable anew out of its items, to move tensors in it: of a text, an array or a named
tuple that is another value, or an error. Such values are kept from it. It also casts tensors to
the dtype of their parameter. What it has changed is put right afterwards.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from dcp_checkfreq.state.held_optimizers import initialised_in
from dcp_checkfreq.state.sharded_state import same
from dcp_checkfreq.state.tree import with_tensors
from dcp_checkfreq.state.wrappers import holds_wrapper

_STATE = "state"


def survives(value: Any) -> bool:
    """Tell whether torch hands a value of an optimizer's state on as it is."""
    if isinstance(value, torch.Tensor):
        return True
    if type(value) is dict:
        return all(map(survives, value.values()))
    if type(value) in (list, tuple):
        return all(map(survives, value))
    return not isinstance(value, Iterable)


@contextlib.contextmanager
def kept_from_torch(optimizer: Optimizer) -> Iterator[None]:
    """Show torch None in the place of each value that it would break; `put_right` puts them back.

    Code of the user that runs before torch's sees the values.
    """
    with contextlib.ExitStack() as hooks:
        for one in initialised_in(optimizer):
            hooks.callback(one.register_load_state_dict_pre_hook(_without).remove)
        yield


def _without(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {
        key: {name: value if survives(value) else None for name, value in one.items()}
        if type(one) is dict
        else one
        for key, one in state_dict[_STATE].items()
    }
    return {**state_dict, _STATE: state}


def put_right(live: Any, loaded: Any, parameter: torch.Tensor) -> list[str]:
    """Undo what torch has changed in the live state of a parameter; return what is still wrong."""
    if not isinstance(loaded, dict):
        return [] if _is_as_loaded(live, loaded) else ["state"]
    if not isinstance(live, dict):
        return list(map(str, loaded))
    wrong = []
    for key, value in loaded.items():
        if _is_as_loaded(live.get(key), value):
            continue
        if isinstance(value, torch.Tensor) and isinstance(live.get(key), torch.Tensor):
            live[key] = value if holds_wrapper(value) else value.to(live[key].device)
        elif isinstance(value, (dict, list, tuple)) or not survives(value):
            live[key] = with_tensors(value, functools.partial(_moved, device=parameter.device))
        else:
            wrong.append(str(key))
    return wrong


def _is_as_loaded(live: Any, loaded: Any) -> bool:
    if isinstance(loaded, torch.Tensor):
        return isinstance(live, torch.Tensor) and same(live, loaded)
    if type(live) is not type(loaded):
        return False
    if isinstance(loaded, Mapping):
        return list(live) == list(loaded) and all(
            _is_as_loaded(live[key], loaded[key]) for key in loaded
        )
    if isinstance(loaded, (list, tuple)):
        return len(live) == len(loaded) and all(map(_is_as_loaded, live, loaded))
    return survives(loaded)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if tensor.device == device else tensor.to(device)
