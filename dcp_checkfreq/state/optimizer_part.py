"""An optimizer as a part: its state dict, with FQNs in the place of numbers.

The names of parameters are those that the registered modules give them. State is read and put back
without a `step`: an optimizer that was never stepped has none, and is saved so.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_checkfreq.errors import UnsupportedState
from dcp_checkfreq.state.differences import Differences
from dcp_checkfreq.state.names import fqn_of, why_nameless
from dcp_checkfreq.state.optimizer_fill import GROUPS, OF_NO_PARAMETER, PARAMS, STATE, OptimizerFill
from dcp_checkfreq.state.packed import TREE, pack, pack_if_needed, tensors_in
from dcp_checkfreq.state.saved import Renames, SavedState
from dcp_checkfreq.state.sharded_state import (
    LAYOUTS,
    layouts_of,
    record_keys,
)
from dcp_checkfreq.state.tensor_kinds import is_in_order, is_odd
from dcp_checkfreq.state.value_part import AbsentFill, ValueFill, ValuePart
from dcp_checkfreq.state.wanted import Wanted
from dcp_checkfreq.state.wrapper_kinds import Kinds
from dcp_checkfreq.state.wrappers import is_usual_shard, stored


class OptimizerPart:
    """A registered optimizer.

    Args:
        name: of the part.
        optimizer: whose state is meant.
        modules: the registered ones, by name.

    Raises:
        UnsupportedState: its state cannot be saved, and never will be.
    """

    def __init__(
        self, name: str, optimizer: Optimizer, modules: Mapping[str, torch.nn.Module]
    ) -> None:
        self.name = name
        self.optimizer = optimizer
        self._modules = modules
        self._learned_from: object = None
        self._fqns: dict[int, str] = {}  # by identity of the parameter
        self._no_replicas: dict[str, str] = {}
        self._of_all_ranks: list[list[str]] = []  # FQNs in each group, if ranks hold others
        self._is_zero = hasattr(optimizer, "consolidate_state_dict")
        if self._is_zero and not isinstance(getattr(optimizer, "optim", None), Optimizer):
            raise UnsupportedState(
                name,
                type(optimizer).__name__,
                "it makes its local optimizer later. Make it without overlap_with_ddp",
            )
        self.fqns()

    @property
    def local(self) -> Optimizer:
        """The optimizer that has the state on this rank: of `ZeroRedundancyOptimizer`, its own."""
        one: Any = self.optimizer
        local: Optimizer = one.optim if self._is_zero else one
        return local

    def parameters(self) -> list[torch.Tensor]:
        """Return its parameters, in order."""
        return [one for group in self.optimizer.param_groups for one in group[PARAMS]]

    def local_parameters(self) -> list[torch.Tensor]:
        """Return those of which this rank has the state, in order."""
        return [one for group in self.local.param_groups for one in group[PARAMS]]

    def fqns(self) -> dict[int, str]:
        """Return the FQN of each parameter, by identity.

        Raises:
            UnsupportedState: one of them is in none of the registered modules.
        """
        mine = list(map(id, self.parameters()))
        names = [
            (part, name, id(one))
            for part, module in self._modules.items()
            for name, one in module.named_parameters()
        ]
        kinds = [list(map(type, one.modules())) for one in self._modules.values()]
        learned_from = mine, names, kinds
        if learned_from != self._learned_from:
            self._fqns = self._looked_up(set(mine), names)
            self._learned_from = learned_from
        return self._fqns

    def _looked_up(self, mine: set[int], names: Sequence[tuple[str, str, int]]) -> dict[int, str]:
        """Name all parameters after one module if it has them all, else after those that do."""
        held = {part: {one for p, _, one in names if p == part} for part in self._modules}
        whole = next((part for part in held if mine <= held[part]), None)
        found: dict[int, str] = {}
        for part, name, one in names:
            if one in mine and one not in found and whole in (None, part):
                fqn = fqn_of(self._modules[part], name)
                found[one] = fqn if whole is not None else f"{part}.{fqn}"
        if mine - set(found):
            why = why_nameless(self.parameters(), found, self._modules)
            raise UnsupportedState(self.name, type(self.optimizer).__name__, why)
        return found

    def group_names(self) -> list[list[str]]:
        """Return the FQNs in each group."""
        return self._grouped(self.fqns())

    def _grouped(self, fqns: Mapping[int, str]) -> list[list[str]]:
        return [[fqns[id(one)] for one in group[PARAMS]] for group in self.optimizer.param_groups]

    def share_groups(self, of_all_ranks: list[list[str]]) -> None:
        """Take the FQNs of all ranks in each group: each stage of a pipeline has its own."""
        self._of_all_ranks = of_all_ranks

    def _params(self, number: int, names: list[str]) -> list[str]:
        """Return the FQNs to save for a group: those of all ranks, as long as they are known."""
        known = self._of_all_ranks[number] if number < len(self._of_all_ranks) else []
        return known if set(names) <= set(known) else names

    @torch.no_grad()
    def capture(self) -> dict[str, Any]:
        """Return the state dict under FQNs. Tensors are the live ones."""
        own = self.local.state_dict()
        try:
            state, groups = own[STATE], own[GROUPS]
            numbers = [number for group in groups for number in group[PARAMS]]
        except (KeyError, TypeError) as error:
            if any(isinstance(one, DTensor) for one in self.parameters()):
                raise UnsupportedState(
                    self.name,
                    type(self.optimizer).__name__,
                    "its state dict has no 'state' and 'param_groups' as torch's optimizers have, "
                    "so what belongs to which sharded parameter is not known",
                ) from error
            return pack(own)
        fqns = self.fqns()
        parameters = self.local_parameters()
        names = [fqns[id(one)] for one in parameters]
        by_number = dict(zip(numbers, names, strict=True))
        of_number = dict(zip(numbers, parameters, strict=True))
        others = {key: value for key, value in own.items() if key not in (STATE, GROUPS)}
        of_no_parameter = {key: one for key, one in state.items() if key not in by_number}
        if of_no_parameter:
            others[OF_NO_PARAMETER] = of_no_parameter
        if self._is_zero:  # whose groups have the options that count, and all parameters
            groups = self.optimizer.param_groups
        return {
            STATE: {
                by_number[key]: self._kept(one, of_number[key], f"{STATE}.{by_number[key]}")
                for key, one in state.items()
                if key in by_number
            },
            GROUPS: [
                {key: _option(key, value) for key, value in group.items()}
                | {PARAMS: self._params(number, of_group)}
                for number, (group, of_group) in enumerate(
                    zip(groups, self._grouped(fqns), strict=True)
                )
            ],
            **{key: pack(value) for key, value in others.items()},
        }

    def _kept(self, state: Any, parameter: torch.Tensor | None, name: str) -> Any:
        """Return the state of one parameter. Values that DCP would take apart are packed."""
        if not isinstance(state, dict) or not state:  # of an empty one DCP would keep nothing
            return pack(state)
        kept = state
        # Most often there are none, and there may be very many parameters.
        if odd := [key for key, value in state.items() if not _is_usual(value)]:
            kept = dict(state)
            for key in odd:
                value = state[key]
                is_for_dcp = isinstance(value, torch.Tensor) and not is_odd(value)
                kept[key] = (
                    stored(value, f"{self.name}.{name}.{key}")
                    if is_for_dcp
                    else pack_if_needed(value)
                )
        if isinstance(parameter, DTensor):
            if kept is not state:
                keys = record_keys(name, state, kept)
                self._no_replicas.update((key, key) for key in keys)
            said = layouts_of(state, parameter)
            if said:
                kept = kept | {LAYOUTS: said}
        return kept

    @property
    def no_replicas(self) -> Mapping[str, str]:
        """Keys of what may differ between ranks; see `ModulePart.no_replicas`."""
        return self._no_replicas

    def kinds(self, *, live: bool = False) -> Kinds:
        """Return the classes that its wrapper subclasses may be made of.

        Args:
            live: those of its state now, too. A fresh optimizer has none.
        """
        state = (tensors_in(one) for one in self.local.state.values()) if live else ()
        return Kinds([*self.parameters(), *itertools.chain.from_iterable(state)])

    def is_empty(self) -> bool:
        """Tell whether there is nothing to save: never, groups have options."""
        return False

    def describe(self) -> list[object]:
        """Return its kind, and the switches of its groups."""
        groups = [
            # Values such as the learning rate change in a run; whether they are zero decides what
            # state there is.
            [len(group[PARAMS])]
            + [
                [key, bool(value)]
                for key, value in sorted(group.items())
                if isinstance(value, (bool, int, float))
            ]
            for group in self.optimizer.param_groups
        ]
        return ["optimizer", type(self.optimizer).__qualname__, *groups]

    def fill(
        self, saved: SavedState, renames: Renames, wanted: Wanted
    ) -> tuple[OptimizerFill | ValueFill | AbsentFill, Differences]:
        """See `Part.fill`."""
        saved_part, _ = renames.saved_name(self.name)
        if any(leaf.path[:1] == (TREE,) for leaf in saved.parts.get(saved_part, ())):
            return ValuePart(self.name, {self.name: self.optimizer}, 0).fill(saved, renames, wanted)
        fill = OptimizerFill(self, saved, renames, wanted)
        return fill, fill.differences


def _is_usual(value: Any) -> bool:
    """Tell whether DCP keeps a value of a parameter's state as it is."""
    if type(value) is torch.Tensor:
        return is_in_order(value)
    return is_usual_shard(value)


def _option(key: str, value: Any) -> Any:
    return value if key == PARAMS else pack_if_needed(value)
