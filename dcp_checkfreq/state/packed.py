"""Values as DCP keeps them best: one byte item that is as it was, with large tensors next to it.

DCP takes dicts and lists apart, turns all keys into text and forgets tuples. What is in a tuple is
left alone, and so a packed value keeps key types, tuples and counters.

What the closed unpickler does not make (deques, paths, enums, generators, ...) is written as a
tagged tuple of plain values, ``(MARK, kind, ...)``, of which `unpacked` makes it again. Then the
tree says so (`TAGGED`); a tuple of a user's that looks like a tag is tagged itself. See decision
0029.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any

import torch

from dcp_checkfreq.format.value_checks import parts_of_value
from dcp_checkfreq.shards.self_described import describes_itself
from dcp_checkfreq.state import generators, tensor_kinds, user_classes, value_kinds
from dcp_checkfreq.state.wrappers import is_taken_apart, stored

TREE, TENSORS = "tree", "tensors"
MARK = "__dcp_checkfreq_kind__"
TAGGED = "__dcp_checkfreq_tagged_1__"  # behind the value in a tree with tags in it
SLOT = "__dcp_checkfreq_tensor__"
# Smaller tensors stay in the byte item: a file place of their own would cost more than they hold.
_OWN_ITEM_FROM_BYTES = 16 << 10
_AS_IT_IS = frozenset([str, float, bool, type(None), bytes, complex, torch.dtype])
# Pickle's LONG1 holds them, which is what torch's unpickler knows.
_TOO_LARGE = 1 << 2000
_SIMPLE = (str, int, bytes, float)


def pack(value: object) -> dict[str, Any]:
    """Return ``{"tree": (value without its large tensors,), "tensors": [those]}``."""
    packer = _Packer()
    tree = packer.packed(value)
    return {TREE: (tree, TAGGED) if packer.is_tagged else (tree,), TENSORS: packer.tensors}


def pack_if_needed(value: object) -> Any:
    """Return a value packed if DCP would not keep it as it is, else as it is."""
    if type(value) in _AS_IT_IS or (
        isinstance(value, torch.Tensor) and not tensor_kinds.is_odd(value)
    ):
        return value
    packed = pack(value)
    is_plain = len(packed[TREE]) == 1 and not packed[TENSORS]
    return value if is_plain and not isinstance(value, (dict, list, torch.Tensor)) else packed


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, where `pack` looks for them."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for _, inner in parts_of_value(value) or ():
            yield from tensors_in(inner)


def is_packed(value: object) -> bool:
    """Tell whether `pack` has made a value. Dicts of users are packed, so they do not look so."""
    if type(value) is not dict or set(value) != {TREE, TENSORS}:
        return False
    return is_tree(value[TREE]) and type(value[TENSORS]) is list


def keys_of(fqn: str, packed: Mapping[str, Any]) -> dict[str, str]:
    """Return the flat keys of a packed value under an FQN, and by each whose parts they are."""
    keys = TREE, TENSORS, *(f"{TENSORS}.{at}" for at in range(len(packed[TENSORS])))
    return {f"{fqn}.{one}": fqn for one in keys}


def is_tree(tree: Any) -> bool:
    """Tell whether `pack` has made a tree, or what looks like one."""
    if type(tree) is not tuple:
        return False
    return len(tree) == 1 or (len(tree) == 2 and type(tree[1]) is str and tree[1] == TAGGED)


class _Packer:
    """Packs one value. What is in it twice is once in the result, too."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.is_tagged = False
        # By identity: what was packed, which must stay alive, and what of it was made.
        self._known: dict[int, tuple[object, Any]] = {}
        self._known_keys: dict[int, tuple[object, Any]] = {}  # what is to be hashed

    def packed(self, value: Any, is_key: bool = False) -> Any:
        kind = type(value)
        if kind in _AS_IT_IS:
            return value
        if kind is int:
            is_large = not -_TOO_LARGE < value < _TOO_LARGE
            return self._tag("int", format(value, "x")) if is_large else value
        known_ones = self._known_keys if is_key else self._known
        known = known_ones.get(id(value))
        if known is None:
            known_ones[id(value)] = value, _Packer
            known = known_ones[id(value)] = value, self._made(kind, value, is_key)
        elif known[1] is _Packer:
            raise RecursionError("it holds itself")
        return known[1]

    def _made(self, kind: type, value: Any, is_key: bool) -> Any:
        if kind is dict and not is_key:
            return self._dict(value)
        if kind is list and not is_key:
            return self._list(value)
        if kind is tuple:
            items = tuple(self._list(value, is_key))
            is_like_ours = bool(items) and type(items[0]) is str and items[0] in (MARK, SLOT)
            return self._tag("tuple", items) if is_like_ours else items
        if kind in (set, frozenset):
            return self._set(kind, value, is_key)
        if isinstance(value, torch.Tensor):
            return value if is_key else self._tensor(value)
        container = _CONTAINERS.get(kind)
        if container is not None:
            return value if is_key else container(self, value)
        for source in (value_kinds, user_classes, generators):
            found = source.taken_apart(value, is_key=is_key)
            if found is not None:
                return self._tag(found[0], *self._tuple(found[1:], is_key))
        return value

    def _tag(self, kind: str, *content: Any) -> tuple[Any, ...]:
        self.is_tagged = True
        return (MARK, kind, *content)

    # These ask for the most common types first: most of what a large value holds is a leaf. They
    # are loops, as a comprehension is a frame more for each level of nesting.

    def _list(self, value: Any, is_key: bool = False) -> list[Any]:
        made = []
        for inner in value:
            made.append(inner if type(inner) in _AS_IT_IS else self.packed(inner, is_key))  # noqa: PERF401
        return made

    def _tuple(self, value: Any, is_key: bool) -> tuple[Any, ...]:
        return tuple(self._list(value, is_key))

    def _dict(self, value: Mapping[Any, Any]) -> dict[Any, Any]:
        made = {}
        for key, inner in value.items():
            hashed = key if type(key) in _AS_IT_IS else self.packed(key, True)
            made[hashed] = inner if type(inner) in _AS_IT_IS else self.packed(inner)
        return made

    def _set(self, kind: Any, value: Any, is_key: bool) -> Any:
        """The order of a set is that of hashes, which differ between processes."""
        items = self._tuple(value, True)
        if type(value) is kind and len(items) < 2 and all(map(is_, items, value)):
            return value
        kinds = set(map(type, items))
        if len(kinds) == 1 and kinds < set(_SIMPLE):
            ordered = sorted(items)
        else:
            ordered = sorted(items, key=lambda one: (type(one).__name__, repr(one)))
        return self._tag(kind.__name__, tuple(ordered) if is_key else dict.fromkeys(ordered))

    def _tensor(self, value: torch.Tensor) -> Any:
        dress = tensor_kinds.dress_of(value)
        parts = tensor_kinds.taken_apart(value)
        form: Any
        if parts is not None:
            form = self._tag(parts[0], *self._tuple(parts[1:], False))
        elif _fits_into_tree(value):
            form = value if dress is None else value.detach()
        else:
            kept: Any = stored(value)
            if is_taken_apart(kept):
                return self._dict(kept)
            form = (SLOT, len(self.tensors))
            self.tensors.append(kept)
        return form if dress is None else self._tag("dressed", form, *self._tuple(dress, False))

    # --- containers of the standard library ---

    def _ordered(self, value: collections.OrderedDict[Any, Any]) -> Any:
        made, was_tagged = self._dict(value), self.is_tagged
        same = all(map(is_, made, value)) and all(map(is_, made.values(), value.values()))
        if same and not vars(value):
            self.is_tagged = was_tagged
            return collections.OrderedDict(made)
        return self._tag("OrderedDict", made, self._dict(vars(value)))

    def _counter(self, value: collections.Counter[Any]) -> Any:
        made = self._dict(value)
        if vars(value):
            return value
        same = all(map(is_, made, value)) and all(map(is_, made.values(), value.values()))
        return collections.Counter(made) if same else self._tag("Counter", made)

    def _defaultdict(self, value: collections.defaultdict[Any, Any]) -> Any:
        factory = value.default_factory
        name = "" if factory is None else _FACTORY_NAMES.get(_id_of_type(factory))
        return value if name is None else self._tag("defaultdict", name, self._dict(value))

    def _deque(self, value: collections.deque[Any]) -> Any:
        return self._tag("deque", self._list(value), value.maxlen)

    def _chain(self, value: collections.ChainMap[Any, Any]) -> Any:
        return self._tag("ChainMap", self.packed(value.maps))

    def _namespace(self, value: types.SimpleNamespace) -> Any:
        return self._tag("SimpleNamespace", self._dict(vars(value)))

    def _proxy(self, value: Any) -> Any:
        return self._tag("mappingproxy", self._dict(value))


