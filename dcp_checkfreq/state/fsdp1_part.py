"""Modules and optimizers under `FullyShardedDataParallel`: torch is asked for their state dicts.

FSDP1 keeps flat parameters, and only torch knows how to cut them apart. So states come from
`get_model_state_dict` and `get_optimizer_state_dict`, and their counterparts put them back. Before
torch loads the state of a fresh optimizer it makes one by a `step` without gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from dcp_checkfreq.errors import StateMismatch, UnsupportedState
from dcp_checkfreq.shards.codec import cloned, is_sharded_tensor
from dcp_checkfreq.state.differences import Differences, listed, shapes_differ
from dcp_checkfreq.state.names import why_nameless, without_wrappers
from dcp_checkfreq.state.packed import is_packed, keys_of, pack_if_needed
from dcp_checkfreq.state.part import Undo, module_described
from dcp_checkfreq.state.saved import Lookup, Path, Renames, SavedState
from dcp_checkfreq.state.tensor_kinds import is_in_order
from dcp_checkfreq.state.tree import tree_of, with_tensors
from dcp_checkfreq.state.unpacked import unpack
from dcp_checkfreq.state.wanted import Wanted, WantedTensor, WantedValue


def is_fsdp1(module: torch.nn.Module) -> bool:
    """Tell whether `state_dict()` would gather whole parameters from all ranks."""
    return any(isinstance(one, FullyShardedDataParallel) for one in module.modules())


class Fsdp1ModulePart:
    """A registered module with FSDP1 in it."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name, self.module = name, module
        self.no_replicas: dict[str, str] = {}  # see `ModulePart.no_replicas`

    def capture(self) -> dict[str, Any]:
        """Return torch's state dict of it. Values that DCP would take apart are packed."""
        own: dict[str, Any] = get_model_state_dict(self.module)
        named = {without_wrappers(name) for name, _ in self.module.named_parameters()}
        for key, value in own.items():
            if isinstance(value, DTensor) or is_sharded_tensor(value):
                continue
            if not isinstance(value, torch.Tensor) or not is_in_order(value):
                own[key] = pack_if_needed(value)
            if key not in named:
                is_whole = not is_packed(own[key])
                self.no_replicas.update({key: key} if is_whole else keys_of(key, own[key]))
        return own

    def is_empty(self) -> bool:
        """Tell whether there is nothing to save."""
        return False

    def describe(self) -> list[object]:
        """Return kinds of all parameters and buffers."""
        return module_described(self.module)

    def fill(
        self, saved: SavedState, renames: Renames, wanted: Wanted
    ) -> tuple[Fsdp1Fill, Differences]:
        """See `Part.fill`."""
        lookup, found = Lookup(saved, renames), Differences()
        leaves: list[tuple[Path, WantedTensor | WantedValue]] = []
        misfits = []
        for fqn, live in self.capture().items():
            saved_leaves = lookup.claim(self.name, fqn)
            if not saved_leaves:
                found.missing.append(f"{self.name}.{fqn}")
            for leaf in saved_leaves:
                kept: Any = leaf.kept
                if not (leaf.is_tensor and isinstance(live, torch.Tensor)):
                    leaves.append(((fqn, *leaf.path[1:]), wanted.either(leaf)))
                elif live.shape != kept.size:
                    misfits.append(shapes_differ(fqn, kept.size, live.shape))
                else:
                    if live.dtype != kept.properties.dtype:
                        found.cast.append(f"{self.name}.{fqn}")
                    leaves.append(((fqn,), wanted.tensor(leaf, live)))
        if misfits:
            raise StateMismatch(saved.where, f"{self.name!r} does not fit: {listed(misfits)}")
        found.unexpected += [leaf.key for leaf in lookup.unclaimed()]
        options = StateDictOptions(strict=not found.missing)

        def put(state: dict[str, Any]) -> None:
            unpacked = {key: unpack(one) if is_packed(one) else one for key, one in state.items()}
            set_model_state_dict(self.module, unpacked, options=options)

        def keep() -> Undo:
            now = _copied(self.capture())
            return lambda: put(now)

        return Fsdp1Fill(leaves, put, keep), found


class Fsdp1OptimizerPart:
    """A registered optimizer of a module with FSDP1 in it.

    Raises:
        UnsupportedState: one of its parameters is in none of the registered modules.
    """

    def __init__(
        self, name: str, optimizer: torch.optim.Optimizer, modules: Mapping[str, torch.nn.Module]
    ) -> None:
        self.name, self.optimizer = name, optimizer
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        wanted = set(map(id, parameters))
        held = {
            id(one): name for module in modules.values() for name, one in module.named_parameters()
        }
        if not wanted <= set(held):
            why = why_nameless(parameters, held, modules)
            raise UnsupportedState(name, type(optimizer).__name__, why)
        holders = {
            part: module
            for part, module in modules.items()
            if wanted & {id(one) for one in module.parameters()}
        }
        whole = (one for one in holders.values() if wanted <= set(map(id, one.parameters())))
        first = next(whole, None)
        self._owner = torch.nn.ModuleDict(holders) if first is None else first

    def capture(self) -> dict[str, Any]:
        """Return torch's state dict of it; an empty one if it was never stepped."""
        if not self.optimizer.state:
            return {"state": {}, "param_groups": []}
        return dict(get_optimizer_state_dict(self._owner, self.optimizer))

    def is_empty(self) -> bool:
        """Tell whether there is nothing to save."""
        return False

    def describe(self) -> list[object]:
        """Return its kind."""
        return ["optimizer", type(self.optimizer).__qualname__]

    def fill(
        self, saved: SavedState, renames: Renames, wanted: Wanted
    ) -> tuple[Fsdp1Fill, Differences]:
        """See `Part.fill`."""
        parameters = get_model_state_dict(self._owner)
        leaves: list[tuple[Path, WantedTensor | WantedValue]] = []
        part, _ = renames.saved_name(self.name)
        for leaf in saved.parts.get(part, ()):
            like = parameters.get(str(leaf.path[1])) if len(leaf.path) > 2 else None
            kept: Any = leaf.kept
            if leaf.is_tensor and isinstance(like, DTensor) and like.shape == kept.size:
                leaves.append((leaf.path, wanted.tensor(leaf, like)))
            else:
                leaves.append((leaf.path, wanted.either(leaf)))

        def put(state: dict[str, Any]) -> None:
            if state.get("param_groups"):
                set_optimizer_state_dict(self._owner, self.optimizer, {"state": {}, **state})

        def keep() -> Undo:
            now = _copied(self.capture())
            return lambda: put(now)

        return Fsdp1Fill(leaves, put, keep), Differences()


class Fsdp1Fill:
    """A part that torch puts back."""

    def __init__(self, leaves: Any, put: Any, keep: Any) -> None:
        self._leaves, self._put, self._keep = leaves, put, keep
        self.claimed = {one.leaf.key for _, one in leaves}

    def check(self) -> None:
        """Nothing to do: torch checks when it loads."""

    may_fail = True

    def keep(self) -> Undo:
        """Copy what is there now."""
        undo: Undo = self._keep()
        return undo

    @torch.no_grad()
    def put(self) -> None:
        """Let torch put it back."""
        self._put(tree_of(self._leaves))


def _copied(state: dict[str, Any]) -> Any:
    return with_tensors(
        state, lambda one: one.detach().clone() if isinstance(one, DTensor) else cloned(one)
    )
