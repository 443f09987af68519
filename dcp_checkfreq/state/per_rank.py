"""`PerRank`: a value that each rank keeps for itself. `SplitsState`: one that does so in part."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


class PerRank:
    """Marks a value that each rank keeps for itself (random states, positions per rank).

    On another number of ranks, a rank that did not exist before keeps what it has, unless a
    subclass does better in `absent`.

    Args:
        value: a `Stateful` object, or a plain value; restored values are in ``value``.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        # An object that knows more about one rank than about all saves that, too, from now on.
        if callable(tell := getattr(value, "belong_to_rank", None)):
            tell()

    def absent(self, rank: int, step: int) -> None:
        """Act on a restore from ``step`` that has values of other ranks and none of this one."""


@runtime_checkable
class SplitsState(Protocol):
    """A `Stateful` object that separates what all ranks have in common from what only one has.

    The first is one for all ranks, as of any part; the second each rank keeps for itself.
    """

    def split_state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the common state, and that of this rank: empty if there is none.

        Their keys differ: `load_state_dict` gets both in one dict, or only the common ones if the
        checkpoint has none of this rank.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state."""
        ...


def has_state_of_rank(part: object) -> bool:
    """Tell whether a registered part keeps something for each rank."""
    return isinstance(part, (PerRank, SplitsState))
