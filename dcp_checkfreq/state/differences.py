"""What of a checkpoint and of the live state does not fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dcp_checkfreq.errors import StateMismatch


@dataclass(slots=True)
class Differences:
    """Of one part: names of tensors and values.

    Attributes:
        missing: in the live state, not in the checkpoint; these keep what they have.
        unexpected: in the checkpoint, not in the live state; these are not restored.
        cast: saved with another dtype, which the live tensor keeps.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.cast)

    def described(self, part: str) -> str:
        """Return a text that says all of it."""
        kinds = (
            ("the checkpoint lacks", self.missing),
            ("it holds more than is registered", self.unexpected),
            ("saved with another dtype", self.cast),
        )
        texts = [f"{what}: {listed(names)}" for what, names in kinds if names]
        return f"{part!r}: {'; '.join(texts)}"


def listed(names: Sequence[str]) -> str:
    """Return some names, and how many there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def shapes_differ(name: str, saved: Sequence[int], wanted: Sequence[int]) -> str:
    """Return a text about a tensor that was saved in another shape."""
    return f"{name}: saved {list(saved)}, wanted {list(wanted)} (shapes differ)"


def refuse(where: str, found: dict[str, Differences]) -> None:
    """Raise if any part has differences.

    Raises:
        StateMismatch: nothing was touched.
    """
    texts = [one.described(part) for part, one in found.items() if one]
    if texts:
        raise StateMismatch(
            where,
            f"{'. '.join(texts)}. Nothing was restored. Register what was saved, name the parts in "
            "optional= or rename=, or take what fits with strict=False",
        )