def _id_of_type(factory: object) -> object:
    return factory if isinstance(factory, type) else None


FACTORIES: dict[str, Any] = {
    one.__name__: one
    for one in (
        *(int, float, complex, bool, str, bytes, bytearray, list, tuple, dict, set, frozenset),
        *(collections.OrderedDict, collections.Counter, collections.deque),
        *(collections.defaultdict, types.SimpleNamespace),
    )
}
_FACTORY_NAMES: dict[Any, str] = {one: name for name, one in FACTORIES.items()}
_CONTAINERS: dict[type, Callable[[_Packer, Any], Any]] = {
    collections.OrderedDict: _Packer._ordered,
    collections.Counter: _Packer._counter,
    collections.defaultdict: _Packer._defaultdict,
    collections.deque: _Packer._deque,
    collections.ChainMap: _Packer._chain,
    types.SimpleNamespace: _Packer._namespace,
    types.MappingProxyType: _Packer._proxy,
}


def _fits_into_tree(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is small and plain; any other is looked at as an item of its own."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_meta or tensor.is_nested or describes_itself(tensor))
        and (
            tensor.is_quantized  # it has no bytes that DCP could write
            # A view keeps all that is behind it in a pickle.
            or max(tensor.nbytes, tensor.untyped_storage().nbytes()) < _OWN_ITEM_FROM_BYTES
        )
    )
