"""State dicts under torch's fully qualified names (FQNs), which are looked up once.

`get_model_state_dict` and `get_optimizer_state_dict` find the FQN of every parameter by a walk
through the modules, at every call: 30 us a tensor, which is the larger part of what a save costs
the training loop. Of a plain, DDP, compiled or FSDP2 job they only rename the keys of what
`state_dict()` returns. So the first time both are called and compared, and then the keys are
renamed by what was learned, for as long as all that names depend on is the same. Where torch does
more than rename (FSDP1, hooks that make new tensors), torch goes on to be asked every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from dcp_checkfreq.shards.codec import local_of, memory_of

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"


class NamedModule:
    """A module whose `state_dict` is wanted under FQNs."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._learned_from: object = None
        self._new_names: list[tuple[str, str]] = []  # key and FQN, where they differ
        self._may_learn = True

    @torch.no_grad()
    def capture(self) -> dict[str, Any]:
        """Return what `get_model_state_dict` would. Tensors are the live ones, detached."""
        if self._learned_from is not None:
            own: dict[str, Any] = self.module.state_dict()
            if self._learned_from == self._names_depend_on(own):
                return self._rename(own)
            self._learned_from = None
        asked: dict[str, Any] = get_model_state_dict(self.module)
        if self._may_learn:
            self._may_learn = self._learn(asked)
        return asked

    def _names_depend_on(self, own: Mapping[str, Any]) -> object:
        return list(own), _kinds(self.module)

    def _rename(self, own: dict[str, Any]) -> dict[str, Any]:
        """Rename in place, as torch does: what hangs on the dict (versions of modules) stays."""
        for key, fqn in self._new_names:
            own[fqn] = own.pop(key)
        return own

    def _learn(self, asked: Mapping[str, Any]) -> bool:
        if _is_fsdp1(self.module):
            return False
        own = self.module.state_dict()
        learned_from = self._names_depend_on(own)
        gone = [key for key in own if key not in asked]
        came = [fqn for fqn in asked if fqn not in own]
        if len(gone) != len(came):
            return False
        self._new_names = list(zip(gone, came, strict=True))
        if not is_alike(self._rename(own), asked):
            return False
        self._learned_from = learned_from
        return True


class NamedOptimizer:
    """An optimizer whose `state_dict` is wanted under FQNs.

    Args:
        owner: the module that holds its parameters.
        optimizer: whose state is meant.
    """

    def __init__(self, owner: torch.nn.Module, optimizer: Optimizer) -> None:
        self.owner = owner
        self.optimizer = optimizer
        self._fqns: list[str] = []  # in the order of the optimizer's parameters
        self._learned_from: object = None
        self._may_learn = True

    @torch.no_grad()
    def capture(self) -> dict[str, Any]:
        """Return what `get_optimizer_state_dict` would, which makes state where there is none."""
        if self._fqns and self.optimizer.state and self._learned_from == self._names_depend_on():
            own = self._renamed(self.optimizer.state_dict())
            if own is not None:
                return own
        self._fqns = []
        asked: dict[str, Any] = dict(get_optimizer_state_dict(self.owner, self.optimizer))
        if self._may_learn and self.optimizer.state:
            self._may_learn = self._learn(asked)
        return asked

    def _names_depend_on(self) -> object:
        """Return which parameters the optimizer has, in order, and what the owner calls its own."""
        mine = [id(p) for group in self.optimizer.param_groups for p in group[_PARAMS]]
        names = [(name, id(p)) for name, p in self.owner.named_parameters()]
        return mine, names, _kinds(self.owner)

    def _learn(self, asked: Mapping[str, Any]) -> bool:
        if _is_fsdp1(self.owner):
            return False
        self._fqns = [fqn for group in asked[_GROUPS] for fqn in group[_PARAMS]]
        own = self._renamed(self.optimizer.state_dict())
        if own is None or not is_alike(own, asked):
            self._fqns = []
            return False
        self._learned_from = self._names_depend_on()
        return True

    def _renamed(self, own: Mapping[str, Any]) -> dict[str, Any] | None:
        """Put FQNs in the place of the numbers of an optimizer's own state dict."""
        fqns = self._fqns
        try:
            return {
                _STATE: {fqns[number]: state for number, state in own[_STATE].items()},
                _GROUPS: [
                    group | {_PARAMS: [fqns[number] for number in group[_PARAMS]]}
                    for group in own[_GROUPS]
                ],
            }
        except (IndexError, TypeError, KeyError):
            return None  # not an optimizer's usual state dict: torch says what it makes of it


def is_alike(one: object, other: object) -> bool:
    """Tell whether two state dicts hold the same tensors in the same places.

    Of other values only the type is compared: they may be made anew each time.
    """
    if type(one) is not type(other) and not (
        isinstance(one, Mapping) and isinstance(other, Mapping)
    ):
        return False
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _memory(one) == _memory(other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(is_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_alike, one, other))
    return True


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    try:
        return tensor.shape, *memory_of(local_of(tensor))
    except RuntimeError:  # sparse, or a subclass without memory of its own
        return (id(tensor),)


def _kinds(module: torch.nn.Module) -> list[type]:
    """Return the types of all modules: wrappers (DDP, compiled) do not count in names."""
    return list(map(type, module.modules()))


def _is_fsdp1(module: torch.nn.Module) -> bool:
    """Tell whether `state_dict()` would gather whole parameters from all ranks."""
    return any(isinstance(one, FullyShardedDataParallel) for one in module.modules())
