"""Everything else as a part: an object with `state_dict`, or a plain value."""

from __future__ import annotations

import copy
import functools
from collections.abc import MutableMapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from dcp_checkfreq.errors import StateMismatch
from dcp_checkfreq.shards.boxes import Boxed
from dcp_checkfreq.shards.nesting import naming
from dcp_checkfreq.shards.self_described import describes_itself, size_in_checkpoint
from dcp_checkfreq.state.differences import Differences, listed
from dcp_checkfreq.state.generators import adopted, generators_kept
from dcp_checkfreq.state.packed import TENSORS, TREE, pack, tensors_in
from dcp_checkfreq.state.part import Undo, is_ours, is_trusted, tensor_described
from dcp_checkfreq.state.per_rank import PerRank, SplitsState, has_state_of_rank
from dcp_checkfreq.state.saved import Leaf, Lookup, Path, Renames, SavedState
from dcp_checkfreq.state.tree import tree_of
from dcp_checkfreq.state.unpacked import Make, unpacked_from
from dcp_checkfreq.state.wanted import AnyWanted, Wanted
from dcp_checkfreq.state.wrapper_kinds import Kinds


class ValuePart:
    """A registered object or value.

    Args:
        name: of the part.
        parts: the registered ones. A restored plain value is put in here.
        rank: of this process.
    """

    def __init__(self, name: str, parts: MutableMapping[str, Any], rank: int) -> None:
        self.name = name
        self._parts = parts
        self._rank = rank

    @property
    def value(self) -> Any:
        """The object or value itself."""
        part = self._parts[self.name]
        return part.value if isinstance(part, PerRank) else part

    @value.setter
    def value(self, value: Any) -> None:
        part = self._parts[self.name]
        if isinstance(part, PerRank):
            part.value = value
        else:
            self._parts[self.name] = value

    @property
    def key(self) -> str:
        """What DCP knows the part by: one for each rank if each keeps a value of its own.

        What belongs to the rank of a part that is one for all (`SplitsState`) has a second key.
        """
        return self._key_of_rank(self.name) if self._is_per_rank else self.name

    @property
    def _is_per_rank(self) -> bool:
        return isinstance(self._parts[self.name], PerRank)

    def _key_of_rank(self, name: str) -> str:
        return f"{name}/rank{self._rank}"

    @property
    def is_own_kind(self) -> bool:
        """Whether it is a `PerRank` that does more than hold a value."""
        part = self._parts[self.name]
        return isinstance(part, PerRank) and type(part) is not PerRank

    @property
    def is_made_anew(self) -> bool:
        """Whether it is one of this package, which makes a new value whenever it is asked."""
        return self.is_own_kind and is_ours(type(self._parts[self.name]))

    def capture(self) -> dict[str, Any]:
        """Return the packed state, without what belongs to this rank only."""
        return self.capture_by_key()[self.key]

    def capture_by_key(self) -> dict[str, dict[str, Any]]:
        """Return the packed state; what belongs to this rank under a key of its own."""
        return {key: self.packed(state) for key, state in self._states().items()}

    def packed(self, state: Any) -> dict[str, Any]:
        """Return a state of this part as it is saved."""
        with naming(lambda: state, self.name):
            return pack(state)

    def _states(self) -> dict[str, Any]:
        """Return the state by key; the value is asked once."""
        value = self.value
        if isinstance(value, SplitsState) and not self._is_per_rank:
            common, of_rank = value.split_state_dict()
            own = {self._key_of_rank(self.name): of_rank} if of_rank else {}
            return {self.key: common, **own}
        return {self.key: value.state_dict() if isinstance(value, Stateful) else value}

    def is_empty(self) -> bool:
        """Tell whether there is nothing to save: never, None is a value."""
        return False

    def describe(self) -> list[object]:
        """Return what kind it is."""
        value = self._parts[self.name]
        if isinstance(value, torch.Tensor):
            return tensor_described(value)
        return [type(value).__qualname__]

    def fill(
        self, saved: SavedState, renames: Renames, wanted: Wanted
    ) -> tuple[ValueFill | AbsentFill, Differences]:
        """See `Part.fill`."""
        lookup = Lookup(saved, renames)
        places = {} if self._is_per_rank else {self.name: self.name}
        if has_state_of_rank(self._parts[self.name]):
            saved_name, _ = renames.saved_name(self.name)
            places[self._key_of_rank(self.name)] = self._key_of_rank(saved_name)
        if isinstance(self.value, SplitsState):  # it may have been saved with or without `PerRank`
            places = {self.name: self.name, **places}
        found = {
            key: [*tree, *lookup.claim(place, TENSORS)]
            for key, place in places.items() if (tree := lookup.claim(place, TREE))
        }  # fmt: skip
        if not found:
            part = self._parts[self.name]
            if isinstance(part, PerRank):
                return AbsentFill(part, self._rank), Differences()
            raise StateMismatch(
                saved.where,
                f"{self.name!r} was not saved as a value, but as something else: "
                f"{listed([leaf.key for leaf in lookup.unclaimed()]) or 'nothing'}",
            )
        states = self._states()
        pieces = [_want_all(leaves, states.get(key), wanted) for key, leaves in found.items()]
        kinds = Kinds(tensors_in(list(states.values())))
        make = functools.partial(kinds.made, where=saved.where, key=self.name)
        return ValueFill(self, pieces, make, saved.where), Differences()

    def kept(self) -> dict[str, Any]:
        """Return a copy of the whole state of an object, as its `load_state_dict` takes it."""
        return copy.deepcopy(_whole(list(self._states().values())))


