"""Tensors of a module that need more than being copied into.

Some have no elements in order. In expanded ones, elements share memory. Some modules give their
tensors another shape when they load. A buffer that is None now may have been a tensor when it was
saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dcp_checkfreq.format.torch_private import load_hooks_of
from dcp_checkfreq.shards.codec import is_same
from dcp_checkfreq.state.names import child_of, fqn_of
from dcp_checkfreq.state.part import is_trusted
from dcp_checkfreq.state.tensor_kinds import is_in_order, is_odd


def is_odd_tensor(value: object) -> bool:
    """Tell whether it is a tensor that is not elements in order, and can be taken apart."""
    if not isinstance(value, torch.Tensor) or is_lazy(value):
        return False
    return not is_in_order(value) and is_odd(value)


def is_expanded(tensor: torch.Tensor) -> bool:
    """Tell whether elements share memory, so that torch copies nothing into it."""
    if tensor.layout != torch.strided or not tensor.numel():
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and not step for size, step in steps)


def _without_repeats(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    for dim, (size, step) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if size > 1 and not step:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def fits_expanded(saved: torch.Tensor, live: torch.Tensor) -> bool:
    """Tell whether saved values are equal wherever elements of an expanded tensor share memory."""
    return is_same(_without_repeats(saved, live).expand(saved.shape), saved)


@torch.no_grad()
def copy_into_expanded(live: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy values that fit (`fits_expanded`) into an expanded tensor."""
    _without_repeats(live, live).copy_(_without_repeats(saved, live))


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers themselves, by FQN."""
    tensors = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return {fqn_of(module, name): tensor for name, tensor in tensors}


def may_change_shapes(module: nn.Module, key: str) -> bool:
    """Tell whether a module on the way to a tensor has a say in how it is loaded."""
    at: nn.Module | None = module
    for name in key.split("."):
        if at is None:
            return False
        kind = type(at)
        own = (kind.load_state_dict, kind._load_from_state_dict)
        if own != (nn.Module.load_state_dict, nn.Module._load_from_state_dict):
            return True
        if load_hooks_of(at):
            return True
        at = child_of(at, name)
    return False


@dataclass(frozen=True, slots=True)
class AbsentBuffer:
    """A buffer that is saved once it is there, and is None now."""

    owner: nn.Module
    name: str

    def make(self, kept: torch.Tensor, device: torch.device) -> None:
        """Make it a new tensor like ``kept``."""
        self.hold(torch.empty_like(kept, device=device))

    def hold(self, tensor: torch.Tensor) -> None:
        """Make it this tensor."""
        self.owner._buffers[self.name] = tensor

    def take_away(self) -> None:
        """Make it None again."""
        self.owner._buffers[self.name] = None


def absent_buffers(module: nn.Module) -> dict[str, AbsentBuffer]:
    """Return the buffers that are None now, by key, of modules that are not torch's own.

    Torch's own have None where an option says that there shall never be one.
    """
    return {
        f"{prefix}.{name}" if prefix else name: AbsentBuffer(owner, name)
        for prefix, owner in module.named_modules(remove_duplicate=False)
        if not is_trusted(type(owner))
        for name, buffer in owner._buffers.items()
        if buffer is None and name not in owner._non_persistent_buffers_set
    }
