"""A frozen dataclass of plain fields as JSON text that shows every damaged character. Pure."""

from __future__ import annotations

import enum
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar

LONGEST_TEXT = 64 * 1024  # a longer one is not ours

T = TypeVar("T")


def digest_of(plain: object, *, allow_nan: bool = True) -> str:
    """Return 64 hexadecimal digits: the same for equal JSON values, on every machine and Python."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=allow_nan)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def fingerprint(parts: Mapping[str, object] | Sequence[object]) -> str:
    """Return `digest_of` plain values: of None, bool, int, float, str, sequences and mappings.

    The order of a mapping does not matter, that of a sequence does. Tuples and lists are alike.

    Raises:
        TypeError: a value is none of these, or a key is not a str.
        ValueError: a float is NaN or infinite.
    """
    return digest_of(_listed(parts), allow_nan=False)


def _listed(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"the key {odd[0]!r} is not a str")
        return {key: _listed(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [_listed(inner) for inner in value]
    raise TypeError(f"{value!r} is not a plain value")


def to_text(value: Any, version: int) -> str:
    """Return a dataclass as text, which `from_text` turns back into an equal one.

    Fields are dataclasses, enums of text, texts, booleans, and numbers of at least 0; a number may
    be None where its type says so.

    Raises:
        ValueError: it holds a value that `from_text` would refuse.
    """
    body = asdict(value, dict_factory=_plain)
    _checked(type(value), body, type(value).__name__)
    body["version"] = version
    return json.dumps(body | {"digest": digest_of(body)}, indent=1, sort_keys=True) + "\n"


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: one.value if isinstance(one, enum.Enum) else one for key, one in items}


def from_text(kind: type[T], text: str, version: int) -> T:
    """Return the dataclass of this kind that ``text`` holds.

    Raises:
        ValueError: it is damaged, cut short, of another version, or holds a value that does not
            belong there; the message says which.
    """
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"{len(text)} characters are too many")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError("not a JSON object")
    digest, found = body.pop("digest", None), body.get("version")
    if type(found) is not int or found != version:
        raise ValueError(f"version {_short(found)}, this program reads {version}")
    try:
        if digest != digest_of(body):
            raise ValueError("the digest does not fit, it was damaged or edited")
        del body["version"]
        made: T = _checked(kind, body, kind.__name__)
    except (ArithmeticError, RecursionError) as error:  # numbers beyond floats, lists in lists
        raise ValueError(f"not one of ours: {error}") from error
    return made


def _checked(kind: Any, value: Any, name: str) -> Any:
    if is_dataclass(kind):
        wanted, make = typing.get_type_hints(kind), typing.cast("Any", kind)
        if not isinstance(value, dict):
            raise ValueError(f"{name} is not an object")
        if odd := sorted(value.keys() ^ wanted):
            raise ValueError(f"{name}: missing or unknown: {', '.join(map(_short, odd[:5]))}")
        return make(**{key: _checked(wanted[key], value[key], key) for key in wanted})
    if isinstance(kind, types.UnionType):  # or None
        return None if value is None else _checked(typing.get_args(kind)[0], value, name)
    if issubclass(kind, enum.Enum) and value in [one.value for one in kind]:
        return kind(value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is kind and (kind in (bool, str) or 0 <= value < math.inf):
        return value
    raise ValueError(f"{name} is {_short(value)}, which is no {kind.__name__} that can be")


def _short(value: object) -> str:
    return repr(value)[:80]
