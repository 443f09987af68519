"""Fields of stand-ins, and of dicts, which were read as lists (see `opcodes.without_dicts`)."""

from __future__ import annotations

from itertools import chain
from typing import Any

from dcp_checkfreq.format import stand_ins as made
from dcp_checkfreq.format.opcodes import DICT_MARK, OddPickle
from dcp_checkfreq.format.texts import is_text, shown

_MISSING = object()


def kind_of(value: object) -> str:
    """Return what an error calls the kind of a value."""
    return f"a {type(value).__name__}".replace("a MadeBuiltin_", "a ")


def split(flat: Any, *, marked: bool = False) -> tuple[list[Any], list[Any]]:
    """Return keys and values of what was a dict; see `opcodes.without_dicts`."""
    if type(flat) is not list:
        raise OddPickle(f"{kind_of(flat)} is where a dict should be")
    keys, values = flat[::2], flat[1::2]
    if len(keys) == len(values) and tuple not in set(map(type, keys)):
        return keys, values
    keys, values = [], []
    waiting = iter(flat)
    for key in waiting:
        if type(key) is tuple and len(key) == 3 and key[2] is DICT_MARK:
            key, value, _ = key
        elif type(key) is tuple and len(key) == 2 and not marked:
            key, value = key
        else:
            value = next(waiting, _MISSING)
            if value is _MISSING:
                raise OddPickle("a key has no value")
        keys.append(key)
        values.append(value)
    return keys, values


def texts_and(flat: Any, *, marked: bool = False) -> dict[str, Any]:
    """Return what was a dict with texts for keys."""
    keys, values = split(flat, marked=marked)
    if not set(map(type, keys)) <= {str}:
        raise OddPickle("a key is no text")
    by_key = dict(zip(keys, values, strict=True))
    if not all(map(str.isascii, by_key)):
        for key in by_key:
            if not is_text(key):
                raise OddPickle(f"the key {shown(key)} is no text")
    return by_key


def fields_of(thing: Any, kind: type[made.Made], *, marked: bool = False) -> dict[str, Any]:
    """Return the state of an object."""
    if type(thing) is not kind or len(thing) != 1 or type(thing[0]) is not list:
        raise OddPickle(f"{kind_of(thing)} is not a whole {kind.__name__.removeprefix('Made')}")
    return texts_and(thing[0][1:], marked=True) if marked else texts_and(thing[0])


def columns_of(things: list[Any], kind: type[made.Made], names: list[str]) -> list[list[Any]]:
    """Return the values of each field of many objects; None for a field that one lacks.

    Nearly always all have all fields in this order, but for the last one; then no object costs
    a step in Python.
    """
    if set(map(type, things)) <= {kind} and set(map(len, things)) <= {1}:
        states = list(chain.from_iterable(things))
        if set(map(type, states)) <= {list}:
            width = 2 * len(names)
            last = [names[-1], None]
            states = [state + last if len(state) == width - 2 else state for state in states]
            if set(map(len, states)) <= {width}:
                every = list(chain.from_iterable(states))
                at = range(0, width, 2)
                if all(
                    every[n::width].count(name) == len(things)
                    for n, name in zip(at, names, strict=True)
                ):
                    return [every[n + 1 :: width] for n in at]
    rows = [fields_of(thing, kind) for thing in things]
    return [[row.get(name) for row in rows] for name in names]
