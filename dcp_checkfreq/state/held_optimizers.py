"""Optimizers inside of others: wrappers, such as accelerate's, never call `Optimizer.__init__`."""

from __future__ import annotations

from torch.optim import Optimizer

from dcp_checkfreq.format.torch_private import is_initialised


def initialised_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer, or those that it hands its calls to, that can have hooks.

    An empty list if it calls no `Optimizer.__init__` anywhere: its steps call no hooks.
    """
    found: dict[int, Optimizer] = {}
    seen: set[int] = set()
    left = [optimizer]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if is_initialised(one):
            found[id(one)] = one
        else:
            left += [inner for inner in vars(one).values() if isinstance(inner, Optimizer)]
    return list(found.values())
