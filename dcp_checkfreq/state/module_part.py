"""A module as a part: its state dict under FQNs.

What a key is called is looked up once, and again when keys or modules have changed: a walk takes
longer than all else that a save does on the training thread. Values always come from
`state_dict()`, so hooks run every time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from dcp_checkfreq.errors import StateMismatch
from dcp_checkfreq.shards.self_described import carry_all
from dcp_checkfreq.state.differences import Differences, listed
from dcp_checkfreq.state.module_fill import ModuleFill
from dcp_checkfreq.state.module_tensors import absent_buffers, is_odd_tensor
from dcp_checkfreq.state.names import fqn_of, fqns_of
from dcp_checkfreq.state.packed import is_packed, keys_of, pack_if_needed
from dcp_checkfreq.state.part import module_described
from dcp_checkfreq.state.saved import Lookup, Renames, SavedState
from dcp_checkfreq.state.tensor_kinds import is_in_order
from dcp_checkfreq.state.wanted import Wanted
from dcp_checkfreq.state.wrapper_record import RECORD
from dcp_checkfreq.state.wrappers import PLAIN, flat, is_taken_apart, is_usual_shard, stored


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
                elif is_odd_tensor(value):
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
        return module_described(self.module)

    def fill(
        self, saved: SavedState, renames: Renames, wanted: Wanted
    ) -> tuple[ModuleFill, Differences]:
        """See `Part.fill`."""
        lookup = Lookup(saved, renames)
        own = self.own()
        fill = ModuleFill(self.name, self.module, own, saved.where)
        misfits: list[str] = []
        for key, live in own.items():
            leaves = lookup.claim(self.name, self._fqns[key])
            if leaves:
                misfits += fill.want(key, self._fqns[key], live, leaves, wanted)
            elif not (isinstance(live, torch.Tensor) and is_lazy(live)):
                fill.differences.missing.append(f"{self.name}.{self._fqns[key]}")
        for key, buffer in absent_buffers(self.module).items():
            leaves = lookup.claim(self.name, fqn_of(self.module, key)) if key not in own else []
            if leaves:
                misfits += fill.want_buffer(key, fqn_of(self.module, key), buffer, leaves, wanted)
        if misfits:
            raise StateMismatch(saved.where, f"it does not fit: {listed(misfits)}")
        fill.differences.unexpected += [leaf.key for leaf in lookup.unclaimed()]
        return fill, fill.differences
