"""Where the order of a loader comes from: its generators and samplers, found and set per epoch.

The process's own random states are set by `global_state`. This module finds the other generators:
one that is passed to a `DataLoader` or a sampler, or that a data set or a transform holds. Left
alone, such a generator continues from epoch to epoch, so a job that is restarted in a later epoch
would get the order of its first one.
"""

from __future__ import annotations

import copy
import functools
import logging
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from dcp_checkfreq.data.order.cursor import HasPosition
from dcp_checkfreq.data.order.permutation import derive, numpy_or_none
from dcp_checkfreq.data.random.generators import (
    kind_of,
    reseed,
    set_state,
    state_of,
)
from dcp_checkfreq.data.wrap.content import digest_of
from dcp_checkfreq.format.torch_private import end_workers

_MAX_OBJECTS = 20_000
_MAX_ITEMS = 256  # of one list or dict
_MAX_DEPTH = 8
_LOADER_PARTS = (
    "batch_sampler", "sampler", "generator", "dataset", "collate_fn", "worker_init_fn",
)  # fmt: skip
_PLAIN = (
    str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, logging.Logger,
    torch.Tensor, torch.dtype, torch.device, torch.nn.Module, torch.optim.Optimizer,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """One generator that the loader, or something in it, holds.

    Attributes:
        path: attributes that lead to it.
        kind: of generator.
        generator: itself.
        root: 64 bits that stand for what it was seeded with when the loader was wrapped.
    """

    path: str
    kind: str
    generator: Any
    root: int


class Sources:
    """All that decides about the order in a loader, as far as it can be found.

    Looks at attributes, items of containers, arguments of partials and what functions close over;
    not into modules and optimizers.

    Args:
        loader: the whole.
    """

    def __init__(self, loader: object) -> None:
        self._with_epoch: list[Any] = []
        self._found: list[Source] = []
        self.positioned: list[str] = []  # paths of what moves on by itself
        self.loaders: dict[str, DataLoader[Any]] = {}  # by path; "" is the whole
        self._first_states: list[Any] = []
        process_wide = _process_wide()
        for path, part in _walk(loader):
            kind = kind_of(part)
            if kind is not None:
                if not any(part is one for one in process_wide):
                    self._found.append(Source(path, kind, part, _root(part)))
                    self._first_states.append(copy.deepcopy(state_of(part)))
                continue
            if isinstance(part, DataLoader):
                self.loaders[path] = part
            if isinstance(part, HasPosition):
                self.positioned.append(path or type(part).__name__)
            # Deeper inside only what its class says: to ask some objects for a name is an error.
            asked = part if "." not in path else type(part)
            if callable(getattr(asked, "set_epoch", None)):
                self._with_epoch.append(part)

    def begin(
        self, epoch: int, key: int, roots: Mapping[str, int], *, as_before: bool = False
    ) -> None:
        """Set all of them for an epoch.

        Args:
            epoch: for those that need it.
            key: of this epoch.
            roots: of a saved state, by path, which count instead of those that were found.
            as_before: begin with what the generators were when they were found, as earlier versions
                did in their first epoch.
        """
        if as_before:
            for source, state in zip(self._found, self._first_states, strict=True):
                set_state(source.generator, state)
        for source in [] if as_before else self._found:
            root = roots.get(source.path, source.root)
            reseed(source.generator, derive(key, digest_of(source.path), root))
        for part in self._with_epoch:
            part.set_epoch(epoch)

    def end_workers(self) -> None:
        """Let loaders with persistent workers begin the epoch with new ones.

        They would keep their random states of the epoch before.
        """
        for loader in self.loaders.values():
            if loader.persistent_workers:
                end_workers(loader)

    def roots(self) -> dict[str, int]:
        """Return what each generator was seeded with, by path."""
        return {source.path: source.root for source in self._found}

    def left_alone_before(self) -> list[str]:
        """Return the paths of what earlier versions let continue from epoch to epoch."""
        persistent = [path or "loader" for path, one in self.loaders.items()
                      if one.persistent_workers]  # fmt: skip
        return [*self.roots(), *(f"persistent workers of {path}" for path in persistent)]

    def taken_over(self, saved: Mapping[str, int]) -> dict[str, int]:
        """Return the saved roots that count from now on.

        Only generators of torch reveal the seed that they were given. Others may not have been
        seeded at all, so they keep what they began with.
        """
        return {
            source.path: saved[source.path]
            for source in self._found
            if source.path in saved and not isinstance(source.generator, torch.Generator)
        }

    def changes(self, saved: Mapping[str, int]) -> list[str]:
        """Return what is another generator, or one that was given another seed, than was saved."""
        present = self.roots()
        changes = [
            f"there was a generator {path!r}, now there is none"
            for path in saved if path not in present
        ]  # fmt: skip
        for source in self._found:
            if source.path not in saved:
                changes.append(f"there is a generator {source.path!r} now, there was none")
            elif isinstance(source.generator, torch.Generator):
                was = saved[source.path]
                if was != source.root:
                    changes.append(
                        f"the seed of {source.path!r} was {was}, now it is {source.root}"
                    )
        return changes


def _root(generator: Any) -> int:
    if isinstance(generator, torch.Generator):
        return generator.initial_seed() & ((1 << 64) - 1)
    return digest_of(state_of(generator))


def _process_wide() -> list[object]:
    """Return the generators that `global_state` sets."""
    found: list[object] = [torch.default_generator]
    found.append(getattr(random.random, "__self__", None))
    np = numpy_or_none()
    if np is not None:
        found.append(getattr(np.random.rand, "__self__", None))
    return found


def _walk(root: object) -> Iterator[tuple[str, Any]]:
    """Yield what can be reached, once, with the shortest path to it."""
    waiting: deque[tuple[str, Any, int]] = deque([("", root, 0)])
    seen: dict[int, Any] = {}  # holds them, so that no number is given twice
    while waiting and len(seen) < _MAX_OBJECTS:
        path, part, depth = waiting.popleft()
        if id(part) in seen or isinstance(part, _PLAIN):
            continue
        seen[id(part)] = part
        yield path, part
        if depth < _MAX_DEPTH and kind_of(part) is None:
            for name, inner in _inside(part):
                waiting.append((f"{path}.{name}" if path else name, inner, depth + 1))


def _inside(part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, DataLoader):
        # Not what it keeps of the epoch that runs: workers, and copies in them.
        yield from ((name, getattr(part, name, None)) for name in _LOADER_PARTS)
        own = set(vars(part)) - {*_LOADER_PARTS, "_iterator"}
        yield from ((name, vars(part)[name]) for name in sorted(own) if not name.startswith("_"))
        return
    if isinstance(part, functools.partial):
        yield from (("func", part.func), ("args", part.args), ("keywords", part.keywords))
        return
    if isinstance(part, (types.MethodType, types.BuiltinMethodType)):
        yield "self", part.__self__
        return
    if isinstance(part, types.FunctionType):
        for name, cell in zip(part.__code__.co_freevars, part.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # empty: not assigned yet
                continue
        yield from ((f"default{n}", value) for n, value in enumerate(part.__defaults__ or ()))
        return
    if isinstance(part, dict):
        for number, (key, value) in enumerate(part.items()):
            if number >= _MAX_ITEMS:
                break
            yield str(key) if isinstance(key, (str, int)) else f"item{number}", value
    elif isinstance(part, (list, tuple)):
        yield from ((str(number), value) for number, value in enumerate(part[:_MAX_ITEMS]))
    fields = getattr(part, "__dict__", None)
    if isinstance(fields, dict):
        yield from fields.items()
    for kind in type(part).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(part, name):
                yield name, getattr(part, name)
