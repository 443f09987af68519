"""What a training script hands to `Checkpointer`, as a state dict for DCP and back.

Modules and optimizers go through torch's `get_*_state_dict`, so that DDP, FSDP2 and plain ones all
reshard. Everything else (schedulers, samplers, plain values) is packed: one byte item that keeps
key types, tuples and counters as they are, with large tensors beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from dcp_checkfreq.errors import StateMismatch, UnsupportedState
from dcp_checkfreq.fqns import NamedModule, NamedOptimizer
from dcp_checkfreq.shards.codec import local_of
from dcp_checkfreq.shards.nesting import naming

_log = logging.getLogger(__name__)

_TREE, _TENSORS = "tree", "tensors"
_SLOT = "__dcp_checkfreq_tensor__"
# Smaller tensors stay in the byte item: a file place of their own would cost more than they hold.
_OWN_ITEM_FROM_BYTES = 16 << 10


class PerRank:
    """Marks a value that each rank keeps for itself (random states, positions per rank).

    On another number of ranks, a rank that did not exist before keeps what it has, unless a
    subclass does better in `absent`.

    Args:
        value: a `Stateful` object, or a plain value; restored values are in ``value``.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        # What can tell more about one rank than about all of them does so from now on.
        if callable(tell := getattr(value, "belong_to_rank", None)):
            tell()

    def absent(self, rank: int, step: int) -> None:
        """Act on a restore from ``step`` that has values of other ranks and none of this one."""


def pack(value: object) -> dict[str, Any]:
    """Return ``{"tree": (value without its large tensors,), "tensors": [those]}``.

    DCP does not look into tuples, so what is inside of one stays a single byte item.
    """
    tensors: list[torch.Tensor] = []
    return {_TREE: (_take_out(value, tensors),), _TENSORS: tensors}


def _take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor) or value.nbytes >= _OWN_ITEM_FROM_BYTES:
            tensors.append(value)
            return (_SLOT, len(tensors) - 1)
        return value
    # Only exact types can be rebuilt from their items; others (Counter, ...) stay as they are.
    if type(value) is dict:
        return {key: _take_out(inner, tensors) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take_out(inner, tensors) for inner in value)
    return value


def unpack(packed: Mapping[str, Any]) -> Any:
    """Return the value of which `pack` made ``packed``."""
    return _put_back(packed[_TREE][0], packed[_TENSORS])


def _put_back(value: Any, tensors: list[torch.Tensor]) -> Any:
    if type(value) is tuple and len(value) == 2 and value[0] == _SLOT:
        return tensors[value[1]]
    if type(value) is dict:
        return {key: _put_back(inner, tensors) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_back(inner, tensors) for inner in value)
    return value


