"""Enums, named tuples and dataclasses of the user, without running their code.

A class is looked up among the modules that are imported already, and nothing of it is called: a
member of an enum is there, a named tuple is a tuple, a dataclass gets its fields put in place.
Where that would not be the same (a class with ways of its own to be pickled), it is left to pickle.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

from dcp_checkfreq.format.texts import name_of
from dcp_checkfreq.state.tags import Malformed, NotHere, need

KINDS = frozenset(["member", "flag", "namedtuple", "dataclass", "return type"])


def taken_apart(value: Any, *, is_key: bool) -> tuple[Any, ...] | None:
    """Return the kind and the plain content of a value; None if it is none of these."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return _enum(kind, value)
    if isinstance(value, tuple):
        if getattr(torch.return_types, kind.__name__, None) is kind:
            return ("return type", kind.__name__, *tuple(value))
        if _is_namedtuple(kind) and not (hasattr(value, "__dict__") and vars(value)):
            return _named("namedtuple", kind, tuple(value))
        return None
    if not is_key and _is_dataclass(kind):
        fields = _fields_of(value)
        return None if fields is None else _named("dataclass", kind, fields)
    return None


def put_together(kind: str, content: Sequence[Any], *, may_import: bool) -> Any:
    """Return the value of which `taken_apart` made this.

    Raises:
        NotHere: its class is not imported, or is another one now.
        Malformed: it did not.
    """
    if kind == "return type":
        name, *items = content
        made: Any = vars(torch.return_types).get(name) if type(name) is str else None
        need(isinstance(made, type) and hasattr(made, "n_sequence_fields"), "return type")
        return made(items)
    if len(content) != 3:
        raise Malformed(f"it has a {kind} that is none")
    module, name, state = content
    found = _class(module, name, may_import)
    if kind == "namedtuple":
        need(type(state) is tuple, kind)
        if not _is_namedtuple(found) or len(found._fields) != len(state):
            raise _other(module, name)
        return tuple.__new__(found, state)
    if kind == "dataclass":
        need(type(state) is dict, kind)
        if not _is_dataclass(found):
            raise _other(module, name)
        return _made_dataclass(found, state)
    if not isinstance(found, enum.EnumMeta):
        raise _other(module, name)
    if kind == "member":
        member = _dict_of(found)["_member_map_"].get(state) if type(state) is str else None
        if member is None:
            raise _other(module, name)
        return member
    need(type(state) is int, kind)
    if not _makes_flags(found):
        raise _other(module, name)
    try:
        return found(state)
    except (ValueError, TypeError) as error:
        raise _other(module, name) from error


def _other(module: str, name: str) -> NotHere:
    return NotHere(f"the class {module}.{name} has changed since"[:200])


def _named(tag: str, kind: type, content: Any) -> tuple[Any, ...] | None:
    module, name = kind.__module__, kind.__qualname__
    try:
        is_found = _class(module, name, False) is kind
    except NotHere:
        is_found = False
    return (tag, module, name, content) if is_found else None


def _class(module: Any, name: Any, may_import: bool) -> Any:
    need(type(module) is str and type(name) is str and len(module) + len(name) < 1000, "class")
    if may_import and module not in sys.modules:
        importlib.import_module(module)
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        if isinstance(found, type):
            found = _dict_of(found).get(part)
        elif type(found) is types.ModuleType:
            found = vars(found).get(part)
        else:
            found = None
    if not isinstance(found, type):
        raise NotHere(
            f"the class {module}.{name}"[:200] + " is not imported in this process: import it first"
        )
    return found


def _dict_of(kind: type) -> Any:
    """Return what is in a class, without asking its metaclass."""
    return type.__dict__["__dict__"].__get__(kind)


def _definition(kind: type, name: str) -> Any:
    """Return what a class or a base has under a name, as it is there."""
    return next((_dict_of(one)[name] for one in kind.__mro__ if name in _dict_of(one)), None)


def _is_pickled_as_objects_are(kind: type) -> bool:
    return all(
        _definition(kind, name) is object.__dict__.get(name)
        for name in ("__reduce__", "__reduce_ex__")
    )


# --- tensors ---


