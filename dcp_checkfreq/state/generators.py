"""Generators of random numbers as plain values, and back into the live ones.

numpy believes any position in its state, also one behind its end: states are compared with those of
a generator that was made here before they are set.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcp_checkfreq.state.tags import need

KINDS = frozenset(["torch.Generator", "random.Random", "numpy.Generator", "numpy.RandomState"])
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_LARGEST = {"pos": 624, "buffer_pos": 4, "has_uint32": 1, "has_gauss": 1, "uinteger": (1 << 32) - 1}
_LARGEST_POOL, _MOST_SEEDS, _LARGEST_SEED_BITS = 64, 64, 4096


def taken_apart(value: Any, *, is_key: bool) -> tuple[Any, ...] | None:
    """Return the kind and the plain content of a generator; None if it is none of these."""
    kind = type(value)
    if kind is torch.Generator:
        return "torch.Generator", str(value.device), value.get_state()
    if kind is random.Random:
        return "random.Random", value.getstate()
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    if kind is numpy.RandomState:
        state = value.get_state(legacy=False)
        return ("numpy.RandomState", state) if state["bit_generator"] == "MT19937" else None
    if kind is numpy.Generator:
        bits = value.bit_generator
        name = type(bits).__name__
        if name in _BIT_GENERATORS and type(bits) is getattr(numpy, name):
            seeds = _seeds(bits)
            return None if seeds is None else ("numpy.Generator", name, bits.state, seeds)
    return None


def _seeds(bits: Any) -> tuple[Any, ...] | None:
    """Return what `spawn` makes others from."""
    seeds: Any = bits.seed_seq
    numpy: Any = sys.modules["numpy.random"]
    if type(seeds) is not numpy.SeedSequence:
        return None
    found = (seeds.entropy, tuple(seeds.spawn_key), seeds.pool_size, seeds.n_children_spawned)
    return found if _are_seeds(found) else None


def _are_seeds(seeds: Any) -> bool:
    if type(seeds) is not tuple or len(seeds) != 4:
        return False
    entropy, key, pool, spawned = seeds
    numbers = list(entropy) if type(entropy) in (list, tuple) else [entropy]
    if type(key) is not tuple or len(key) + len(numbers) > _MOST_SEEDS:
        return False
    return (
        all(
            type(one) is int and 0 <= one.bit_length() <= _LARGEST_SEED_BITS and one >= 0
            for one in (*numbers, *key, spawned)
        )
        and spawned < 1 << 32
        and type(pool) is int
        and 4 <= pool <= _LARGEST_POOL
    )


def put_together(kind: str, content: Sequence[Any]) -> Any:
    """Return a generator in this state.

    Raises:
        Malformed: it is none; or torch, numpy or Python raise (`made_of`).
    """
    made: Any
    if kind == "torch.Generator":
        device, state = content
        need(type(device) is str and len(device) < 100 and type(state) is torch.Tensor, kind)
        made = torch.Generator(device)
        made.set_state(state)
        return made
    if kind == "random.Random":
        (state,) = content
        _check_python_state(state)
        made = random.Random(0)
        made.setstate(state)
        return made
    import numpy.random

    if kind == "numpy.RandomState":
        (state,) = content
        made = numpy.random.RandomState(0)
        _check_like(made.get_state(legacy=False), state)
        made.set_state(state)
        return made
    name, state, seeds = content
    need(name in _BIT_GENERATORS and _are_seeds(seeds), kind)
    entropy, key, pool, spawned = seeds
    bits = getattr(numpy.random, name)(
        numpy.random.SeedSequence(
            entropy, spawn_key=key, pool_size=pool, n_children_spawned=spawned
        )
    )
    _check_like(bits.state, state)
    bits.state = state
    return numpy.random.Generator(bits)


def _check_python_state(state: Any) -> None:
    """Raise `Malformed` unless it is one of today's: Python walks through older ones unbounded."""
    need(type(state) is tuple and len(state) == 3 and state[0] == 3, "generator")
    _, numbers, gauss = state
    need(type(numbers) is tuple and len(numbers) == 625, "generator")
    need(all(type(one) is int and 0 <= one < 1 << 32 for one in numbers), "generator")
    need(gauss is None or type(gauss) is float, "generator")


def _check_like(own: Any, state: Any, name: str = "") -> None:
    """Raise `Malformed` unless a state is built as one that numpy has made itself."""
    need(type(state) is type(own), "generator")
    if type(own) is dict:
        need(set(own) == set(state), "generator")
        for key, value in own.items():
            _check_like(value, state[key], key)
    elif type(own) is int:
        need(0 <= state <= _LARGEST.get(name, (1 << 128) - 1), "generator")
    elif type(own) is str:
        need(own == state, "generator")
    elif type(own) is not float:
        need(state.dtype == own.dtype and state.shape == own.shape, "generator")


def take_over(live: Any, loaded: Any) -> bool:
    """Put a live generator into the state of another one; return whether they are alike."""
    kind = type(live)
    if kind is not type(loaded):
        return False
    if kind is torch.Generator:
        if live.device != loaded.device:
            return False
        live.set_state(loaded.get_state())
        return True
    if kind is random.Random:
        live.setstate(loaded.getstate())
        return True
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None or kind not in (numpy.Generator, numpy.RandomState):
        return False
    if kind is numpy.RandomState:
        state = loaded.get_state(legacy=False)
        if live.get_state(legacy=False)["bit_generator"] != state["bit_generator"]:
            return False
        live.set_state(state)
        return True
    ours, theirs = live.bit_generator, loaded.bit_generator
    # What it would spawn cannot be set: it matters to those who have done so.
    spawned = [getattr(one.seed_seq, "n_children_spawned", 0) for one in (ours, theirs)]
    if type(ours) is not type(theirs) or (any(spawned) and _seeds(ours) != _seeds(theirs)):
        return False
    ours.state = theirs.state
    return True


def is_generator(value: object) -> bool:
    """Tell whether a value is one of these."""
    if type(value) in (torch.Generator, random.Random):
        return True
    numpy: Any = sys.modules.get("numpy.random")
    return numpy is not None and type(value) in (numpy.Generator, numpy.RandomState)


def adopted(loaded: Any, live: Any) -> Any:
    """Return a loaded value with the generators of the live one, in the state that was loaded.

    They are looked for at the same place: others that hold them, such as a loader, continue
    with what was saved.
    """
    if is_generator(loaded):
        return live if is_generator(live) and take_over(live, loaded) else loaded
    kind = type(loaded)
    if kind is not type(live):
        return loaded
    if kind is dict:
        for key, one in loaded.items():
            if key in live:
                loaded[key] = adopted(one, live[key])
    elif kind is list:
        loaded[: len(live)] = [adopted(*pair) for pair in zip(loaded, live, strict=False)]
    elif kind is tuple and len(loaded) == len(live):
        made = tuple(adopted(*pair) for pair in zip(loaded, live, strict=True))
        return made if any(a is not b for a, b in zip(made, loaded, strict=True)) else loaded
    return loaded


def generators_kept(live: Any) -> Callable[[], None]:
    """Return how to put back the generators for which `adopted` looks."""
    found: list[tuple[Any, Any]] = []
    waiting = [live]
    while waiting:
        value = waiting.pop()
        if is_generator(value):
            kind, *content = taken_apart(value, is_key=False) or ("",)
            if kind:
                found.append((value, put_together(kind, content)))
        elif type(value) is dict:
            waiting += value.values()
        elif type(value) in (list, tuple):
            waiting += value

    def put_back() -> None:
        for one, before in found:
            take_over(one, before)

    return put_back
