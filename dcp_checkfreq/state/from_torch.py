"""What torch's `Optimizer.load_state_dict` would break is kept from it.

It makes every iterable anew out of its items, to move tensors in it: of a text, an array or a named
tuple that is another value, or an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from dcp_checkfreq.state.held_optimizers import initialised_in

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
    """Let torch see None in the place of what it would break; the values have to be put back.

    Code of the user's that runs before torch's, and calls it, sees the values.
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