class AppState:
    """The registered parts of a job.

    Args:
        parts: name to module, optimizer, `Stateful`, `PerRank` or plain value. Restored plain
            values are put into this mapping.
        rank: of this process.
    """

    def __init__(self, parts: MutableMapping[str, Any], rank: int) -> None:
        if not parts:
            raise ValueError("the state is empty: there would be nothing to save")
        names: list[object] = list(parts)
        for name in names:
            if not isinstance(name, str) or not name or "." in name or "/" in name:
                raise UnsupportedState(
                    str(name), "part name", "names are non-empty text without dots or slashes"
                )
        self._parts = parts
        self._rank = rank
        self._modules: dict[str, NamedModule] = {}
        self._optimizers: dict[str, NamedOptimizer] = {}
        for name, part in parts.items():
            if isinstance(part, torch.optim.Optimizer):
                self._optimizer(name, part)  # raises now if it has no names

    def _key(self, name: str) -> str:
        return f"{name}/rank{self._rank}" if isinstance(self._parts[name], PerRank) else name

    def capture(self) -> dict[str, Any]:
        """Return the state dict to save. Tensors are the live ones; each part is asked once."""
        return {self._key(name): self._capture(name) for name in self._parts}

    def _capture(self, name: str) -> Any:
        part = self._parts[name]
        if isinstance(part, torch.nn.Module):
            return self._module(name, part).capture()
        if isinstance(part, torch.optim.Optimizer):
            return self._optimizer(name, part).capture()
        if isinstance(part, PerRank):
            part = part.value
        state = part.state_dict() if isinstance(part, Stateful) else part
        with naming(lambda: state, name):
            return pack(state)

    def _module(self, name: str, module: torch.nn.Module) -> NamedModule:
        known = self._modules.get(name)
        if known is None or known.module is not module:
            known = self._modules[name] = NamedModule(module)
        return known

    def _optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> NamedOptimizer:
        known = self._optimizers.get(name)
        if known is None or known.optimizer is not optimizer:
            parts = self._parts.items()
            modules = {key: part for key, part in parts if isinstance(part, torch.nn.Module)}
            owner = _owner(name, optimizer, modules)
            known = self._optimizers[name] = NamedOptimizer(owner, optimizer)
        return known

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the registered optimizers."""
        return [part for part in self._parts.values() if isinstance(part, torch.optim.Optimizer)]

    def gpu(self) -> torch.device | None:
        """Return the CUDA device that this rank trains on, or None."""
        for part in self._parts.values():
            if isinstance(part, torch.nn.Module):
                for parameter in part.parameters():
                    if parameter.is_cuda:
                        return parameter.device
        return None

    def gpu_memory_bytes(self) -> tuple[int, int]:
        """Return the GPU memory in use, caches included, and all there is (M, Mmax)."""
        device = self.gpu()
        if device is None:
            return 0, 0
        free, total = torch.cuda.mem_get_info(device)
        return total - free, total

    def describe(self) -> list[object]:
        """Return plain values that say what saving this state costs, without its content.

        They differ between jobs whose saves cost differently: names, shapes, dtypes, devices and
        shardings of all parameters and buffers, kinds and switches of optimizers, kinds of others.
        """
        return [[name, *_described(part)] for name, part in self._parts.items()]

    def targets(self, metadata: Metadata, where: str) -> dict[str, Any]:
        """Return a state dict for `dcp.load` to fill from the checkpoint with this metadata.

        Modules and optimizers are filled in place; packed parts get room of their own.

        Raises:
            StateMismatch: the checkpoint lacks a registered part.
        """
        saved = metadata.state_dict_metadata
        known = {key.split(".", 1)[0] for key in saved}
        missing = [name for name in self._parts if not self._is_optional(name, known)]
        if missing:
            raise StateMismatch(
                where,
                f"it has no {', '.join(map(repr, missing))}; it has {', '.join(sorted(known))}. "
                "Register the parts that were saved, or save anew",
            )
        return {
            self._key(name): self._target(name, metadata)
            for name in self._parts
            if self._key(name) in known
        }

    def _is_optional(self, name: str, known: set[str]) -> bool:
        if isinstance(self._parts[name], PerRank):
            return any(key.startswith(f"{name}/rank") for key in known)
        return name in known

    def _target(self, name: str, metadata: Metadata) -> Any:
        live = self._capture(name)
        if isinstance(self._parts[name], torch.optim.Optimizer):
            return _only_saved_state(name, live, metadata)
        if isinstance(self._parts[name], torch.nn.Module):
            return live
        prefix = f"{self._key(name)}.{_TENSORS}."
        saved = {
            int(key[len(prefix) :]): kept
            for key, kept in metadata.state_dict_metadata.items()
            if key.startswith(prefix) and isinstance(kept, TensorStorageMetadata)
        }
        current = live[_TENSORS]
        tensors = []
        for number in range(len(saved)):
            kept = saved[number]
            like = current[number] if number < len(current) else None
            if like is not None and like.shape == kept.size:
                tensors.append(torch.empty_like(like, dtype=kept.properties.dtype))
            else:
                tensors.append(torch.empty(kept.size, dtype=kept.properties.dtype))
        return {_TREE: (None,), _TENSORS: tensors}

    def restore(self, loaded: Mapping[str, Any], step: int) -> None:
        """Put a filled state dict, of the checkpoint of ``step``, into the live parts."""
        for name, part in list(self._parts.items()):
            key = self._key(name)
            if key not in loaded:
                assert isinstance(part, PerRank)  # `targets` refuses everything else
                part.absent(self._rank, step)
                continue
            value = loaded[key]
            if isinstance(part, torch.nn.Module):
                set_model_state_dict(part, value)
            elif isinstance(part, torch.optim.Optimizer):
                _set_optimizer(self._optimizer(name, part).owner, part, value)
            elif isinstance(part, PerRank):
                part.value = _restored(part.value, unpack(value))
            else:
                self._parts[name] = _restored(part, unpack(value))


def _described(part: Any) -> list[object]:
    if isinstance(part, torch.nn.Module):
        tensors = [*part.named_parameters(), *part.named_buffers()]
        return ["module", *([name, *_tensor_described(tensor)] for name, tensor in tensors)]
    if isinstance(part, torch.optim.Optimizer):
        groups = [
            # Values such as the learning rate change in a run; whether they are zero decides what
            # state there is.
            [len(group["params"])]
            + [
                [key, bool(value)]
                for key, value in sorted(group.items())
                if isinstance(value, (bool, int, float))
            ]
            for group in part.param_groups
        ]
        return ["optimizer", type(part).__qualname__, *groups]
    if isinstance(part, torch.Tensor):
        return _tensor_described(part)
    return [type(part).__qualname__]


def _tensor_described(tensor: torch.Tensor) -> list[object]:
    local = local_of(tensor)
    return [list(tensor.shape), list(local.shape), str(local.dtype), local.device.type]


def _restored(part: Any, value: Any) -> Any:
    if isinstance(part, Stateful):
        part.load_state_dict(value)
        return part
    return value


def _only_saved_state(name: str, live: dict[str, Any], metadata: Metadata) -> dict[str, Any]:
    """Leave out parameters that had no optimizer state when the checkpoint was saved.

    Torch makes state for all parameters before a load; one that had not been stepped yet has none
    in the checkpoint, and shall have none afterwards.
    """
    saved = metadata.state_dict_metadata
    prefix = f"{name}.state."
    kept = {
        parameter: state
        for parameter, state in live["state"].items()
        if not state or any(f"{prefix}{parameter}.{entry}" in saved for entry in state)
    }
    wanted = tuple(f"{prefix}{parameter}." for parameter in kept)
    dropped = [key for key in saved if key.startswith(prefix) and not key.startswith(wanted)]
    if dropped:
        _log.warning(
            "%s: the checkpoint holds state of parameters that the optimizer does not train now "
            "(frozen, or gone); it is not restored: %s",
            name,
            ", ".join(dropped[:5]) + (" ..." if len(dropped) > 5 else ""),
        )
    return {**live, "state": kept}


def _set_optimizer(
    owner: torch.nn.Module, optimizer: torch.optim.Optimizer, value: dict[str, Any]
) -> None:
    complete: dict[str, Any] = dict(get_optimizer_state_dict(owner, optimizer))
    missing = set(complete["state"]) - set(value["state"])
    options = StateDictOptions(strict=not missing)
    set_optimizer_state_dict(owner, optimizer, value, options=options)
    for named, group in zip(complete["param_groups"], optimizer.param_groups, strict=True):
        for parameter_name, parameter in zip(named["params"], group["params"], strict=True):
            if parameter_name in missing:
                optimizer.state.pop(parameter, None)


def _owner(
    name: str, optimizer: torch.optim.Optimizer, modules: Mapping[str, torch.nn.Module]
) -> torch.nn.Module:
    """Return the module whose parameter names the optimizer's state is saved under."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    holders = {}
    for key, module in modules.items():
        held = {id(p) for p in module.parameters()}
        if wanted <= held:
            return module
        if wanted & held:
            holders[key] = module
            wanted -= held
            if not wanted:
                return torch.nn.ModuleDict(holders)
    raise UnsupportedState(
        name,
        type(optimizer).__name__,
        "some of its parameters are in none of the registered modules, so they have no names to "
        "be saved under. Register the module too",
    )
