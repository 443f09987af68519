"""Generators of random numbers of all kinds: which kind, their state, seeding them anew."""

from __future__ import annotations

import random
from typing import Any

import torch

from dcp_checkfreq.data.order.permutation import numpy_or_none


def kind_of(generator: object) -> str | None:
    """Return what a generator is, so that a state is not put into one of another kind.

    None: it is none that is known.
    """
    if isinstance(generator, random.Random):
        return "random.Random"
    if isinstance(generator, torch.Generator):
        return f"torch.Generator on {generator.device.type}"
    np = numpy_or_none()
    if np is not None and isinstance(generator, np.random.Generator):
        return type(generator.bit_generator).__name__
    if np is not None and isinstance(generator, np.random.RandomState):
        return "RandomState"
    return None


def state_of(generator: Any) -> Any:
    """Return its state, as `set_state` takes it."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_state(generator: Any, state: Any) -> None:
    """Put a state of the same kind into it."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def reseed(generator: Any, key: int) -> None:
    """Seed it with 64 bits."""
    if isinstance(generator, random.Random):
        generator.seed(key)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(key & 0xFFFFFFFF)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(key).state
    else:
        generator.seed(key >> 32)
