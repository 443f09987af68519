"""A module as a part: its state dict under FQNs.

What a key is called is looked up once, and again when keys or modules have changed: a walk takes
longer than all else that a save does on the training thread. Values always come from
`state_dict()`, so hooks run every time.
"""

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
from dcp_checkfreq.shards.self_described import (
    carry_all,
    describes_itself,
    size_in_checkpoint,
)
from dcp_checkfreq.state.differences import Differences, listed
from dcp_checkfreq.state.names import fqn_of, fqns_of
from dcp_checkfreq.state.odd_fill import OddFill, copy_odd, is_without_size
from dcp_checkfreq.state.odd_tensors import (
    AbsentBuffer,
    absent_buffers,
    copy_into_expanded,
    fits_expanded,
    is_expanded,
    may_change_shapes,
    tensors_of,
)
from dcp_checkfreq.state.packed import (
    Make,
    is_packed,
    keys_of,
    pack_if_needed,
    tensors_in,
    unpack,
)
from dcp_checkfreq.state.part import Undo, is_trusted, tensor_described
from dcp_checkfreq.state.saved import Leaf, Lookup, Renames, SavedState
from dcp_checkfreq.state.tensor_kinds import is_in_order, is_odd
from dcp_checkfreq.state.tree import tree_of
from dcp_checkfreq.state.wanted import Wanted, WantedShards, WantedTensor, WantedValue
from dcp_checkfreq.state.wrapper_fill import WrapperFill
from dcp_checkfreq.state.wrappers import (
    PLAIN,
    RECORD,
    Kinds,
    flat,
    holds_wrapper,
    is_taken_apart,
    is_usual_shard,
    live_parts,
    stored,
)

_EXTRA_STATE = "_extra_state"


