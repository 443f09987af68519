"""What a checkpoint holds, by part."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from dcp_checkfreq.state.names import by_name_without_wrappers, without_wrappers

Path = tuple[str | int, ...]
Kept = TensorStorageMetadata | BytesStorageMetadata


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor or byte item of a checkpoint."""

    key: str  # DCP's flat key
    path: Path  # below its part; the keys of dicts as text, places in lists as numbers
    kept: Kept

    @property
    def is_tensor(self) -> bool:
        """Whether it was saved as a tensor."""
        return isinstance(self.kept, TensorStorageMetadata)


class SavedState:
    """The leaves of a checkpoint, by the part that they belong to, in the order of its metadata.

    Args:
        metadata: of the checkpoint.
        where: it is, for errors.
    """

    def __init__(self, metadata: Metadata, where: str) -> None:
        self.where = where
        self.parts: dict[str, list[Leaf]] = {}
        known = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
        for key, kept in metadata.state_dict_metadata.items():
            part, *below = _path_of(key, known.get(key))
            self.parts.setdefault(str(part), []).append(Leaf(key, tuple(below), kept))

    def with_leaves(self, part: str, leaves: list[Leaf]) -> SavedState:
        """Return the same checkpoint with other leaves of one part."""
        other = copy.copy(self)
        other.parts = self.parts | {part: leaves}
        return other


def _path_of(key: str, known: object) -> Path:
    """Return the path of a flat key: as DCP's planner has noted it, or up to the first dot."""
    if isinstance(known, tuple) and known and ".".join(map(str, known)) == key:
        return known
    part, dot, rest = key.partition(".")
    return (part, rest) if dot else (part,)


class Renames:
    """What parts and tensors are called in the checkpoint, where that differs from here.

    Args:
        rename: name here to name in the checkpoint: ``{"ema": "model"}``, or of anything below,
            up to a dot: ``{"model.body": "model.encoder"}``. The longest that fits counts.
    """

    def __init__(self, rename: Mapping[str, str] | None = None) -> None:
        self._rename = dict(rename or {})

    def saved_name(self, name: str) -> tuple[str, str]:
        """Return the part of the checkpoint that holds ``name``, and what it is called in there."""
        prefix = name
        while prefix not in self._rename:
            prefix, dot, _ = prefix.rpartition(".")
            if not dot:
                break
        else:
            name = self._rename[prefix] + name[len(prefix) :]
        part, _, rest = name.partition(".")
        return part, rest

    def reaches_into(self, part: str) -> bool:
        """Tell whether something below a part is called otherwise."""
        return any(name.startswith(f"{part}.") for name in self._rename)


class Lookup:
    """Finds the saved leaves of what is here now, under today's or older names.

    Args:
        saved: the checkpoint.
        renames: what was called otherwise.
        first: what the paths begin with, before the name.
    """

    def __init__(self, saved: SavedState, renames: Renames, first: Path = ()) -> None:
        self._saved, self._renames, self._first = saved, renames, first
        self._by_name: dict[str, dict[str, list[Leaf]]] = {}
        self._by_bare_name: dict[str, Mapping[str, str]] = {}
        self._consulted: dict[tuple[str, str], None] = {}  # saved parts, and names to begin with
        self._claimed: set[str] = set()

    def _names(self, part: str) -> dict[str, list[Leaf]]:
        names = self._by_name.get(part)
        if names is None:
            names = self._by_name[part] = {}
            depth = len(self._first)
            for leaf in self._saved.parts.get(part, ()):
                if leaf.path[:depth] == self._first and len(leaf.path) > depth:
                    names.setdefault(str(leaf.path[depth]), []).append(leaf)
        return names

    def claim(self, part: str, name: str) -> list[Leaf]:
        """Return the leaves of ``name`` of a part, and claim them; none if it was not saved."""
        saved_part, saved_name = self._renames.saved_name(f"{part}.{name}")
        names = self._names(saved_part)
        self._consulted[saved_part, _prefix(saved_name, name)] = None
        found = names.get(saved_name)
        if found is None:
            bare = self._by_bare_name.get(saved_part)
            if bare is None:
                bare = self._by_bare_name[saved_part] = by_name_without_wrappers(names)
            old = bare.get(without_wrappers(saved_name))
            found = names[old] if old is not None else []
        self._claimed.update(leaf.key for leaf in found)
        return found

    def unclaimed(self) -> list[Leaf]:
        """Return the leaves that `claim` has not returned, of the parts in which it has looked."""
        left: dict[str, Leaf] = {}
        for part, prefix in self._consulted:
            for name, leaves in self._names(part).items():
                if not prefix or name == prefix or name.startswith(f"{prefix}."):
                    left.update((leaf.key, leaf) for leaf in leaves)
        return [leaf for key, leaf in left.items() if key not in self._claimed]


def _prefix(saved_name: str, name: str) -> str:
    """Return what a saved name begins with, without the end that it shares with the name here."""
    ours, theirs = name.split("."), saved_name.split(".")
    while ours and theirs and ours[-1] == theirs[-1]:
        ours.pop()
        theirs.pop()
    return ".".join(theirs)
