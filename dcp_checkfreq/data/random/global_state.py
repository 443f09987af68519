"""The process's random states: `random`, NumPy's legacy generator, torch's CPU generator."""

from __future__ import annotations

import random
from typing import Any

import torch

from dcp_checkfreq.data.order.permutation import numpy_or_none

GlobalState = tuple[Any, Any, torch.Tensor]


def seed_all(key: int) -> None:
    """Seed them with 64 bits; about 8 us together."""
    random.seed(key)
    # Both are MT19937 and read 32 bits of the seed: the same half would make the same numbers.
    torch.default_generator.manual_seed(key & 0xFFFFFFFF)  # torch.manual_seed takes 150 us
    np = numpy_or_none()
    if np is not None:
        np.random.seed(key >> 32)


def save() -> GlobalState:
    """Return what they are."""
    np = numpy_or_none()
    numpy_state = None if np is None else np.random.get_state(legacy=False)
    return random.getstate(), numpy_state, torch.default_generator.get_state()


def bring_back(saved: GlobalState) -> None:
    """Make them what they were."""
    python_state, numpy_state, torch_state = saved
    random.setstate(python_state)
    np = numpy_or_none()
    if np is not None:
        np.random.set_state(numpy_state)
    torch.default_generator.set_state(torch_state)