class ModulePart:
    """A registered module.

    Args:
        name: of the part.
        module: whose state is meant.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self._learned_from: object = None
        self._fqns: dict[str, str] = {}  # by key
        self._renamed: list[tuple[str, str]] = []  # those that differ
        self._no_replicas: dict[str, str] = {}

    @torch.no_grad()
    def capture(self) -> dict[str, Any]:
        """Return the state dict under FQNs. Tensors are the live ones, detached."""
        own = self.own()
        for key, value in list(own.items()):
            if (type(value) is torch.Tensor and is_in_order(value)) or is_usual_shard(value):
                continue  # as nearly all are, in jobs with very many
            if isinstance(value, torch.Tensor):
                if is_lazy(value):
                    del own[key]  # it has nothing yet
                elif _is_odd(value):
                    own[key] = self._packed(key, value)
                elif type(value) not in PLAIN:
                    own[key] = self._stored(key, value)
            else:
                own[key] = self._packed(key, value)  # DCP would take dicts and lists apart
        for key, fqn in self._renamed:
            if key in own:
                own[fqn] = own.pop(key)
        return own

    def _packed(self, key: str, value: object) -> Any:
        made, fqn = pack_if_needed(value), self._fqns[key]
        if fqn in self._no_replicas and is_packed(made):
            self._no_replicas.update(keys_of(fqn, made))
        return made

    def _stored(self, key: str, value: torch.Tensor) -> Any:
        fqn = self._fqns[key]
        made = stored(value, f"{self.name}.{fqn}")
        if is_taken_apart(made):
            self._may_differ(fqn, made, isinstance(value, DTensor))
        return made

    def _may_differ(self, fqn: str, parts: Mapping[str, Any], is_shard: bool) -> None:
        """Note which keys of a wrapper may differ between ranks."""
        if fqn in self._no_replicas or is_shard:
            inner = {f"{fqn}.{'.'.join(path)}" for path, _ in flat(parts)}
            if fqn not in self._no_replicas:
                inner = {one for one in inner if one.endswith(RECORD)}
            self._no_replicas.update((one, one) for one in inner)

    def own(self) -> dict[str, Any]:
        """Return the state dict as the module makes it, its keys looked up."""
        own: dict[str, Any] = self.module.state_dict()
        carry_all(self.module, own)
        learned_from = list(own), list(map(type, self.module.modules()))
        if learned_from != self._learned_from:
            self._fqns = fqns_of(self.module, own)
            self._renamed = [(key, fqn) for key, fqn in self._fqns.items() if key != fqn]
            named = {fqn_of(self.module, name) for name, _ in self._parameters()}
            self._no_replicas = {one: one for one in self._fqns.values() if one not in named}
            self._learned_from = learned_from
        return own

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters(remove_duplicate=False))

    @property
    def no_replicas(self) -> Mapping[str, str]:
        """What may differ between ranks of DDP: buffers and extra state; rank 0's count.

        By key is said of which value it is a part: all parts of a value come from one rank.
        """
        return self._no_replicas

    def is_empty(self) -> bool:
        """Tell whether the state dict has nothing in it."""
        return not self.own()

    def describe(self) -> list[object]:
        """Return kinds of all parameters and buffers."""
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        return ["module", *([name, *tensor_described(tensor)] for name, tensor in tensors)]

    def fill(
        self, saved: SavedState, renames: Renames, wanted: Wanted
    ) -> tuple[ModuleFill, Differences]:
        """See `Part.fill`."""
        lookup = Lookup(saved, renames)
        own = self.own()
        fill = ModuleFill(self, own, saved.where)
        misfits: list[str] = []
        for key, live in own.items():
            leaves = lookup.find(self.name, self._fqns[key])
            if leaves:
                misfits += fill.want(key, self._fqns[key], live, leaves, wanted)
            elif not (isinstance(live, torch.Tensor) and is_lazy(live)):
                fill.differences.missing.append(f"{self.name}.{self._fqns[key]}")
        for key, buffer in absent_buffers(self.module).items():
            leaves = lookup.find(self.name, fqn_of(self.module, key)) if key not in own else []
            if leaves:
                misfits += fill.want_buffer(key, fqn_of(self.module, key), buffer, leaves, wanted)
        if misfits:
            raise StateMismatch(saved.where, f"it does not fit: {listed(misfits)}")
        fill.differences.unexpected += [leaf.key for leaf in lookup.unclaimed()]
        return fill, fill.differences


class ModuleFill:
    """A module that is being restored."""

    def __init__(self, part: ModulePart, own: dict[str, Any], where: str) -> None:
        self._part, self._own, self._where = part, own, where
        self.differences = Differences()
        self.claimed: set[str] = set()
        self._fqns: dict[str, str] = {}  # of what is loaded, by key
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
        """Have a buffer loaded that is None now; return what does not fit."""
        name = f"{self._part.name}.{fqn}"
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
        """Have a key loaded; return what does not fit."""
        self._fqns[key] = fqn
        self.claimed.update(leaf.key for leaf in leaves)
        name = f"{self._part.name}.{fqn}"
        is_value = not isinstance(live, torch.Tensor)
        if key.rpartition(".")[2] == _EXTRA_STATE or is_value:
            # Whatever it is now: it is of any kind, and of a size of its own.
            self._values[key] = [(leaf, wanted.either(leaf)) for leaf in leaves]
            return []
        if _is_odd(live):
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
            text = f"{name}: saved {list(kept.size)}, wanted {list(size)} (shapes differ)"
            is_plain = not isinstance(live, DTensor) and not describes_itself(live)
            if not is_plain or not may_change_shapes(self._part.module, key):
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
        """Compare what was loaded with wrappers, and with tensors whose elements share memory.

        Raises:
            StateMismatch: it does not fit.
        """
        others = [why for fill in self._wrappers.values() if (why := fill.misfit())]
        for key, odd in self._odd.items():
            others += odd.misfit(self._where, self._make(key))
        if others:
            raise StateMismatch(self._where, f"it does not fit: {listed(others)}")
        wrong = [
            f"{self._part.name}.{self._fqns[key]}"
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
        return bool(self._reshaped) or any(map(_has_a_say, self._part.module.modules()))

    @torch.no_grad()
    def keep(self) -> Undo:
        """Copy what is there now to the host."""
        own = self._part.module.state_dict()
        themselves = self._themselves(own)
        odd = {key: cloned(value) for key, value in own.items() if _is_odd(value)}
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
                self._part.module.load_state_dict(others, strict=False)

        return undo

    @torch.no_grad()
    def put(self) -> None:
        """Load the state dict into the module, and compare."""
        module = self._part.module
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
                # leave out what is not to be saved. What is missing here is looked at below.
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
        keys, module = list(keys), self._part.module
        tensors = tensors_of(module) if keys else {}
        fqns = {key: fqn_of(module, key) for key in keys}
        return {key: tensors[fqn] for key, fqn in fqns.items() if fqn in tensors}

    def _device(self) -> torch.device:
        tensors = tensors_of(self._part.module).values()
        return next((one.device for one in tensors), torch.device("cpu"))

    def _make(self, key: str) -> Make:
        name = f"{self._part.name}.{self._fqns[key]}"
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
                f"{self._part.name!r}: `load_state_dict` does not take what was saved: "
                f"{listed(others)}",
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
                f"{self._part.name!r}: after `load_state_dict` these are not what was saved: "
                f"{listed(wrong)}. Something in it, or a hook, changes them",
            )


def _as_input(wanted: WantedTensor, live: torch.Tensor) -> torch.Tensor:
    """Return what `load_state_dict` shall copy. A shard is put into its place right away."""
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


def _is_odd(value: object) -> bool:
    """Tell whether it is a tensor that is not elements in order, and can be taken apart."""
    if not isinstance(value, torch.Tensor) or is_lazy(value):
        return False
    return not is_in_order(value) and is_odd(value)
