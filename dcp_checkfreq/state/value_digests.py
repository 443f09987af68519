"""Digests of values: the same in every process that holds the same value.

Those of pickles are not. The order of a set is that of hashes, which differ between processes. What
is in a value twice is written once where it is one object, and twice where it is an equal one. The
order of a dict's keys is no part of its value; that of an OrderedDict is.
"""

from __future__ import annotations

import collections
import copyreg
import io
import marshal
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dcp_checkfreq.format.digest import digest
from dcp_checkfreq.format.texts import name_of
from dcp_checkfreq.shards.codec import bytes_of, dense
from dcp_checkfreq.state.packed import MARK
from dcp_checkfreq.state.tensor_kinds import is_in_order

# What `marshal` writes bit for bit, and alike in all processes. Version 2 has no back references.
_SIMPLE = frozenset([int, str, float, bool, type(None), bytes, complex])
_TEXT = frozenset([str])
_VERSION = 2
_PROTOCOL = 2  # of reductions
_HOLDS_ITSELF = ("holds itself", 0)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_BY_NAME = (type, types.FunctionType)

_written = marshal.dumps

# A simple value is its own form. Of any other value it is a kind and a digest of the forms in it.
Form = Any


def value_digest(value: object) -> int:
    """Return a digest of anything that can be pickled."""
    try:
        form = _Forms().of(value)
    except RecursionError:  # pickles get deeper
        form = _by_bytes(value)
    return form_digest(form)


def form_digest(form: Form) -> int:
    """Return the digest of simple values in tuples and lists."""
    return digest(_written(form, _VERSION))


class _Forms:
    """Of one value. What is in it twice is looked at once."""

    def __init__(self) -> None:
        # By identity: the value, which must stay alive, and its form.
        self._known: dict[int, tuple[object, Form]] = {}

    def of(self, value: Any) -> Form:
        if type(value) in _SIMPLE:
            return value
        known = self._known.get(id(value))
        if known is None:
            self._known[id(value)] = value, _HOLDS_ITSELF
            known = self._known[id(value)] = value, self._made(type(value), value)
        return known[1]

    def _made(self, kind: type, value: Any) -> Form:
        if kind is dict:
            return "dict", digest(_written(self._pairs(value), _VERSION))
        if kind is list:
            return "list", digest(_written(self._all(value), _VERSION))
        if kind is tuple:
            if _is_ordered_tag(value):
                return "ordered", form_digest((self._in_order(value[2]), self.of(value[3])))
            return "tuple", form_digest(self._all(value))
        if isinstance(value, (set, frozenset)):
            items = sorted(_written(self.of(one), _VERSION) for one in value)
            return name_of(kind), form_digest((items, self.of(getattr(value, "__dict__", None))))
        if kind in _TENSORS:
            return self._tensor(value)
        if isinstance(value, _BY_NAME):
            return "name", form_digest((value.__module__, value.__qualname__))
        return self._object(kind, value)

    def _all(self, values: Iterable[Any]) -> list[Form]:
        values = list(values)
        if _SIMPLE.issuperset(map(type, values)):
            return values
        made = []
        for one in values:  # a frame less for each level than a comprehension
            made.append(one if type(one) in _SIMPLE else self.of(one))  # noqa: PERF401
        return made

    def _pairs(self, value: Mapping[Any, Any]) -> Form:
        if _TEXT.issuperset(map(type, value)):
            keys: Any = sorted(value)
            return keys, self._all(map(value.__getitem__, keys))
        pairs = [(_written(self.of(key), _VERSION), one) for key, one in value.items()]
        pairs.sort(key=lambda pair: pair[0])
        return [key for key, _ in pairs], self._all([one for _, one in pairs])

    def _in_order(self, value: Mapping[Any, Any]) -> Form:
        return self._all(value), self._all(value.values())

    def _tensor(self, value: torch.Tensor) -> Form:
        if value.is_meta or not is_in_order(value):
            return _by_bytes(value)
        said = type(value).__name__, str(value.dtype), list(value.shape), value.requires_grad
        return "tensor", form_digest((said, digest(bytes_of(dense(value.detach())))))

    def _object(self, kind: type, value: Any) -> Form:
        """Look at what a pickle would have of an object."""
        try:
            reduce = copyreg.dispatch_table.get(kind)
            made = value.__reduce_ex__(_PROTOCOL) if reduce is None else reduce(value)
        except Exception:  # noqa: BLE001  what pickles know otherwise how to write
            return _by_bytes(value)
        if isinstance(made, str):
            return "name", form_digest((name_of(kind), made))
        how, arguments, state, items, pairs = (*made, *[None] * 5)[:5]
        forms = [self.of(one) for one in (how, arguments, state)]
        forms.append(None if items is None else self._all(items))
        if pairs is not None:
            content = dict(pairs)
            is_ordered = isinstance(value, collections.OrderedDict)
            forms.append(self._in_order(content) if is_ordered else self._pairs(content))
        return name_of(kind), form_digest(forms)


def _is_ordered_tag(value: tuple[Any, ...]) -> bool:
    """Tell whether `pack` has made this of an OrderedDict."""
    if len(value) != 4 or type(value[0]) is not str or type(value[1]) is not str:
        return False
    return value[:2] == (MARK, "OrderedDict") and type(value[2]) is dict


def _by_bytes(value: object) -> Form:
    stream = io.BytesIO()
    torch.save(value, stream)
    return "bytes", digest(stream.getbuffer())
