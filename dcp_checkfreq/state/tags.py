"""What all makers of tagged values have in common."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

_MOST_COLLIDING = 64
# What makers raise for a value of another kind.
_NONE = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError)


class Malformed(ValueError):
    """A packed value that was not made by `pack`; the text says why and is short."""


class NotHere(Malformed):
    """A packed value of a user's class that is missing here, or is another one."""


class Room:
    """Stands for a tensor that is not loaded yet, and for a value that is made of one."""


def refuse_collisions(keys: Sequence[Any]) -> None:
    """Keys can be made up so that all have one hash; a dict then compares each to each.

    Raises:
        Malformed: they are.
    """
    try:
        hashes = sorted(map(hash, keys))
    except TypeError as error:
        raise Malformed("it has a key that cannot be one") from error
    if any(map(operator.eq, hashes, hashes[_MOST_COLLIDING:])):
        raise Malformed("it has keys that are made up to collide")


def made_of(make: Callable[[str, Sequence[Any]], Any], kind: str, content: Sequence[Any]) -> Any:
    """Return what is made of the content of a tag.

    Raises:
        Malformed: it is none of this kind.
    """
    try:
        return make(kind, content)
    except Malformed:
        raise
    except _NONE as error:
        raise Malformed(f"it has a {kind} that is none") from error


def need(condition: object, what: str) -> None:
    """Raise `Malformed` unless a condition holds."""
    if not condition:
        raise Malformed(f"it has a {what} that is none")
