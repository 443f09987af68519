"""A module that is being restored: all of it is loaded, then its own `load_state_dict` takes it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from dcp_checkfreq.errors import StateMismatch
from dcp_checkfreq.format.torch_private import load_hooks_of
from dcp_checkfreq.shards.codec import cloned, is_same
from dcp_checkfreq.shards.self_described import describes_itself, size_in_checkpoint
from dcp_checkfreq.state.differences import Differences, listed, shapes_differ
from dcp_checkfreq.state.module_tensors import (
    AbsentBuffer,
    copy_into_expanded,
    fits_expanded,
    is_expanded,
    is_odd_tensor,
    may_change_shapes,
    tensors_of,
)
from dcp_checkfreq.state.names import fqn_of
from dcp_checkfreq.state.odd_fill import OddFill, copy_odd, is_without_size
from dcp_checkfreq.state.packed import is_packed, tensors_in
from dcp_checkfreq.state.part import Undo, is_trusted
from dcp_checkfreq.state.saved import Leaf
from dcp_checkfreq.state.tree import tree_of
from dcp_checkfreq.state.unpacked import Make, unpack
from dcp_checkfreq.state.wanted import Wanted, WantedShards, WantedTensor, WantedValue
from dcp_checkfreq.state.wrapper_fill import WrapperFill
from dcp_checkfreq.state.wrapper_kinds import Kinds
from dcp_checkfreq.state.wrapper_record import RECORD
from dcp_checkfreq.state.wrappers import holds_wrapper, live_parts

_EXTRA_STATE = "_extra_state"


class ModuleFill:
    """A module that is being restored.

    Args:
        name: of the part.
        module: to restore.
        own: its state dict.
        where: the checkpoint is.
    """

    def __init__(self, name: str, module: nn.Module, own: dict[str, Any], where: str) -> None:
        self._name, self._module, self._own, self._where = name, module, own, where
        self.differences = Differences()
        self.claimed: set[str] = set()
        self._fqns: dict[str, str] = {}  # of the keys that are loaded, by key
        self._cast: set[str] = set()
        self._tensors: dict[str, WantedTensor] = {}
        self._shards: dict[str, WantedShards] = {}
        self._values: dict[str, list[tuple[Leaf, WantedTensor | WantedValue]]] = {}
        self._reshaped: dict[str, str] = {}  # what would be said of it, if its module cannot do so
        self._absent: dict[str, AbsentBuffer] = {}
        self._wrappers: dict[str, WrapperFill] = {}
        self._odd: dict[str, OddFill] = {}
        self._kinds: Kinds | None = None  # what wrappers in its extra state may be made of

    def want_buffer(
        self, key: str, fqn: str, buffer: AbsentBuffer, leaves: list[Leaf], wanted: Wanted
    ) -> list[str]:
        """Ask for a buffer that is None now; return what does not fit."""
        name = f"{self._name}.{fqn}"
        (leaf,) = leaves if len(leaves) == 1 else (None,)
        if leaf is not None and leaf.is_tensor and len(leaf.path) == 1:
            self._tensors[key] = wanted.tensor(leaf)
        elif OddFill.is_saved(leaves):
            self._odd[key] = OddFill(name, None, leaves, wanted)
        else:
            return [f"{name} is a buffer, and was not saved as a tensor"]
        self._fqns[key], self._absent[key] = fqn, buffer
        self.claimed.update(one.key for one in leaves)
        return []

    def want(self, key: str, fqn: str, live: Any, leaves: list[Leaf], wanted: Wanted) -> list[str]:
        """Ask for a key; return what does not fit."""
        self._fqns[key] = fqn
        self.claimed.update(leaf.key for leaf in leaves)
        name = f"{self._name}.{fqn}"
        is_value = not isinstance(live, torch.Tensor)
        if key.rpartition(".")[2] == _EXTRA_STATE or is_value:
            # The saved value counts, of whatever kind and size the live one is.
            self._values[key] = [(leaf, wanted.either(leaf)) for leaf in leaves]
            return []
        if is_odd_tensor(live):
            self._odd[key] = OddFill(name, live, leaves, wanted)
            return []
        if holds_wrapper(live):
            fill = WrapperFill(live, name)
            self._wrappers[key] = fill
            return fill.want(leaves, wanted)
        if any(leaf.path[-1] == RECORD for leaf in leaves):
            return [f"{name} is a plain tensor here, and was saved as a wrapper's inner tensors"]
        (leaf,) = leaves if len(leaves) == 1 else (None,)
        if leaf is None or not leaf.is_tensor or len(leaf.path) > 1:
            return [f"{name} is a tensor, and was not saved as one"]
        if is_lazy(live):
            self._tensors[key] = wanted.tensor(leaf)
            return []
        if live.is_meta:
            return [f"{name} is a meta tensor: materialise it first (`module.to_empty(...)`)"]
        kept: Any = leaf.kept
        size = size_in_checkpoint(live)
        if size != kept.size:
            text = shapes_differ(name, kept.size, size)
            is_plain = not isinstance(live, DTensor) and not describes_itself(live)
            if not is_plain or not may_change_shapes(self._module, key):
                return [text]
            self._reshaped[key] = text
        if live.dtype != kept.properties.dtype:
            self.differences.cast.append(f"{name} ({kept.properties.dtype} as {live.dtype})")
            self._cast.add(key)
        if describes_itself(live):
            self._shards[key] = wanted.shards(leaf, live)
        else:
            self._tensors[key] = wanted.tensor(leaf, live)
        return []

    def check(self) -> None:
        """Check what was loaded against live wrappers, and tensors whose elements share memory.

        Raises:
            StateMismatch: it does not fit.
        """
        others = [why for fill in self._wrappers.values() if (why := fill.misfit())]
        for key, odd in self._odd.items():
            others += odd.assemble(self._where, self._make(key))
        if others:
            raise StateMismatch(self._where, f"it does not fit: {listed(others)}")
        wrong = [
            f"{self._name}.{self._fqns[key]}"
            for key, live in self._expanded().items()
            if not fits_expanded(self._tensors[key].tensor, live)
        ]
        if wrong:
            raise StateMismatch(
                self._where,
                f"these are expanded here, so that elements share memory, and were saved with "
                f"different values there: {listed(wrong)}. Make them `contiguous()` first",
            )

    def _expanded(self) -> dict[str, torch.Tensor]:
        """Return live tensors into which torch copies nothing."""
        found = {key: self._own[key] for key in self._tensors if key in self._own}
        return {
            key: live
            for key, live in found.items()
            if not isinstance(live, DTensor) and not is_lazy(live) and is_expanded(live)
        }

    @property
    def may_fail(self) -> bool:
        """Whether the module, or a hook, has a say in how it is loaded."""
        return bool(self._reshaped) or any(map(_has_a_say, self._module.modules()))

    @torch.no_grad()
    def keep(self) -> Undo:
        """Copy the present state to the host."""
        own = self._module.state_dict()
        themselves = self._themselves(own)
        odd = {key: cloned(value) for key, value in own.items() if is_odd_tensor(value)}
        locals_ = {
            key: {
                path: one.detach().to("cpu", copy=True) for path, one in live_parts(value).items()
            }
            for key, value in own.items()
            if isinstance(value, torch.Tensor) and not is_lazy(value) and key not in odd
        }

        @torch.no_grad()
        def undo() -> None:
            for buffer in self._absent.values():
                buffer.take_away()
            for key, kept in odd.items():
                if key in themselves:
                    copy_odd(themselves[key], kept)
            for key, value in own.items():
                if key in self._reshaped or key not in locals_:
                    continue
                for path, one in live_parts(value).items():
                    if is_expanded(one):
                        copy_into_expanded(one, locals_[key][path])
                    else:
                        one.copy_(locals_[key][path])
            others = {
                key: locals_[key].get((), value) if key in locals_ else odd.get(key, value)
                for key, value in own.items()
                if key in self._reshaped or key not in locals_.keys() | (odd.keys() & themselves)
            }
            if others:
                self._module.load_state_dict(others, strict=False)

        return undo

    @torch.no_grad()
    def put(self) -> None:
        """Load the state dict into the module, and compare."""
        module = self._module
        for key, buffer in self._absent.items():
            if key in self._odd:
                buffer.hold(self._odd[key].value.to(self._device()))
            else:
                buffer.make(self._tensors[key].tensor, self._device())
        state = module.state_dict()  # what hangs on it, such as versions, stays
        own = frozenset(state)
        expanded = self._expanded()
        themselves = self._themselves([*expanded, *self._odd])
        for key in list(state):
            if key in self._values:
                value = tree_of([(leaf.path[1:], one) for leaf, one in self._values[key]])
                state[key] = unpack(value, self._make(key)) if is_packed(value) else value
            elif key in self._odd:
                if key not in themselves:
                    state[key] = self._odd[key].value  # which its module makes anew
                    continue
                self._odd[key].put(themselves[key])
                state[key] = themselves[key]
                if is_without_size(state[key]):
                    del state[key]  # torch compares sizes, and cannot here
            elif key in expanded:
                copy_into_expanded(state[key], self._tensors[key].tensor)
                state[key] = themselves.get(key, state[key])  # which is not copied into itself
            elif key in self._tensors:
                state[key] = _as_input(self._tensors[key], state[key])
            elif key in self._shards:
                self._shards[key].put(self._own[key])
            elif key in self._wrappers:
                self._wrappers[key].put(state.pop(key))
            elif not (isinstance(state[key], torch.Tensor) and is_lazy(state[key])):
                del state[key]
        try:
            if self.differences.missing or is_trusted(type(module).load_state_dict):
                # Not strict: wrappers are in their places already, and hooks of `state_dict` may
                # leave out keys that are not saved. `_check_keys` looks at what is missing.
                self._check_keys(module.load_state_dict(state, strict=False), own)
            else:
                module.load_state_dict(state)
        except RuntimeError as error:
            if not self._reshaped:
                raise
            raise StateMismatch(
                self._where, f"it does not fit: {listed(list(self._reshaped.values()))}"
            ) from error
        self._compare(module.state_dict())

    def _themselves(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of which state dicts have aliases, by key."""
        keys, module = list(keys), self._module
        tensors = tensors_of(module) if keys else {}
        fqns = {key: fqn_of(module, key) for key in keys}
        return {key: tensors[fqn] for key, fqn in fqns.items() if fqn in tensors}

    def _device(self) -> torch.device:
        tensors = tensors_of(self._module).values()
        return next((one.device for one in tensors), torch.device("cpu"))

    def _make(self, key: str) -> Make:
        name = f"{self._name}.{self._fqns[key]}"
        if self._kinds is None:
            self._kinds = Kinds(tensors_in(self._own))
        return functools.partial(self._kinds.made, where=self._where, key=name)

    def _check_keys(self, found: Any, own: frozenset[str]) -> None:
        """Do what ``strict`` does, for all keys that are saved, but not for those of wrappers."""
        absent = {key for key in own if key not in self._fqns}  # is not in the checkpoint, either
        in_place = {*self._wrappers, *self._odd}
        missing = set(getattr(found, "missing_keys", ())) & own - in_place - absent
        others = [*sorted(missing), *getattr(found, "unexpected_keys", ())]
        if others:
            raise StateMismatch(
                self._where,
                f"{self._name!r}: `load_state_dict` does not take what was saved: {listed(others)}",
            )

    def _compare(self, live: Mapping[str, Any]) -> None:
        wrong = [
            self._fqns[key]
            for key, wanted in self._tensors.items()
            if key not in self._cast and not is_same(live[key], wanted.tensor)
        ]
        wrong += [
            self._fqns[key]
            for key, shards in self._shards.items()
            if key not in self._cast and not shards.is_in(self._own[key])
        ]
        for fills in (self._wrappers, self._odd):
            wrong += [self._fqns[key] for key, fill in fills.items() if not fill.is_in(live[key])]
        if wrong:
            raise StateMismatch(
                self._where,
                f"{self._name!r}: after `load_state_dict` these are not what was saved: "
                f"{listed(wrong)}. Something in it, or a hook, changes them",
            )


def _as_input(wanted: WantedTensor, live: torch.Tensor) -> torch.Tensor:
    """Return what `load_state_dict` has to copy. A shard is copied into its place here."""
    if not isinstance(live, DTensor):
        return wanted.tensor
    live.to_local().copy_(wanted.tensor)
    return live


def _has_a_say(module: nn.Module) -> bool:
    kind = type(module)
    methods = (kind._load_from_state_dict, kind.load_state_dict, kind.set_extra_state)
    if any(not is_trusted(method) for method in methods):
        return True
    return any(not is_trusted(hook) for hook in load_hooks_of(module))
