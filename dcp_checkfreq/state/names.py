"""What a tensor of a module is called, whatever the module is wrapped in.

Torch calls that its fully qualified name (FQN). DDP, DataParallel, FSDP, `torch.compile` and
activation checkpointing put a module into another one, whose only child it is; the name of that
child is left out, in any nesting. Some wrappers leave it out of their state dict by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from dcp_checkfreq.state.differences import listed

# Class (it or a base, of torch's own) to the name of its child. Most have no public name.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "ActivationWrapper": "_checkpoint_wrapped_module",
}
_SEGMENTS = frozenset(_WRAPPERS.values())


def inner_of(module: object) -> tuple[str, nn.Module] | None:
    """Return the name of a wrapper's child, and the child; None for any other module."""
    for kind in type(module).__mro__:
        name = _WRAPPERS.get(kind.__name__)
        if name is not None and kind.__module__.partition(".")[0] == "torch":
            child = child_of(module, name)
            return None if child is None else (name, child)
        if kind is nn.Module:
            break
    return None


def child_of(module: object, name: str) -> nn.Module | None:
    """Return the child of a module that has this name. A ScriptModule's are not in a dict."""
    if not isinstance(module, nn.Module):
        return None
    children = vars(module).get("_modules", {})
    known: nn.Module | None = children[name] if name in children else None  # noqa: SIM401
    return known


def fqn_of(root: nn.Module, key: str) -> str:
    """Return the FQN of a key of the root's state dict, or of one of its parameters."""
    at: object = root
    kept: list[str] = []
    for segment in key.split("."):
        is_wrapper_s = False
        while (inner := inner_of(at)) is not None:
            name, at = inner
            if segment == name:
                is_wrapper_s = True
                break
        if is_wrapper_s:
            continue
        kept.append(segment)
        at = child_of(at, segment)
    return ".".join(kept)


def fqns_of(root: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    """Return the FQN of every key. Keys that would get the same FQN keep their own names."""
    found = {key: fqn_of(root, key) for key in keys}
    if len(set(found.values())) < len(found):
        taken: dict[str, list[str]] = {}
        for key, fqn in found.items():
            taken.setdefault(fqn, []).append(key)
        found = {key: fqn if len(taken[fqn]) == 1 else key for key, fqn in found.items()}
    return found


def without_wrappers(name: str) -> str:
    """Return a name as older versions may have saved it, without what wrappers may have added."""
    return ".".join(segment for segment in name.split(".") if segment not in _SEGMENTS)


def by_name_without_wrappers(names: Iterable[str]) -> Mapping[str, str]:
    """Return names by their form without wrappers, of those that still differ in it."""
    found: dict[str, str | None] = {}
    for name in names:
        bare = without_wrappers(name)
        found[bare] = None if bare in found else name
    return {bare: name for bare, name in found.items() if name is not None}


def why_nameless(
    parameters: Iterable[torch.Tensor], named: Mapping[int, str], modules: Mapping[str, nn.Module]
) -> str:
    """Return the text of an error about parameters of an optimizer that are in no module.

    Args:
        parameters: of the optimizer, in order.
        named: the FQNs of those that are in a module, by identity.
        modules: the registered ones.
    """
    nameless = [(number, one) for number, one in enumerate(parameters) if id(one) not in named]
    shapes = {one.shape for _, one in nameless}
    not_held = [
        f"{part}.{fqn_of(module, name)}"
        for part, module in modules.items()
        for name, one in module.named_parameters()
        if id(one) not in named and one.requires_grad and one.shape in shapes
    ]
    numbers = [f"number {number} of shape {list(one.shape)}" for number, one in nameless]
    text = (
        f"{len(nameless)} of its parameters are in none of the registered modules, so they have "
        f"no names to be saved under: {listed(numbers)}. Register the module too"
    )
    if not_held:
        text += (
            f". If a parameter was replaced after the optimizer was made, as {listed(not_held)} "
            "may have been, it holds the one before and does not train the new one: make it anew"
        )
    return text
