"""Looks at a byte item before torch loads it: sizes first, then what its pickle would do. Pure.

torch's safe unpickler calls nothing that it does not know. But what it knows is enough to take any
memory and time: ``bytearray(10**12)``, ``set(range(10**12))``, a tuple of shared tuples as a key, a
compressed archive. So the archive is checked for what `torch.save` writes, and its pickle is
followed with sizes in place of values.
"""

from __future__ import annotations

import operator
import pickletools
import struct
from dataclasses import dataclass, field
from typing import Any

from dcp_checkfreq.format.numpy_checks import (
    NotPlain,
    check_dtype_name,
    check_dtype_state,
    check_shape,
)
from dcp_checkfreq.format.opcodes import OddPickle

_DEEPEST = 400
_MOST_PARTS_OF_A_KEY = 1000
_MOST_COLLIDING = 64
_EASY = {  # opcodes that torch's unpickler knows and that need no second look
    "NONE": None,
    "NEWFALSE": False,
    "NEWTRUE": True,
}
_NUMBERS = {"BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1"}
_TEXTS = {"BINUNICODE", "SHORT_BINSTRING"}
_COPIES = {"list", "tuple", "set", "frozenset", "dict", "Counter", "OrderedDict"}
_HASHES = {"set", "frozenset", "dict", "Counter", "OrderedDict"}
_BUFFERS = {"bytes", "bytearray"}
# With the names that protocol 2 has for them.
_SCALARS = {"str", "unicode", "basestring", "int", "long", "float", "complex", "bool"}
_BUILTIN_MODULES = {"builtins", "__builtin__", "collections"}
_ENCODINGS = {"latin1", "latin-1", "ascii", "utf-8", "utf8"}


@dataclass(slots=True, eq=False)
class _Thing:
    """Something that the pickle makes: how much is in it, not what."""

    kind: str  # list, dict, tuple, range, name, object, dtype
    parts: list[Any] = field(default_factory=list)  # of lists and tuples; keys of dicts
    weight: int = 1  # parts of parts, each counted as often as it is mentioned; of tuples
    depth: int = 1
    name: tuple[str, str] = ("", "")


_MARK = _Thing("mark")


def pickles_of(data: memoryview) -> list[bytes]:
    """Return the pickles in an archive that holds no more than it has bytes, as torch's do.

    There is one. Readers take names in different ways, so all that could be meant are returned.

    Raises:
        OddPickle: it is compressed, cut, or anything that two readers could read in two ways.
    """
    end = len(data) - 22
    if end < 0 or bytes(data[:4]) != b"PK\x03\x04":
        raise OddPickle("it is no archive")
    try:
        mark, disks, count, _, size, start, comment = struct.unpack("<4sIHHIIH", data[end:])
        if mark != b"PK\x05\x06" or comment:
            raise OddPickle("its archive has no end")
        if end >= 76 and bytes(data[end - 20 : end - 16]) == b"PK\x06\x07":
            end = struct.unpack("<Q", data[end - 12 : end - 4])[0]
            if end > len(data) - 98 or bytes(data[end : end + 4]) != b"PK\x06\x06":
                raise OddPickle("its archive has no end")
            disks, count, _, size, start = struct.unpack("<QQQQQ", data[end + 16 : end + 56])
            if end + 56 != len(data) - 42:
                raise OddPickle("its archive has two ends")
        if disks or start + size != end:
            raise OddPickle("its archive is not in one piece")
        at, total = start, 0
        pickles = []
        for _ in range(count):
            if at + 46 > end:
                raise OddPickle("its archive is cut short")
            entry = struct.unpack("<4sHHHHHHIIIHHHHHII", data[at : at + 46])
            flags, method, packed, whole = entry[3], entry[4], entry[8], entry[9]
            names, extras, notes, place = entry[10], entry[11], entry[12], entry[16]
            extra = data[at + 46 + names : at + 46 + names + extras]
            whole, packed, place = _long_sizes(extra, whole, packed, place)
            name = bytes(data[at + 46 : at + 46 + names])
            at += 46 + names + extras + notes
            total += whole
            if entry[0] != b"PK\x01\x02" or method or flags & 1 or whole != packed:
                raise OddPickle("its archive is compressed")
            if place + packed > start or total > start:
                raise OddPickle("its archive holds more than it has bytes")
            if name.lower().endswith(b"data.pkl"):
                pickles.append(_content(data, place, whole, start))
        if at != end:
            raise OddPickle("its archive is not in one piece")
        if not pickles:
            raise OddPickle("its archive has no pickle")
        return pickles
    except struct.error as error:
        raise OddPickle("its archive is cut short") from error


