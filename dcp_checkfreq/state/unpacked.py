"""Values as they were, of what `packed` has made of them and storage has brought back.

It makes no class that is not named in `ALL_KINDS`, and believes nothing of what it is given.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

import torch

from dcp_checkfreq.errors import BrokenShard, UnsafePickle
from dcp_checkfreq.format.texts import clipped, shown
from dcp_checkfreq.state import generators, tensor_kinds, user_classes, value_kinds
from dcp_checkfreq.state.packed import FACTORIES, MARK, SLOT, TENSORS, TREE, is_tree
from dcp_checkfreq.state.tags import Malformed, NotHere, Room, made_of, refuse_collisions
from dcp_checkfreq.state.wrappers import is_taken_apart

# Makes a tensor of what `wrappers.stored` has made of one.
Make = Callable[[Mapping[str, Any]], Any]
# What makers of builtin values raise for arguments of other types, and what is nested too deep.
_MALFORMED = (TypeError, ValueError, LookupError, ArithmeticError, RecursionError, AttributeError)


def _left_apart(parts: Mapping[str, Any]) -> Any:
    return parts


def unpack(packed: Mapping[str, Any], make: Make = _left_apart, *, is_dressed: bool = True) -> Any:
    """Return the value of which `pack` made ``packed``.

    Args:
        packed: what it made.
        make: puts wrappers together; default: they stay dicts of their inner tensors.
        is_dressed: make parameters of what were parameters; else tensors are those in ``packed``.

    Raises:
        Malformed: nothing that `pack` makes.
    """
    tree = packed[TREE]
    return _Unpacker(packed[TENSORS], len(tree) == 2, is_dressed, make).unpacked(tree[0])


def check_loaded(tree: Any, key: str, where: str, *, may_import: bool = False) -> None:
    """Look at a tree that was loaded, before its tensors are.

    Args:
        tree: what was loaded; anything.
        key: of it.
        where: it was saved.
        may_import: modules of classes that are named in it.

    Raises:
        UnsafePickle: it needs a class that is not imported here, or is another one now.
        BrokenShard: it is nothing that `pack` makes.
    """
    if not (is_tree(tree) and len(tree) == 2):
        return
    try:
        _Unpacker(None, True, True, _left_apart, may_import=may_import).unpacked(tree[0])
    except NotHere as error:
        raise UnsafePickle(where, f"{shown(key)}: {error}") from error
    except _MALFORMED as error:
        problem = clipped(str(error) or type(error).__name__, 300)
        raise BrokenShard(where, f"{shown(key)} holds what no save has put there: {problem}") from (
            error
        )


def unpacked_from(packed: Mapping[str, Any], key: str, where: str, make: Make = _left_apart) -> Any:
    """Return the value of which `pack` made what was loaded.

    Raises:
        BrokenShard: nothing that `pack` makes.
    """
    try:
        return unpack(packed, make)
    except _MALFORMED as error:
        problem = clipped(str(error) or type(error).__name__, 300)
        raise BrokenShard(where, f"{shown(key)} holds what no save has put there: {problem}") from (
            error
        )


def _is_room(one: object) -> bool:
    """Tell whether one is a tensor that is not loaded yet, or a list with one, of a nested one."""
    return type(one) is Room or (type(one) is list and any(type(inner) is Room for inner in one))


_UNPACKING = object()


class _Unpacker:
    def __init__(
        self,
        tensors: list[torch.Tensor] | None,
        is_tagged: bool,
        is_dressed: bool,
        make: Make,
        *,
        may_import: bool = False,
    ) -> None:
        self._tensors, self._is_tagged, self._is_dressed = tensors, is_tagged, is_dressed
        self._make, self._may_import = make, may_import
        self._known: dict[int, tuple[object, Any]] = {}

    def unpacked(self, value: Any) -> Any:
        kind = type(value)
        if kind not in (dict, list, tuple, collections.OrderedDict, collections.Counter):
            return value
        known = self._known.get(id(value))
        if known is None:
            self._known[id(value)] = value, _UNPACKING
            known = self._known[id(value)] = value, self._made(kind, value)
        elif known[1] is _UNPACKING:
            raise Malformed("it holds itself")
        return known[1]

    def _made(self, kind: type, value: Any) -> Any:
        if kind is tuple:
            if len(value) == 2 and type(value[0]) is str and value[0] == SLOT:
                return self._of_slot(value[1])
            if self._is_tagged and value and type(value[0]) is str and value[0] == MARK:
                return self._of_tag(value)
            return self._tuple(value)
        if kind is list:
            return self._list(value)
        made = self._dict(value)
        if kind is not dict:
            return value if all(map(is_, made.values(), value.values())) else kind(made)
        return self._make(made) if is_taken_apart(made) else made

    def _list(self, value: Any) -> list[Any]:
        made = []
        for inner in value:
            made.append(self.unpacked(inner))  # noqa: PERF401  a frame less for each level
        return made

    def _tuple(self, value: Any) -> tuple[Any, ...]:
        return tuple(self._list(value))

    def _dict(self, value: Any) -> dict[Any, Any]:
        if type(value) is not dict and not isinstance(value, dict):
            raise Malformed("its content is no dict")
        keys = self._list(value)
        if not all(map(is_, keys, value)):
            refuse_collisions(keys)
        made = {}
        for key, inner in zip(keys, value.values(), strict=True):
            made[key] = self.unpacked(inner)
        if len(made) < len(value):
            raise Malformed("it has a key twice")
        return made

    def _of_slot(self, number: Any) -> Any:
        if self._tensors is None:
            return Room()
        if type(number) is not int or not 0 <= number < len(self._tensors):
            raise Malformed("it names a tensor that there is not")
        return self._tensors[number]

    def _of_tag(self, value: tuple[Any, ...]) -> Any:
        kind, content = value[1], value[2:]
        maker = _MAKERS.get(kind) if type(kind) is str else None
        if maker is not None:
            return maker(self, *content)
        content = self._tuple(content)
        if any(map(_is_room, content)):
            return Room()
        if kind == "dressed" and not self._is_dressed:
            return content[0]
        for source in (value_kinds, generators, tensor_kinds):
            if kind in source.KINDS:
                return made_of(source.put_together, kind, content)
        if kind in user_classes.KINDS:
            return user_classes.put_together(kind, content, may_import=self._may_import)
        raise Malformed("it has a value of a kind that this version does not know")

    def _set(self, kind: type, content: Any) -> Any:
        if type(content) not in (dict, tuple):
            raise Malformed("its content is no set")
        items = self._list(content)
        refuse_collisions(items)
        return kind(items)

    def _defaultdict(self, name: Any, content: Any) -> Any:
        factory = FACTORIES[name] if name else None
        return collections.defaultdict(factory, self._dict(content))

    def _deque(self, content: Any, longest: Any) -> Any:
        if type(content) is not list:
            raise Malformed("its content is no list")
        return collections.deque(self._list(content), longest)

    def _chain(self, content: Any) -> Any:
        if type(content) is not list or not all(isinstance(one, (dict, tuple)) for one in content):
            raise Malformed("its content is no list of dicts")
        return collections.ChainMap(*self._list(content))

    def _ordered(self, content: Any, attributes: Any) -> Any:
        made = collections.OrderedDict(self._dict(content))
        vars(made).update(self._dict(attributes))
        return made


_MAKERS: dict[str, Callable[..., Any]] = {
    "tuple": lambda self, content: self._tuple(content),
    "set": lambda self, content: self._set(set, content),
    "frozenset": lambda self, content: self._set(frozenset, content),
    "OrderedDict": _Unpacker._ordered,
    "Counter": lambda self, content: collections.Counter(self._dict(content)),
    "defaultdict": _Unpacker._defaultdict,
    "deque": _Unpacker._deque,
    "ChainMap": _Unpacker._chain,
    "SimpleNamespace": lambda self, content: types.SimpleNamespace(**self._dict(content)),
    "mappingproxy": lambda self, content: types.MappingProxyType(self._dict(content)),
}
# All that a tag may say it is.
ALL_KINDS = (
    frozenset(_MAKERS)
    | value_kinds.KINDS
    | user_classes.KINDS
    | generators.KINDS
    | tensor_kinds.KINDS
)