def _whole(pieces: list[Any]) -> Any:
    """Return one state: what all ranks have in common, and what belongs to this rank."""
    whole = pieces[0]
    for piece in pieces[1:]:
        if isinstance(whole, dict) and isinstance(piece, dict):
            whole = {**whole, **piece}
    return whole


Piece = list[tuple[Path, AnyWanted]]


def _want_all(leaves: list[Leaf], state: Any, wanted: Wanted) -> Piece:
    live = pack(state)[TENSORS]
    piece: Piece = []
    for leaf in leaves:
        number = leaf.path[1] if len(leaf.path) > 1 else None
        is_known = isinstance(number, int) and number < len(live)
        piece.append((leaf.path, _want(leaf, live[number] if is_known else None, wanted)))
    return piece


def _want(leaf: Leaf, live: torch.Tensor | None, wanted: Wanted) -> AnyWanted:
    """Have a leaf loaded: like the tensor that is there now, if it is of the same size."""
    if not leaf.is_tensor:
        return wanted.value(leaf)
    kept: Any = leaf.kept
    if live is None or size_in_checkpoint(live) != kept.size:
        return wanted.tensor(leaf)
    if describes_itself(live) and not isinstance(live, Boxed):
        return wanted.shards(leaf, live)
    one = wanted.tensor(leaf, live)
    one.device = live.device
    return one


class ValueFill:
    """An object or value that is being restored."""

    def __init__(self, part: ValuePart, pieces: list[Piece], make: Make, where: str) -> None:
        self._part, self._pieces, self._make, self._where = part, pieces, make, where
        self._loaded: Any = None
        self.claimed: set[str] = set()

    def check(self) -> None:
        """Put the value together; as it replaces another one, it fits.

        Raises:
            StateMismatch: it has a wrapper subclass that is not known here.
            BrokenShard: its parts do not belong together.
        """
        self._loaded = _whole([self._unpacked(piece) for piece in self._pieces])

    def _unpacked(self, piece: Piece) -> Any:
        packed = tree_of(piece)
        packed = {TREE: packed[TREE], TENSORS: packed.get(TENSORS, [])}
        return unpacked_from(packed, self._part.name, self._where, self._make)

    @property
    def may_fail(self) -> bool:
        """Whether there is an object that loads its state itself."""
        value = self._part.value
        if self._part.is_own_kind:
            return True
        return isinstance(value, Stateful) and not is_trusted(type(value))

    def keep(self) -> Undo:
        """Keep a copy of what is there now."""
        part, value = self._part, self._part.value
        if not isinstance(value, Stateful):
            undo = generators_kept(value)

            def put_back() -> None:
                part.value = value
                undo()

            return put_back
        state = part.kept()
        return lambda: value.load_state_dict(state)

    def put(self) -> None:
        """Hand the state to the object, or put the value in the place of the one before."""
        value, loaded = self._part.value, self._loaded
        if isinstance(value, Stateful):
            value.load_state_dict(loaded)
        else:
            self._part.value = adopted(loaded, value)


class AbsentFill:
    """A value of each rank, of which the checkpoint has none for this one."""

    def __init__(self, part: PerRank, rank: int) -> None:
        self._part, self._rank = part, rank
        self.claimed: set[str] = set()
        self.step = 0

    def check(self) -> None:
        """There is nothing to fit."""

    may_fail = True

    def keep(self) -> Undo:
        """Keep what is there now."""
        value = self._part.value
        if not isinstance(value, Stateful):
            return lambda: setattr(self._part, "value", value)
        state = copy.deepcopy(value.state_dict())
        return lambda: value.load_state_dict(state)

    def put(self) -> None:
        """Tell the part that the checkpoint has nothing for this rank."""
        self._part.absent(self._rank, self.step)
