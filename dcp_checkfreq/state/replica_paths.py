"""Where values that should be the same on all ranks differ.

A rank looks into a value: `look_into` makes a `View` of it, with a digest and a short text of every
part. Views are small, of plain data, and can be sent. `differences_of` compares those of several
ranks and names the inner paths that differ: `trainer.hooks[2].lr`.
"""

from __future__ import annotations

import decimal
import enum
import fractions
import pathlib
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_checkfreq.format.texts import clipped, name_of, shown
from dcp_checkfreq.format.value_checks import parts_of_value
from dcp_checkfreq.shards.codec import local_of
from dcp_checkfreq.state.packed import TENSORS, TREE, is_tree, pack
from dcp_checkfreq.state.saved import Path
from dcp_checkfreq.state.tree import nested
from dcp_checkfreq.state.unpacked import unpack
from dcp_checkfreq.state.value_digests import form_digest, value_digest

MOST_PARTS = 5_000  # that one rank lists; of further containers only the whole is listed
_LONGEST_TEXT = 40
_LONGEST_LIST = 1_000  # of simple values; a longer one is one part
_SIMPLE = (int, str, float, bool, type(None), bytes, complex)
# Their `repr` is short, and none of a user's.
_TEXTS_ARE_SHORT = {
    *(complex, bytes, decimal.Decimal, fractions.Fraction, uuid.UUID),
    *(pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
    *(torch.dtype, torch.device, torch.Size),
}

# A path, and what two ranks have there.
Difference = tuple[str, tuple[tuple[int, str], ...]]


@dataclass(slots=True)
class View:
    """What a rank tells of a value, or of a part of one.

    Attributes:
        digest: of the value; the same on two ranks if that is.
        text: a short one.
        parts: by what is added to the path, as in ``.lr`` or ``[2]``; None: it is not looked into.
    """

    digest: int
    text: str
    parts: dict[str, View] | None = None


_NOTHING = View(0, "nothing")


def look_into(
    state: Mapping[str, Any],
    paths: Mapping[str, Path],
    digests: Mapping[str, int],
    differing: Sequence[str],
) -> dict[str, View]:
    """Return views of what keys of a flat state belong to, by its path.

    Args:
        state: as DCP has flattened it.
        paths: of its keys.
        digests: of its values, as compared between ranks.
        differing: keys to look at; this rank need not have all. What is in tensors under other
            keys does not count.
    """
    views: dict[str, View] = {}
    packed_paths: dict[Path, None] = {}
    for key in filter(digests.__contains__, differing):
        path = paths.get(key, (key,))
        above = _packed_above(path, state, paths)
        if above is not None:
            packed_paths[above] = None
        else:
            views[text_of_path(path)] = View(digests[key], _short(state.get(key)))
    for above in packed_paths:
        inner = {
            key: path[len(above) :]
            for key, path in paths.items()
            if path[: len(above)] == above and key in state
        }
        packed = nested((path, state[key]) for key, path in inner.items())
        unseen = {key for key, path in inner.items() if path[0] == TENSORS} - set(differing)
        views[text_of_path(above)] = _view_of_packed(packed, {id(state[key]) for key in unseen})
    _shorten(views.values())
    return views


def differences_of(views: Sequence[tuple[int, Mapping[str, View]]]) -> list[Difference]:
    """Return where the views of ranks differ: each path once, with two ranks that differ there.

    Args:
        views: of ranks with different values, each with its rank, by path.
    """
    found: dict[str, Difference] = {}
    first: dict[str, tuple[int, View]] = {}
    for rank, of_rank in views:
        for path, view in of_rank.items():
            other_rank, other = first.setdefault(path, (rank, view))
            if other is view:
                continue
            for inner, left, right in _compared(path, other, view) or [(path, "", "")]:
                found.setdefault(inner, (inner, ((other_rank, left), (rank, right))))
    return list(found.values())


def text_of_path(path: Path) -> str:
    """Return a path as programs write it."""
    first, *others = path
    return str(first) + "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in others
    )


def _packed_above(path: Path, state: Mapping[str, Any], paths: Mapping[str, Path]) -> Path | None:
    """Return the path of the packed value that a leaf is of."""
    for length in range(1, len(path)):
        if path[length] not in (TREE, TENSORS):
            continue
        tree = (*path[:length], TREE)
        key = ".".join(map(str, tree))
        if paths.get(key) == tree and is_tree(state.get(key)):
            return path[:length]
    return None


def _view_of_packed(packed: dict[str, Any], unseen: set[int]) -> View:
    try:
        tensors = packed.get(TENSORS, [])
        value = unpack({TREE: packed[TREE], TENSORS: tensors}, is_dressed=False)
    except Exception:  # noqa: BLE001  of tensors that other ranks write, there is no content here
        value = packed[TREE][0]
    return _Look(unseen).view(value)


