"""An optimizer that is being restored: groups are found, state is put in place as it was saved."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dcp_checkfreq.errors import StateMismatch
from dcp_checkfreq.format.torch_private import load_hooks_of
from dcp_checkfreq.state.differences import Differences, listed
from dcp_checkfreq.state.names import without_wrappers
from dcp_checkfreq.state.packed import is_packed
from dcp_checkfreq.state.part import Undo, is_trusted
from dcp_checkfreq.state.saved import Leaf, Lookup, Path, Renames, SavedState
from dcp_checkfreq.state.sharded_state import (
    LAYOUTS,
    StateWrapper,
    same,
    sharded_as_said,
    without_wrapper_tensors,
)
from dcp_checkfreq.state.torch_load import kept_from_torch, put_right
from dcp_checkfreq.state.tree import nested
from dcp_checkfreq.state.unpacked import Make, unpack
from dcp_checkfreq.state.wanted import Wanted, WantedTensor, WantedValue
from dcp_checkfreq.state.wrapper_record import RECORD

if TYPE_CHECKING:
    from dcp_checkfreq.state.optimizer_part import OptimizerPart

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
OF_NO_PARAMETER = "state_of_no_parameter"  # state that is not under the name of a parameter
_PARAM_NAMES = "param_names"  # the names that torch was given for them, if any

# A loaded leaf of the state of one parameter: its path below the parameter.
_Leaves = list[tuple[Path, WantedTensor | WantedValue]]


class OptimizerFill:
    """An optimizer that is being restored."""

    def __init__(
        self, part: OptimizerPart, saved: SavedState, renames: Renames, wanted: Wanted
    ) -> None:
        self._part, self._where = part, saved.where
        self.differences = Differences()
        self.claimed: set[str] = set()
        self._saved_part, _ = renames.saved_name(part.name)
        self._renames = renames
        fqns = part.fqns()
        self._names = [fqns[id(one)] for one in part.parameters()]
        lookup = Lookup(_with_paths(saved, part.name, renames, self._names), renames, (STATE,))
        self._state: dict[str, _Leaves] = {}
        self._wrappers: dict[str, dict[str, StateWrapper]] = {}  # by FQN and name
        self._made: dict[str, Any] = {}  # state, by FQN
        self._local_names = [fqns[id(one)] for one in part.local_parameters()]
        for parameter, fqn in zip(part.local_parameters(), self._local_names, strict=True):
            leaves = lookup.claim(part.name, fqn)
            if leaves:
                self.claimed.update(leaf.key for leaf in leaves)
                live = part.local.state.get(parameter)
                self._wrappers[fqn] = _wrappers_in(leaves, live, parameter, wanted)
                self._state[fqn] = [
                    (leaf.path[2:], self._want(leaf, parameter, live, wanted))
                    for leaf in leaves
                    if str(leaf.path[2:3] and leaf.path[2]) not in self._wrappers[fqn]
                ]
        self._others: _Leaves = []
        self._groups: _Leaves = []
        for leaf in saved.parts.get(self._saved_part, ()):
            if leaf.path[:1] == (GROUPS,):
                self._groups.append((leaf.path[1:], wanted.either(leaf)))
            elif leaf.path[:1] != (STATE,):
                self._others.append((leaf.path, wanted.either(leaf)))
        self._unclaimed = [leaf for leaf in lookup.unclaimed() if len(leaf.path) > 1]
        self._options: list[dict[str, Any]] = []  # of the live groups, as they were saved

    def _want(
        self, leaf: Leaf, parameter: torch.Tensor, live: Any, wanted: Wanted
    ) -> WantedTensor | WantedValue:
        if not leaf.is_tensor:
            return wanted.value(leaf)
        kept: Any = leaf.kept
        likes = [live.get(leaf.path[2])] if isinstance(live, Mapping) and len(leaf.path) > 2 else []
        like = next((one for one in (*likes, parameter) if _is_sharded_as(one, kept.size)), None)
        return wanted.tensor(leaf, like)

    # --- after loading ---

    def check(self) -> None:
        """Find the saved group of each live one; may add to the differences.

        Raises:
            StateMismatch: the checkpoint has no groups.
        """
        groups = nested(self._loaded(self._groups))
        if not isinstance(groups, list) or not all(map(_is_group, groups)):
            raise StateMismatch(
                self._where, f"{self._part.name!r} was not saved as an optimizer: it has no groups"
            )
        self._kinds = self._part.kinds(live=True)
        by_name = dict(zip(self._local_names, self._part.local_parameters(), strict=True))
        self._made = {name: self._state_of(name, by_name[name]) for name in self._state}
        group_of, unknown = self._saved_groups(groups)
        name, found = self._part.name, self.differences
        found.missing += [f"{name}: {one}" for one in self._names if one not in group_of]
        gone = [leaf for leaf in self._unclaimed if leaf.path[1] in unknown]
        found.unexpected += [leaf.key for leaf in gone]
        with_state = {leaf.path[1] for leaf in gone}
        found.unexpected += [
            f"{self._saved_part}: {one}" for one in unknown if one not in with_state
        ]
        fqns = self._part.fqns()
        empty = [self._options_of(group) for group in groups if not group[PARAMS]]
        for number, live in enumerate(self._part.optimizer.param_groups):
            names = [fqns[id(one)] for one in live[PARAMS]]
            numbers = sorted({group_of[one] for one in names if one in group_of})
            options = [self._options_of(groups[one]) for one in numbers] or empty[:1]
            if not names:
                del empty[:1]
            elif any(not _is_equal_dict(one, options[0]) for one in options[1:]):
                found.unexpected.append(
                    f"{name}: what is group {number} now was saved as groups "
                    f"{', '.join(map(str, numbers))}, with other options"
                )
                options = []
            self._options.append(options[0] if options else {})

    def _options_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        options: dict[str, Any] = self._unpacked(dict(group), self._part.name)
        return {key: one for key, one in options.items() if key not in (PARAMS, _PARAM_NAMES)}

    def _saved_groups(self, groups: list[dict[str, Any]]) -> tuple[dict[str, int], list[str]]:
        """Return the number of the group that a parameter here was saved in, and unknown names."""
        part = self._part.name
        exact = {self._renames.saved_name(f"{part}.{one}")[1]: one for one in self._names}
        bare = {without_wrappers(name): here for name, here in exact.items()}
        group_of: dict[str, int] = {}
        unknown: list[str] = []
        for number, group in enumerate(groups):
            for name in group[PARAMS]:
                here = exact.get(name, bare.get(without_wrappers(name)))
                if here is None:
                    unknown.append(name)
                else:
                    group_of[here] = number
                    self.claimed.add(f"{self._saved_part}: {name}")
        return group_of, unknown

    def _loaded(self, leaves: _Leaves) -> list[tuple[Path, Any]]:
        return [
            (path, one.value if isinstance(one, WantedValue) else one.made())
            for path, one in leaves
        ]

    @property
    def may_fail(self) -> bool:
        """Whether code of the user runs."""
        optimizer = self._part.local
        code = [type(optimizer).load_state_dict, type(optimizer).__setstate__]
        return any(not is_trusted(one) for one in (*code, *load_hooks_of(optimizer)))

    def keep(self) -> Undo:
        """Keep what is there now; a load puts other objects in its place."""
        kept = [_kept_of(one) for one in (self._part.local, self._part.optimizer)]

        def undo() -> None:
            for one in kept:
                one()

        return undo

    @torch.no_grad()
    def put(self) -> None:
        """Load the state dict into the optimizer, and undo the casts of torch."""
        part, local = self._part, self._part.local
        own = local.state_dict()
        numbers = [number for group in own[GROUPS] for number in group[PARAMS]]
        by_name = dict(zip(self._local_names, numbers, strict=True))
        others = self._unpacked(nested(self._loaded(self._others)), part.name)
        # What is there now stays of parameters that were not saved.
        missing = {one.partition(": ")[2] for one in self.differences.missing}
        loaded = self._made | {
            name: copy.copy(local.state[parameter])
            for name, parameter in zip(self._local_names, part.local_parameters(), strict=True)
            if name in missing and parameter in local.state
        }
        state: dict[Any, Any] = {
            by_name[name]: without_wrapper_tensors(one) for name, one in loaded.items()
        }
        state |= others.pop(OF_NO_PARAMETER, {})
        groups = [
            {**live, **options, PARAMS: live[PARAMS]}
            for live, options in zip(own[GROUPS], self._options, strict=True)
        ]
        with kept_from_torch(local):
            local.load_state_dict({**own, **others, STATE: state, GROUPS: groups})
        if local is not part.optimizer:
            for live, options in zip(part.optimizer.param_groups, self._options, strict=True):
                live.update(options)
        wrong = []
        for parameter, name in zip(part.local_parameters(), self._local_names, strict=True):
            if name in loaded:
                now = local.state.get(parameter)
                wrong += [f"{name}.{path}" for path in put_right(now, loaded[name], parameter)]
        if wrong:
            raise StateMismatch(
                self._where,
                f"{part.name!r}: after `load_state_dict` these are not what was saved: "
                f"{listed(wrong)}. The optimizer, or a hook, changes them",
            )

    def _state_of(self, name: str, parameter: torch.Tensor) -> Any:
        key = f"{self._part.name}.{STATE}.{name}"
        state = self._unpacked(nested(self._loaded(self._state[name])), key)
        if isinstance(state, dict):
            state = sharded_as_said(state, state.pop(LAYOUTS, ()), parameter)
            for one, wrapper in self._wrappers[name].items():
                state[one] = wrapper.made(self._kinds, self._where, f"{key}.{one}")
        return state

    def _unpacked(self, value: Any, key: str) -> Any:
        return _unpacked(value, functools.partial(self._kinds.made, where=self._where, key=key))


def _kept_of(optimizer: Optimizer) -> Undo:
    state = {
        key: dict(one) if isinstance(one, dict) else one for key, one in optimizer.state.items()
    }
    groups = [dict(group) for group in optimizer.param_groups]

    def undo() -> None:
        optimizer.state.clear()
        optimizer.state.update(state)
        for live, group in zip(optimizer.param_groups, groups, strict=True):
            live.clear()
            live.update(group)

    return undo


def _wrappers_in(
    leaves: list[Leaf], live: Any, parameter: torch.Tensor, wanted: Wanted
) -> dict[str, StateWrapper]:
    """Return the wrappers among the saved state of a parameter, by name."""
    names = [str(leaf.path[2]) for leaf in leaves if leaf.path[3:] == (RECORD,)]
    return {
        name: StateWrapper(
            [leaf for leaf in leaves if len(leaf.path) > 2 and str(leaf.path[2]) == name],
            live.get(name) if isinstance(live, Mapping) else None,
            parameter,
            wanted,
        )
        for name in names
    }


def _unpacked(value: Any, make: Make) -> Any:
    if is_packed(value):
        return unpack(value, make)
    if isinstance(value, dict):
        return {key: unpack(one, make) if is_packed(one) else one for key, one in value.items()}
    return value


def _is_group(group: object) -> bool:
    return isinstance(group, dict) and isinstance(group.get(PARAMS), list)


def _is_equal_dict(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return set(one) == set(other) and all(_is_equal(one[key], other[key]) for key in one)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same(one, other)
    return type(one) is type(other) and bool(one == other)


def _is_sharded_as(tensor: object, size: torch.Size) -> bool:
    return isinstance(tensor, DTensor) and tensor.shape == size


def _with_paths(saved: SavedState, part: str, renames: Renames, names: Sequence[str]) -> SavedState:
    """Return a checkpoint whose planner has noted no paths with those of an optimizer's state."""
    saved_part, _ = renames.saved_name(part)
    leaves = saved.parts.get(saved_part, [])
    first = f"{STATE}."
    if not any(len(leaf.path) == 1 and str(leaf.path[0]).startswith(first) for leaf in leaves):
        return saved
    known = sorted(
        (renames.saved_name(f"{part}.{name}")[1] for name in names), key=len, reverse=True
    )
    found = []
    for leaf in leaves:
        rest = str(leaf.path[0]).removeprefix(first)
        fqn = next((one for one in known if rest.startswith(f"{one}.")), None)
        if len(leaf.path) == 1 and fqn is not None:
            leaf = Leaf(leaf.key, (STATE, fqn, rest[len(fqn) + 1 :]), leaf.kept)
        found.append(leaf)
    return saved.with_leaves(saved_part, found)
