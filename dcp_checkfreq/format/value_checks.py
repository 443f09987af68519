"""Refuses at the save what a restart would refuse, by the key of what is inside of a value."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from dcp_checkfreq.errors import LoadFailed, UnsupportedState
from dcp_checkfreq.format.digest import digest
from dcp_checkfreq.format.safe_bytes import load_object
from dcp_checkfreq.format.texts import name_of

_MOST_LOOKED_AT = 10_000  # parts of a refused value, to find the one that it is refused for
_SURELY_PLAIN = (str, int, float, bool, type(None))
_ADVICE = (
    "Save plain values, containers, tensors and numpy arrays (of an object of your own: "
    "`dataclasses.asdict`, its `state_dict()` or `.value`), or pass allow_pickle=True where it "
    "is saved and where it is loaded"
)


def _same(value: object) -> object:
    return value


def serialised(
    value: object, key: str, raw: object = None, form: Callable[[object], object] = _same
) -> io.BytesIO:
    """Return what `torch.save` makes of a value.

    Args:
        value: to save.
        key: of it.
        raw: the value in which to look for the part that cannot be saved, if it is another one.
        form: makes of a part of ``raw`` what is saved of it.

    Raises:
        UnsupportedState: it cannot be pickled. The key in it is that of the part which cannot.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except RecursionError:
        raise  # see `shards/nesting`
    except Exception as error:  # whatever a value of the user's raises when it is pickled
        look_in = value if form is _same else raw
        inner, part = _innermost(look_in, key, lambda one: _cannot_be_pickled(form(one)))
        why = f"it cannot be pickled ({error}). {_ADVICE.split(', or')[0]}"
        raise UnsupportedState(inner, _kind(part), why) from error
    return stream


class ValueChecks:
    """Looks at byte items before they are saved.

    It remembers what it has found good, so that a value that is saved again as it was costs
    no more than its digest.
    """

    def __init__(self) -> None:
        self._good: dict[str, int] = {}

    def check(
        self,
        key: str,
        stream: io.BytesIO,
        where: str,
        look_up: Callable[[], object],
        known_digest: int | None = None,
        form: Callable[[object], object] = _same,
    ) -> None:
        """Make sure that ``stream``, of `torch.save`, loads without running code.

        Args:
            key: of the value.
            stream: what is to be saved.
            where: it is to be saved.
            look_up: returns the value, to name the part of it that is refused.
            known_digest: of the stream, if it is known.
            form: makes of a part of the value what is saved of it.

        Raises:
            UnsupportedState: it does not. The key in it is that of the innermost part.
        """
        seen = digest(stream.getbuffer()) if known_digest is None else known_digest
        if self._good.get(key) == seen:
            return
        try:
            load_object(io.BytesIO(stream.getbuffer()), key, where, allow_pickle=False)
        except LoadFailed as error:
            value = look_up()
            inner, part = _innermost(value, key, lambda one: _is_refused(form(one)))
            why = f"restoring would refuse it: {error.why}. {_ADVICE}"
            raise UnsupportedState(inner, _kind(part), why) from error
        self._good[key] = seen


def _kind(value: object) -> str:
    return f"value of type {name_of(type(value))}".replace("builtins.", "")


def _innermost(value: object, key: str, is_bad: Callable[[object], bool]) -> tuple[str, object]:
    """Return the key of a part that is bad while none of its own parts is, and that part."""
    left = _MOST_LOOKED_AT
    above: set[int] = set()
    while True:
        above.add(id(value))
        for name, part in parts_of_value(value) or ():
            left -= 1
            if left < 0:
                return key, value
            if id(part) not in above and type(part) not in _SURELY_PLAIN and is_bad(part):
                key, value = f"{key}.{name}", part
                break
        else:
            return key, value


def parts_of_value(value: object) -> list[tuple[Any, object]] | None:
    """Return the names and the parts of a container, or of a dataclass; None of anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(enumerate(list(value)))
    if isinstance(value, SimpleNamespace) or hasattr(type(value), "__dataclass_fields__"):
        return [] if not hasattr(value, "__dict__") else list(vars(value).items())
    return None


def _cannot_be_pickled(value: object) -> bool:
    try:
        torch.save(value, io.BytesIO())
    except Exception:  # noqa: BLE001  the same as in `serialised`, for a part of it
        return True
    return False


def _is_refused(value: object) -> bool:
    stream = io.BytesIO()
    torch.save(value, stream)
    try:
        load_object(stream, "", "", allow_pickle=False)
    except LoadFailed:
        return True
    return False
