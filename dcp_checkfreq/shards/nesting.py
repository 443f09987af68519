"""Names what in a state holds itself, or is nested too deep for Python, DCP and pickles."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace

from dcp_checkfreq.errors import UnsupportedState
from dcp_checkfreq.format.texts import clipped

_LEVELS = 100  # everything up to here is saved, also from deep in a program


@contextlib.contextmanager
def naming(state: Callable[[], object], path: str = "") -> Iterator[None]:
    """If the body runs out of stack, raise `UnsupportedState` for the value that has caused it.

    Args:
        state: returns what the body goes through.
        path: of that.
    """
    try:
        yield
    except RecursionError:
        found = _too_deep(state(), path)
        if found is None:
            raise
        raise found from None  # the other has a thousand frames


def _too_deep(state: object, path: str) -> UnsupportedState | None:
    above: set[int] = set()  # what holds the one that is looked at
    seen: set[int] = set()
    waiting = [(path, state, False)]
    while waiting:
        path, value, is_left = waiting.pop()
        if is_left:
            above.discard(id(value))
            continue
        if id(value) in above:
            return _refused(path, value, "it holds itself")
        inner = _inside(value)
        if inner is None or id(value) in seen:
            continue
        if len(above) > _LEVELS:
            return _refused(path, value, f"more than {_LEVELS} others hold it, one in the other")
        above.add(id(value))
        seen.add(id(value))
        waiting.append((path, value, True))
        waiting += [(f"{path}.{key}" if path else f"{key}", one, False) for key, one in inner]
    return None


def _inside(value: object) -> list[tuple[object, object]] | None:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple, deque)):
        return list(enumerate(value))
    if isinstance(value, SimpleNamespace) or dataclasses.is_dataclass(value):
        return list(getattr(value, "__dict__", {}).items())
    return None


def _refused(path: str, value: object, why: str) -> UnsupportedState:
    return UnsupportedState(clipped(path), type(value).__name__, why)
