"""What differs between ranks, by its inner paths, once a save has found that something does.

The plan of a save carries a digest for each key, and a plain value is one key. Only when digests
differ, a few ranks tell rank 0 what is in their values: a save that works pays nothing for it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from dcp_checkfreq.dcp.save_planner import CheckFreqSavePlanner
from dcp_checkfreq.errors import ReplicasDiffer
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.state.replica_paths import View, differences_of

_log = logging.getLogger(__name__)
_MOST_KEYS = 64  # that are looked into; the others are named as they are


@contextlib.contextmanager
def inner_paths_named(ranks: Ranks, planner: CheckFreqSavePlanner) -> Iterator[None]:
    """Put inner paths into the `ReplicasDiffer` that the body raises on all ranks.

    Args:
        ranks: all of which raise it, as DCP tells all what rank 0 has found.
        planner: of the save, with the state that was to be saved.
    """
    try:
        yield
    except ReplicasDiffer as error:
        named = _named(error, ranks, planner)
        raise named from error.__cause__


def _named(error: ReplicasDiffer, ranks: Ranks, planner: CheckFreqSavePlanner) -> ReplicasDiffer:
    keys = error.keys[:_MOST_KEYS]
    looking = {rank for held_by in error.ranks[:_MOST_KEYS] for rank in held_by}

    def look() -> dict[str, View]:
        return planner.look_into(keys) if ranks.rank in looking else {}

    def compare(views: list[dict[str, View]]) -> None:
        found = differences_of(list(enumerate(views)))
        rest = [(key, ()) for key in error.keys[_MOST_KEYS:]]
        raise ReplicasDiffer(error.where, error.keys, error.ranks, [*found, *rest])

    def unnamed(why: str) -> ReplicasDiffer:
        _log.warning("%s: what differs in these values is not known: %s", error.where, why)
        return ReplicasDiffer(error.where, error.keys, error.ranks)

    try:
        ranks.combine("finding out what differs between ranks", look, compare, wrap=unnamed)
    except ReplicasDiffer as named:
        return named
    raise error