def is_tensor_class(kind: type) -> bool:
    """Tell whether a tensor of this class is one of torch's that says it is of the class."""
    if not issubclass(kind, torch.Tensor) or hasattr(kind, "__tensor_flatten__"):
        return False
    is_plain = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not is_plain or kind.__module__.partition(".")[0] == "torch":
        return False
    try:
        return _class(kind.__module__, kind.__qualname__, False) is kind
    except NotHere:
        return False


def tensor_class(module: Any, name: Any) -> type:
    """Return a class for which `is_tensor_class` holds.

    Raises:
        NotHere: it is not imported, or another one.
    """
    found: type = _class(module, name, False)
    if not is_tensor_class(found):
        raise _other(module, name)
    return found


# --- enums ---


def _enum(kind: type, value: enum.Enum) -> tuple[Any, ...] | None:
    name = vars(value).get("_name_")
    if _dict_of(kind)["_member_map_"].get(name) is value:
        return _named("member", kind, name)
    number = vars(value).get("_value_")
    if type(number) is int and _makes_flags(kind):
        return _named("flag", kind, number)
    return None


def _makes_flags(kind: type) -> bool:
    """Tell whether asking a class for a combination of flags runs nothing but `enum`."""
    if not issubclass(kind, enum.Flag) or type(kind) is not enum.EnumMeta:
        return False
    makes = [_definition(kind, name) for name in ("_new_member_", "__new_member__")]
    makes = [getattr(one, "__func__", one) for one in makes if one is not None]
    owner = next(one for one in kind.__mro__ if "_missing_" in _dict_of(one))
    return owner.__module__ == "enum" and all(one in (object.__new__, int.__new__) for one in makes)


# --- named tuples ---


def _is_namedtuple(kind: Any) -> bool:
    fields = _definition(kind, "_fields")
    return (
        issubclass(kind, tuple)
        and type(kind) is type
        and type(fields) is tuple
        and all(type(one) is str for one in fields)
        and _is_pickled_as_objects_are(kind)
        and _definition(kind, "__hash__") is tuple.__hash__
        and _definition(kind, "__eq__") is tuple.__eq__
    )


# --- dataclasses ---

_STATE_METHODS = ("__getstate__", "__setstate__")


def _is_dataclass(kind: Any) -> bool:
    return (
        type(_definition(kind, "__dataclass_fields__")) is dict
        and type(kind) is type
        and kind.__base__ is not None
        and all(
            one is object or "__dataclass_fields__" in _dict_of(one) or not _dict_of(one)
            for one in kind.__mro__[:-1]
        )
        and _is_pickled_as_objects_are(kind)
        and _definition(kind, "__new__") is object.__dict__["__new__"]
        and all(_is_dataclass_own(_definition(kind, name)) for name in _STATE_METHODS)
    )


def _is_dataclass_own(method: Any) -> bool:
    """Frozen dataclasses with slots have these from `dataclasses`; objects have one since 3.11."""
    return (
        method is None
        or method is object.__dict__.get("__getstate__")
        or getattr(method, "__module__", None) == "dataclasses"
    )


def _field_names(kind: type) -> list[str]:
    return [one.name for one in dataclasses.fields(kind)]


def _fields_of(value: Any) -> dict[str, Any] | None:
    """Return what is in the fields; None if there is more, or less, in it."""
    kind = type(value)
    names = _field_names(kind)
    inner = object.__getattribute__(value, "__dict__") if hasattr(value, "__dict__") else {}
    if not set(inner) <= set(names):
        return None
    found = {}
    for name in names:
        slot = _definition(kind, name)
        if type(slot) is types.MemberDescriptorType:
            try:
                found[name] = slot.__get__(value, kind)
            except AttributeError:
                return None
        elif name in inner:
            found[name] = inner[name]
        else:
            return None
    return found


def _made_dataclass(kind: type, state: dict[Any, Any]) -> Any:
    names = _field_names(kind)
    if set(state) != set(names):
        raise NotHere(f"the class {name_of(kind)}"[:200] + " has other fields now")
    made: Any = object.__new__(kind)
    for name in names:
        slot = _definition(kind, name)
        if type(slot) is types.MemberDescriptorType:
            slot.__set__(made, state[name])
        else:
            object.__getattribute__(made, "__dict__")[name] = state[name]
    return made