def _content(data: memoryview, place: int, size: int, end: int) -> bytes:
    names, extras = struct.unpack("<HH", data[place + 26 : place + 30])
    begin = place + 30 + names + extras
    if begin + size > end:
        raise OddPickle("its archive is cut short")
    return bytes(data[begin : begin + size])


def _long_sizes(extra: memoryview, *sizes: int) -> tuple[int, ...]:
    """Return sizes, from the 64-bit field for those that are said to be there."""
    if 0xFFFFFFFF not in sizes:
        return sizes
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack("<HH", extra[at : at + 4])
        if kind == 1:
            values = iter(struct.iter_unpack("<Q", extra[at + 4 : at + 4 + length]))
            return tuple(next(values, (size,))[0] if size == 0xFFFFFFFF else size for size in sizes)
        at += 4 + length
    return sizes


def check_pickle(content: bytes) -> None:
    """Follow a pickle with sizes in place of values.

    Raises:
        OddPickle: running it would take more than a small multiple of its size.
    """
    try:
        _Follower(content).run()
    except OddPickle:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise OddPickle(f"its pickle is damaged ({str(error)[:100]})") from error


class _Follower:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._dicts: list[_Thing] = []
        self._left = 10_000 + 8 * len(content)  # bytes and elements that calls may copy

    def run(self) -> None:
        for opcode, argument, _ in pickletools.genops(self._content):
            if opcode.name == "STOP":
                for one in self._dicts:
                    _refuse_collisions(one.parts)
                return
            self._step(opcode.name, argument)
        raise OddPickle("its pickle is cut short")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _NUMBERS or name in _TEXTS:
            stack.append(argument)
        elif name in _EASY:
            stack.append(_EASY[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "EMPTY_SET"):
            stack.append(self._made(name.removeprefix("EMPTY_").lower()))
        elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(_tuple(self._above_mark() if name == "TUPLE" else self._pop(name[5:])))
        elif name in ("APPEND", "APPENDS"):
            items = self._pop("1") if name == "APPEND" else self._above_mark()
            stack[-1].parts.extend(items)
            stack[-1].depth = _depth_of(items, stack[-1].depth)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop("2") if name == "SETITEM" else self._above_mark()
            self._add_keys(stack[-1], items[::2])
            stack[-1].depth = _depth_of(items, stack[-1].depth)
        elif name == "GLOBAL":
            module, _, attribute = argument.partition(" ")
            stack.append(_Thing("name", name=(module, attribute)))
        elif name in ("REDUCE", "NEWOBJ"):
            function, arguments = self._pop("2")
            stack.append(self._called(function, arguments.parts))
        elif name == "BUILD":
            (state,) = self._pop("1")
            _check_state(stack[-1], state)
        elif name == "BINPERSID":
            self._pop("1")
            stack.append(_Thing("object"))
        elif name == "PROTO":
            if argument > 5:
                raise OddPickle(f"its pickle is of protocol {argument}, which there is not")
        else:
            raise OddPickle(f"its pickle has opcode {name}, which torch.save does not write")

    def _made(self, kind: str) -> _Thing:
        made = _Thing(kind)
        if kind == "dict":
            self._dicts.append(made)
        return made

    def _pop(self, count: str) -> list[Any]:
        items = self._stack[-int(count) :]
        if len(items) < int(count) or _MARK in items:
            raise OddPickle("its pickle is damaged")
        del self._stack[-int(count) :]
        return items

    def _above_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise OddPickle("its pickle is damaged")
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise OddPickle("its pickle copies its parts too often")

    def _add_keys(self, target: _Thing, keys: list[Any]) -> None:
        for key in keys:
            if isinstance(key, _Thing) and (
                key.weight > _MOST_PARTS_OF_A_KEY or key.depth > _DEEPEST
            ):
                raise OddPickle("its pickle has a key of too many parts")
            self._spend(key.weight // 2 if isinstance(key, _Thing) else 0)
        target.parts.extend(keys)

    def _called(self, function: _Thing, arguments: list[Any]) -> _Thing:
        module, name = function.name
        first: Any = arguments[0] if arguments else None
        if isinstance(first, _Thing):
            self._spend(len(first.parts))
        if name == "_rebuild_from_type_v2" and len(arguments) > 2:
            # It calls its first argument with its third.
            return self._called(first, arguments[2].parts)
        if name in ("range", "xrange"):
            return _Thing("range")
        if (module, name) == ("_codecs", "encode"):
            if str(arguments[-1]) not in _ENCODINGS:
                raise OddPickle("its pickle has an unusual encoding")
            self._spend(len(first))
            return _Thing("object")
        if module in _BUILTIN_MODULES:
            return self._called_builtin(name, first)
        if module.startswith("numpy"):
            return self._called_numpy(name, arguments)
        if module.startswith("torch") and name.endswith(("Tensor", "Storage")):
            raise OddPickle(f"its pickle calls {module}.{name}"[:200])
        return _Thing("object")

    def _called_numpy(self, name: str, arguments: list[Any]) -> _Thing:
        if name == "dtype":
            return _Thing("dtype", name=("dtype", check_dtype_name(arguments[0])))
        if name == "_reconstruct":
            kind, shape, _ = arguments
            if kind.name == ("numpy", "ndarray") and shape.parts == [0]:
                return _Thing("ndarray")
        elif name == "scalar":
            dtype, data = arguments
            if dtype.kind == "dtype" and data.kind == "object" and not _is_object(dtype):
                return _Thing("object")
        raise NotPlain(f"its pickle calls numpy's {name}"[:200])

    def _called_builtin(self, name: str, first: Any) -> _Thing:
        kind = first.kind if isinstance(first, _Thing) else ""
        if name in _BUFFERS:
            if isinstance(first, int):
                self._spend(first)
            elif isinstance(first, str):
                self._spend(len(first))
        if name in _SCALARS and kind not in ("", "object"):
            raise OddPickle(f"its pickle makes a {name} of a {kind}")
        if name in _COPIES | _BUFFERS and kind == "range":
            raise OddPickle(f"its pickle makes a {name} of a range")
        if name not in _COPIES:
            return _Thing("object")
        if isinstance(first, str):
            self._spend(len(first))
        parts = first.parts if isinstance(first, _Thing) else []
        if name == "tuple":
            return _tuple(parts)
        made = self._made("dict" if name in _HASHES else "list")
        made.weight = sum(part.weight for part in parts if isinstance(part, _Thing)) + len(parts)
        if name in _HASHES:
            pairs = name in ("dict", "OrderedDict") and kind == "list"
            self._add_keys(made, [part.parts[0] for part in parts] if pairs else parts)
        else:
            made.parts.extend(parts)
        return made


def _tuple(parts: list[Any]) -> _Thing:
    weight = 1 + len(parts) + sum(part.weight for part in parts if isinstance(part, _Thing))
    return _Thing("tuple", list(parts), min(weight, 1 << 60), _depth_of(parts, 1))


def _depth_of(parts: list[Any], at_least: int) -> int:
    depth = max((1 + part.depth for part in parts if isinstance(part, _Thing)), default=1)
    if depth > _DEEPEST:
        raise OddPickle("its pickle is nested too deeply")
    return max(at_least, depth)


def _check_state(target: Any, state: Any) -> None:
    """Refuse states that numpy would believe."""
    if not isinstance(target, _Thing) or target.kind not in ("dtype", "ndarray"):
        return
    if not isinstance(state, _Thing) or state.kind != "tuple":
        raise NotPlain("it has an array with another state")
    parts = state.parts
    if target.kind == "dtype":
        check_dtype_state(target.name[1], parts)
        if len(parts) == 9:
            _check_unit(parts[8])
        return
    _, shape, dtype, _, data = parts
    count = check_shape(shape.parts if shape.kind == "tuple" else [None])
    is_object = dtype.kind == "dtype" and _is_object(dtype)
    if dtype.kind != "dtype" or data.kind != ("list" if is_object else "object"):
        raise NotPlain("it has an array with another state")
    if is_object and len(data.parts) != count:
        raise NotPlain("it has an array of another number of objects")


def _check_unit(unit: Any) -> None:
    """Look at what follows the state of a dtype of dates: nothing or an empty dict, and a unit."""
    extra, (_, *counts) = unit.parts[0], unit.parts[1].parts
    numbers = [count for count in counts if type(count) is int and 0 < count < 1 << 31]
    is_empty = extra is None or (extra.kind == "dict" and not extra.parts)
    if not is_empty or len(unit.parts) != 2 or len(numbers) != 3:
        raise NotPlain("it has dates of another unit")


def _is_object(dtype: _Thing) -> bool:
    return dtype.name[1].lstrip("<>=|").startswith("O")


def _refuse_collisions(keys: list[Any]) -> None:
    """Keys can be made up so that all have one hash; a dict then compares each to each."""
    if len(keys) <= _MOST_COLLIDING:
        return
    hashes = sorted(hash(_value(key)) for key in keys if not isinstance(key, str))
    if any(map(operator.eq, hashes, hashes[_MOST_COLLIDING:])):
        raise OddPickle("its pickle has keys that are made up to collide")


def _value(key: Any) -> Any:
    if isinstance(key, _Thing):
        return tuple(map(_value, key.parts)) if key.kind == "tuple" else key
    return key
