"""What `ResumableIterator` has saved, read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcp_checkfreq.data.order.ranks import DataRank
from dcp_checkfreq.data.order.saved_position import parse, read_number, read_text
from dcp_checkfreq.data.wrap.made import Made
from dcp_checkfreq.data.wrap.trail import Comparison
from dcp_checkfreq.errors import DataStateError

_WHAT = "ResumableIterator"
OF_RANK = ("here", "roots", "trail")  # what only one rank knows


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved state. States of earlier versions have neither ``made`` nor what follows it.

    Attributes:
        epoch: of the next batch.
        batches: of that epoch, handed out to this rank.
        seed: of the random states.
        world_size: data-parallel ranks.
        dataset: what the user says the data is.
        made: what made the batches.
        roots: what each generator was seeded with, by path; None if it is not known.
        trail: digests of the batches, as `Trail.text` has them; None if they are not known.
        has_rank: what only this rank knows is in it, or there was only one.
        as_before: the epoch was begun by a version that set no generators but the process's own.
    """

    epoch: int
    batches: int
    seed: int
    world_size: int
    dataset: str
    made: Made
    roots: dict[str, int] | None
    trail: str | None
    has_rank: bool
    as_before: bool

    @staticmethod
    def of(text: object, of_rank: object = None, place: DataRank | None = None) -> Saved:
        """Read a state.

        Args:
            text: the state.
            of_rank: what only one rank knows, if it is kept apart.
            place: of this rank. What another one saved is left out.

        Raises:
            DataStateError: it is none, or of a newer format.
        """
        state = parse(text, _WHAT)
        if of_rank is not None and place is not None:
            own = parse(of_rank, _WHAT)
            of_whom = read_number(own, "rank", _WHAT), read_number(state, "world_size", _WHAT)
            if of_whom == (place.rank, place.world_size):
                state |= {key: own[key] for key in OF_RANK if key in own}
        batches = read_number(state, "batches", _WHAT)
        roots = _fields(state, "roots") if "roots" in state else None
        for path in roots or {}:
            read_number(roots or {}, path, _WHAT)
        trail = read_text(state, "trail", _WHAT) if batches and "trail" in state else None
        if trail is not None:
            try:
                Comparison(trail, batches)
            except ValueError as error:
                raise DataStateError(_WHAT, f"'trail' is damaged: {error}") from error
        return Saved(
            epoch=read_number(state, "epoch", _WHAT),
            batches=batches,
            seed=read_number(state, "seed", _WHAT),
            world_size=read_number(state, "world_size", _WHAT),
            dataset=read_text(state, "dataset", _WHAT),
            made={**_fields(state, "made"), **_fields(state, "here")},
            roots=roots,
            trail=trail,
            has_rank=roots is not None or state["world_size"] == 1,
            as_before="made" not in state or state.get("as_before") is True,
        )

    def samples_per_step(self) -> int | None:
        """Return how many samples all ranks together took, if it is known."""
        size = self.made.get("batch_size")
        return size * self.world_size if type(size) is int else None

    def workers_hint(self, present: Made) -> str:
        """Return what to say about the number of workers if a replay goes another way."""
        was, now = self.made.get("workers"), present.get("workers")
        if was is None or was == now:
            return ""
        return (
            f" (the number of workers was {was}, now it is {now}: random numbers that samples "
            "draw depend on it)"
        )


def _fields(state: dict[str, Any], key: str) -> dict[str, Any]:
    fields = state.get(key, {})
    if not isinstance(fields, dict):
        raise DataStateError(_WHAT, f"{key!r} must be a mapping, saved was {fields!r:.200}")
    return fields
