"""The last complete step: whether the live state is still that of it, after an error.

After every step it is marked what the state was. What holds plain values is kept as it was. What
holds tensors is only recognised: by the objects, by torch's counts of in-place changes, by what the
optimizers' hooks have heard, and buffers also by their content, as a replayed CUDA graph and a
write through ``.data`` count nothing.

What can be told once for all steps is told when the tensors are looked for: a mark costs nothing
where a part cannot be followed.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from dcp_checkfreq.format.torch_private import load_hooks_of, versions_of
from dcp_checkfreq.runtime.error_reports import text_of
from dcp_checkfreq.snapshot.optimizer_guard import Guard
from dcp_checkfreq.state.app_state import AppState
from dcp_checkfreq.state.module_part import ModulePart
from dcp_checkfreq.state.optimizer_part import OptimizerPart
from dcp_checkfreq.state.packed import TENSORS
from dcp_checkfreq.state.part import Part, is_ours, is_trusted
from dcp_checkfreq.state.value_part import ValuePart

_MOST_BUFFER_BYTES = 1 << 20  # of one that is compared
_MOST_VALUES = 500  # of a plain value that is kept at every step
_MOST_KEPT_BYTES = 1 << 20  # of its tensors
_UNCHANGING = (int, float, str, bool, bytes, complex, type(None))


class _NotFollowed(Exception):
    """Why the state of a part is not known from step to step."""


@dataclass(frozen=True, slots=True)
class _Buffer:
    content: torch.Tensor  # a view of its bytes
    storage: torch.UntypedStorage
    storage_bytes: int


@dataclass(slots=True)
class _Module:
    """The tensors of a module, found once, and what they were like after a step."""

    module: nn.Module
    tensors: dict[str, torch.Tensor]
    buffers: dict[torch.device, list[_Buffer]]
    versions: list[int] = field(default_factory=list)
    content: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    def mark(self) -> None:
        self.versions = versions_of(list(self.tensors.values()))
        self.content = self._content()

    def _content(self) -> dict[torch.device, torch.Tensor]:
        for one in itertools.chain(*self.buffers.values()):
            if one.storage.nbytes() != one.storage_bytes:
                raise _NotFollowed("the memory of a buffer was given back")
        return {
            device: torch.cat([one.content for one in buffers])
            for device, buffers in self.buffers.items()
        }

    def why_changed(self) -> str | None:
        now = self.module.state_dict(keep_vars=True)
        for key in [*self.tensors, *now]:
            if now.get(key) is not self.tensors.get(key):
                return f"{key!r} is another one"
        versions = versions_of(list(self.tensors.values()))
        for key, version, before in zip(self.tensors, versions, self.versions, strict=True):
            if version != before:
                return f"{key!r} was changed"
        content = self._content()
        if any(not torch.equal(content[device], one) for device, one in self.content.items()):
            return "a buffer was changed"
        return None


@dataclass(frozen=True, slots=True)
class _Unpacked:
    """A value that was made for this mark: nobody else has it. Packed when it is needed."""

    part: ValuePart
    value: Any


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """What an optimizer had after a step, but for what only its steps change."""

    state: object
    size: int  # of it
    options: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _Optimizer:
        options = [
            {
                key: [id(one) for one in value] if key == "params" else _option(value)
                for key, value in group.items()
            }
            for group in optimizer.param_groups
        ]
        return cls(optimizer.state, len(optimizer.state), options)

    def why_changed(self, optimizer: torch.optim.Optimizer) -> str | None:
        now = _Optimizer.of(optimizer)
        if now.state is not self.state or now.size != self.size:
            return "its state was replaced"
        return None if now.options == self.options else "an option of a group was changed"


def _option(value: Any) -> Any:
    """Return what tells an option from another one; of a tensor, its object and its changes."""
    if isinstance(value, torch.Tensor):
        return id(value), versions_of([value])
    return copy.deepcopy(value)


class LastStep:
    """Knows what the registered parts were after the last complete step.

    Args:
        state: the parts.
        guard: hears the steps of their optimizers.
    """

    def __init__(self, state: AppState, guard: Guard) -> None:
        self._state, self._guard = state, guard
        self._modules: dict[str, _Module] = {}
        self._optimizers: dict[str, _Optimizer] = {}
        self._values: dict[str, Any] = {}
        self._names: list[str] = []
        self._why_not: str | None = None
        self.step: int | None = None

    @torch.no_grad()
    def mark(self, step: int, *, anew: bool) -> None:
        """Say that ``step`` is complete. What goes wrong here is said if it is needed.

        Args:
            step: that is done.
            anew: look for the tensors of modules anew.
        """
        self.step = step
        names = self._state.names
        if anew or names != self._names:
            self._modules, self._why_not = {}, None
        self._guard.mark_step()
        if self._why_not is not None:
            return  # nor can it now
        self._names, self._values, self._optimizers = names, {}, {}
        for name, part in self._state.parts():
            try:
                self._mark(name, part)
            except Exception as error:  # noqa: BLE001  it is no reason to stop the training
                text = str(error) if isinstance(error, _NotFollowed) else text_of(error)
                self._why_not = f"{name!r} cannot be followed from step to step: {text}"
                return

    def _mark(self, name: str, part: Part) -> None:
        if isinstance(part, ModulePart):
            known = self._modules.get(name)
            if known is None or known.module is not part.module:
                known = self._modules[name] = _found(part.module)
            known.mark()
        elif isinstance(part, OptimizerPart):
            if not self._guard.hears(part.optimizer):
                raise _NotFollowed("its steps call no hooks, or a CUDA graph replays them")
            self._optimizers[name] = _Optimizer.of(part.local)
        elif isinstance(part, ValuePart) and part.is_made_anew:
            self._values[part.key] = _Unpacked(part, part.value)
        elif isinstance(part, ValuePart):
            _check_value(part)
            for key, packed in part.capture_by_key().items():
                tensors = packed[TENSORS]
                if sum(one.nbytes for one in tensors) > _MOST_KEPT_BYTES:
                    raise _NotFollowed("it is too large")
                self._values[key] = _kept(packed)
        else:
            raise _NotFollowed(f"{type(part).__name__} is sharded")

    @torch.no_grad()
    def why_not_intact(self) -> str | None:
        """Return why the state of the marked step cannot be had any more; None: it can."""
        if self._why_not is not None:
            return self._why_not
        if self._state.names != self._names:
            return "other parts are registered by now"
        if self._guard.has_stepped:
            return "an optimizer's step has begun since, or its snapshot was waited for"
        for name, part in self._state.parts():
            why = None
            try:
                if isinstance(part, ModulePart):
                    why = self._modules[name].why_changed()
                elif isinstance(part, OptimizerPart):
                    why = self._optimizers[name].why_changed(part.local)
            except Exception as error:  # noqa: BLE001  a GPU that has failed, say
                why = f"it cannot be compared: {text_of(error)}"
            if why is not None:
                return f"in {name!r}, {why} since"
        return None

    def capture(self, now: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of the marked step, from the state as it is ``now`` and intact."""
        kept = {
            key: value.part.packed(value.value) if isinstance(value, _Unpacked) else value
            for key, value in self._values.items()
        }
        return {**now, **kept}