class _Look:
    """Looks into one value.

    Args:
        unseen: tensors of which the content does not count, by identity.
    """

    def __init__(self, unseen: set[int]) -> None:
        self._unseen = unseen
        self._known: dict[int, tuple[object, View]] = {}  # and what must stay alive

    def view(self, value: Any) -> View:
        if type(value) in _SIMPLE:
            return View(value_digest(value), _short(value))
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = value, self._made(value)
        return known[1]

    def _made(self, value: Any) -> View:
        kind = type(value)
        named = _named_parts(value)
        if named is not None:
            parts = {step: self.view(part) for step, part in named.items()}
            said = [(step, part.digest) for step, part in parts.items()]
            if not isinstance(value, OrderedDict):
                said.sort()
            return View(form_digest((name_of(kind), said)), f"a {kind.__name__}", parts)
        if isinstance(value, torch.Tensor) and id(value) in self._unseen:
            return View(form_digest((str(value.dtype), list(value.shape))), _short(value))
        if isinstance(value, torch.Tensor):
            value = local_of(value)
        packed = pack(value)
        return View(value_digest((packed[TREE], packed[TENSORS])), _short(value))


def _named_parts(value: Any) -> dict[str, object] | None:
    """Return the parts of a container by what is added to its path; None if it is none."""
    if isinstance(value, (set, frozenset)):
        return None
    parts = parts_of_value(value)
    if parts is None:
        return None
    if len(parts) > _LONGEST_LIST and all(type(part) in _SIMPLE for _, part in parts):
        return None
    if isinstance(value, Mapping):
        named = {_step(key): part for key, part in parts}
    elif isinstance(value, (list, tuple, deque)):
        fields = getattr(value, "_fields", ())
        is_named = len(fields) == len(parts) > 0
        named = {
            f".{fields[number]}" if is_named else f"[{number}]": part for number, part in parts
        }
    else:
        named = {f".{name}": part for name, part in parts}
    return named if len(named) == len(parts) else None  # two keys with one text


def _step(key: object) -> str:
    if type(key) is str and key and len(key) <= _LONGEST_TEXT and "." not in key:
        return f".{key}"
    if isinstance(key, enum.Enum):
        return f"[{type(key).__name__}.{key._name_}]"
    is_plain = type(key) in _SIMPLE or (
        type(key) is tuple and all(type(one) in _SIMPLE for one in key)
    )
    return f"[{clipped(repr(key), _LONGEST_TEXT)}]" if is_plain else f"[{shown(key)}]"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _short_of_tensor(value)
    if isinstance(value, (set, frozenset)):
        if len(value) <= 8 and all(type(one) in _SIMPLE for one in value):
            return clipped(f"{{{', '.join(sorted(map(repr, value)))}}}", _LONGEST_TEXT)
        return f"a {type(value).__name__} of {len(value)}"
    if type(value) in _TEXTS_ARE_SHORT:
        return clipped(repr(value), _LONGEST_TEXT)
    if type(value) in (list, tuple, deque) and len(value) > 8:
        return f"a {type(value).__name__} of {len(value)}"
    return clipped(shown(value), _LONGEST_TEXT)


def _short_of_tensor(value: torch.Tensor) -> str:
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and not (
        value.is_meta or value.is_quantized or value.is_nested
    )
    if is_plain and value.layout == torch.strided and value.numel() == 1:
        return f"tensor({value.item()})"
    return f"a tensor of shape {list(value.shape)}" if is_plain else f"a {type(value).__name__}"


def _shorten(views: Iterable[View]) -> None:
    """Drop the deepest parts, where there are more than can be listed."""
    left = MOST_PARTS
    waiting, seen = deque(views), set[int]()
    while waiting:
        view = waiting.popleft()
        if view.parts is None or id(view) in seen:
            continue
        seen.add(id(view))
        if len(view.parts) > left:
            view.parts = None
            continue
        left -= len(view.parts)
        waiting.extend(view.parts.values())


def _compared(path: str, left: View, right: View) -> list[tuple[str, str, str]]:
    """Return the inner paths at which two views differ, with the texts of both."""
    found: list[tuple[str, str, str]] = []
    waiting = [(path, left, right)]
    while waiting and len(found) < MOST_PARTS:  # a value that is in there twice has many paths
        at, one, other = waiting.pop()
        if one.digest == other.digest:
            continue
        mine, theirs = one.parts or {}, other.parts or {}
        differing = [
            (f"{at}{step}", mine.get(step, _NOTHING), theirs.get(step, _NOTHING))
            for step in dict.fromkeys([*mine, *theirs])
            if one.parts is not None and other.parts is not None
        ]
        differing = [(at, a, b) for at, a, b in differing if a.digest != b.digest]
        if differing:
            waiting += reversed(differing)
        else:  # they differ in kind or in order, or one of them was not looked into
            found.append((at, one.text, other.text))
    return found
