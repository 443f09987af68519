"""Value types of the standard library and of torch, as tags of plain values and back.

Only constructors of values are called, with texts and numbers of bounded length: nothing is opened,
imported or run.
"""

from __future__ import annotations

import array
import datetime
import decimal
import fractions
import ipaddress
import pathlib
import re
import sys
import uuid
import zoneinfo
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dcp_checkfreq.format.torch_private import MKLDNN_LAYOUT
from dcp_checkfreq.state.tags import Malformed, need

_LONGEST_TEXT = 10_000
_LARGEST_PART_BITS = 10_000  # of fractions: shortening them takes time with its square
_ZONE = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+){0,3}", re.ASCII)
_PATHS = {
    one.__name__: one
    for one in (
        *(pathlib.PurePosixPath, pathlib.PureWindowsPath),
        *(pathlib.PosixPath, pathlib.WindowsPath),
    )
}
_ADDRESSES: dict[str, Any] = {
    one.__name__: one
    for one in (
        *(ipaddress.IPv4Address, ipaddress.IPv4Network, ipaddress.IPv4Interface),
        *(ipaddress.IPv6Address, ipaddress.IPv6Network, ipaddress.IPv6Interface),
    )
}
_CONSTANTS = {"Ellipsis": ..., "NotImplemented": NotImplemented}
_TORCH_NAMES = (
    *("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged"),
    *("contiguous_format", "preserve_format", "channels_last", "channels_last_3d"),
    *("per_tensor_affine", "per_channel_affine", "per_tensor_symmetric", "per_channel_symmetric"),
    "per_channel_affine_float_qparams",
)
_TORCH = {name: getattr(torch, name) for name in _TORCH_NAMES if hasattr(torch, name)}
_TORCH |= {} if MKLDNN_LAYOUT is None else {"_mkldnn": MKLDNN_LAYOUT}
_TORCH_KINDS = {type(one) for one in _TORCH.values()}


def taken_apart(value: Any, *, is_key: bool) -> tuple[Any, ...] | None:
    """Return the kind and the plain content of a value; None if it is none of these."""
    kind = type(value)
    known = _TAKEN.get(kind)
    if known is not None:
        return known(value)
    if kind in _TORCH_KINDS:
        name = next((name for name, one in _TORCH.items() if one is value or one == value), None)
        return None if name is None else ("torch", name)
    return None


def put_together(kind: str, content: Sequence[Any]) -> Any:
    """Return the value of which `taken_apart` made this.

    Raises:
        Malformed: it did not; or what makes it raises (`made_of`).
    """
    try:
        return _MADE[kind](*content)
    except (NotImplementedError, OSError) as error:
        raise Malformed(f"it has a {kind} that this machine has not") from error


def _path(value: pathlib.PurePath) -> tuple[Any, ...] | None:
    return "path", type(value).__name__, str(value)


def _made_path(name: str, text: str) -> Any:
    return _PATHS[name](_text(text))


def _datetime(value: datetime.datetime) -> tuple[Any, ...] | None:
    # torch's protocol of pickle has no fold.
    if value.fold == 0 and _is_plain_zone(value.tzinfo):
        return None
    return "datetime", value.replace(tzinfo=None, fold=0), value.tzinfo, value.fold


def _time(value: datetime.time) -> tuple[Any, ...] | None:
    if value.fold == 0 and _is_plain_zone(value.tzinfo):
        return None
    return "time", value.replace(tzinfo=None, fold=0), value.tzinfo, value.fold


def _is_plain_zone(zone: datetime.tzinfo | None) -> bool:
    return zone is None or type(zone) is datetime.timezone


def _made_datetime(value: Any, zone: Any, fold: int) -> Any:
    need(type(value) in (datetime.datetime, datetime.time), "time")
    need(_is_plain_zone(zone) or type(zone) is zoneinfo.ZoneInfo, "time zone")
    return value.replace(tzinfo=zone, fold=fold)


def _zone(value: zoneinfo.ZoneInfo) -> tuple[Any, ...] | None:
    return ("zone", value.key) if value.key and _ZONE.fullmatch(value.key) else None


def _made_zone(key: str) -> Any:
    need(_ZONE.fullmatch(key), "time zone")
    return zoneinfo.ZoneInfo(key)


def _fraction(value: fractions.Fraction) -> tuple[Any, ...] | None:
    parts = value.numerator, value.denominator
    is_small = max(one.bit_length() for one in parts) <= _LARGEST_PART_BITS
    return ("Fraction", *parts) if is_small else None


def _made_fraction(above: int, below: int) -> Any:
    for one in (above, below):
        need(type(one) is int and one.bit_length() <= _LARGEST_PART_BITS, "fraction")
    return fractions.Fraction(above, below)


def _decimal(value: decimal.Decimal) -> tuple[Any, ...] | None:
    text = str(value)
    return ("Decimal", text) if len(text) <= _LONGEST_TEXT else None


def _array(value: array.array[Any]) -> tuple[Any, ...] | None:
    if sys.byteorder == "big":
        value = value[:]
        value.byteswap()
    return "array", value.typecode, value.itemsize, value.tobytes()


def _made_array(code: str, size: int, content: bytes) -> Any:
    made: array.array[Any] = array.array(code)
    need(made.itemsize == size and type(content) is bytes, "array")
    if code == "u":  # anything else in it would be no character
        content.decode("utf-32-le" if size == 4 else "utf-16-le", "surrogatepass")
    made.frombytes(content)
    if sys.byteorder == "big":
        made.byteswap()
    return made


def _made_int(text: str) -> int:
    need(type(text) is str and re.fullmatch("-?[0-9a-f]+", text), "number")
    return int(text, 16)


def _made_bytearray(content: bytes) -> bytearray:
    need(type(content) is bytes, "bytearray")
    return bytearray(content)


def _text(text: Any) -> str:
    need(type(text) is str and len(text) <= _LONGEST_TEXT, "text")
    return str(text)


_TAKEN: dict[type, Callable[[Any], tuple[Any, ...] | None]] = {
    **dict.fromkeys(_PATHS.values(), _path),
    **dict.fromkeys(_ADDRESSES.values(), lambda one: ("address", type(one).__name__, str(one))),
    **{type(one): lambda one: ("constant", repr(one)) for one in _CONSTANTS.values()},
    datetime.datetime: _datetime,
    datetime.time: _time,
    zoneinfo.ZoneInfo: _zone,
    decimal.Decimal: _decimal,
    fractions.Fraction: _fraction,
    uuid.UUID: lambda one: ("UUID", one.hex),
    array.array: _array,
    bytearray: lambda one: ("bytearray", bytes(one)),
}
_MADE: dict[str, Callable[..., Any]] = {
    "int": _made_int,
    "path": _made_path,
    "address": lambda name, text: _ADDRESSES[name](_text(text)),
    "constant": lambda name: _CONSTANTS[name],
    "datetime": _made_datetime,
    "time": _made_datetime,
    "zone": _made_zone,
    "Decimal": lambda text: decimal.Decimal(_text(text)),
    "Fraction": _made_fraction,
    "UUID": lambda text: uuid.UUID(_text(text)),
    "array": _made_array,
    "bytearray": lambda content: _made_bytearray(content),
    "torch": lambda name: _TORCH[name],
}
KINDS = frozenset(_MADE)