def _found(module: nn.Module) -> _Module:
    for one in module.modules():
        kind = type(one)
        own = (kind.state_dict, kind._save_to_state_dict, kind.get_extra_state)
        if not all(map(is_trusted, [*own, *load_hooks_of(one)])):
            raise _NotFollowed(f"{kind.__name__} saves more than its tensors")
    tensors = module.state_dict(keep_vars=True)
    odd = [key for key, one in tensors.items() if not isinstance(one, torch.Tensor)]
    if odd:
        raise _NotFollowed(f"{odd[0]!r} is no tensor")
    buffers: dict[torch.device, list[_Buffer]] = {}
    for one in tensors.values():
        if one.numel() and not isinstance(one, nn.Parameter):
            content, storage = _content_of(one.detach()), one.untyped_storage()
            of_device = buffers.setdefault(one.device, [])
            of_device.append(_Buffer(content, storage, storage.nbytes()))
    return _Module(module, dict(tensors), buffers)


def _content_of(buffer: torch.Tensor) -> torch.Tensor:
    if type(buffer) is not torch.Tensor or not buffer.is_contiguous():
        raise _NotFollowed("it has a buffer that is no plain tensor")
    if buffer.nbytes > _MOST_BUFFER_BYTES:
        raise _NotFollowed("it has a buffer that is too large to be compared at every step")
    return buffer.view(-1).view(torch.uint8)


def _check_value(part: ValuePart) -> None:
    value = part.value
    kind = type(value)
    if part.is_own_kind:
        raise _NotFollowed("its class is not known here")
    if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
        raise _NotFollowed("to ask it would wait for the GPU")
    if isinstance(value, Stateful):
        if getattr(value, "asks_others", False):
            raise _NotFollowed("the loader in it would be asked for its state at every step")
        if not is_ours(kind) and not is_trusted(kind.state_dict):
            raise _NotFollowed(f"its state is known by {kind.__name__}.state_dict only")
    elif _count(value, _MOST_VALUES) >= _MOST_VALUES:
        raise _NotFollowed("it is too large")


def _kept(packed: Any) -> Any:
    """Return a copy that no change of a live value reaches."""
    kind = type(packed)
    if kind is torch.Tensor:
        return packed.detach().clone()
    if kind in (list, tuple):
        return kind(map(_kept, packed))
    if kind is dict:
        return {key: _kept(value) for key, value in packed.items()}
    return packed if kind in _UNCHANGING else copy.deepcopy(packed)


def _count(value: Any, most: int) -> int:
    """Count plain values up to ``most``."""
    waiting, found = [value], 0
    while waiting and found < most:
        one = waiting.pop()
        if isinstance(one, (str, bytes)):
            found += len(one) >> 10
        elif isinstance(one, Mapping):
            found += len(one)
            waiting += list(one.values())[:most]
        elif isinstance(one, (list, tuple, set, frozenset)):
            found += len(one)
            waiting += list(one)[:most]
        found += 1
    return found
