"""`PerRank`: a value that each rank keeps for itself."""

from __future__ import annotations

from typing import Any


class PerRank:
    """Marks a value that each rank keeps for itself (random states, positions per rank).

    On another number of ranks, a rank that did not exist before keeps what it has, unless a
    subclass does better in `absent`.

    Args:
        value: a `Stateful` object, or a plain value; restored values are in ``value``.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        # What can tell more about one rank than about all of them does so from now on.
        if callable(tell := getattr(value, "belong_to_rank", None)):
            tell()

    def absent(self, rank: int, step: int) -> None:
        """Act on a restore from ``step`` that has values of other ranks and none of this one."""
