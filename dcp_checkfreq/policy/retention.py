"""Which checkpoints may go. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What to keep.

    Attributes:
        keep_last: this many newest checkpoints; at least 1. Two is CheckFreq's rule: one whole,
            one in flight.
        keep_every: also every step that is a multiple of this; None for none.
    """

    keep_last: int = 2
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {self.keep_last}")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every must be at least 1, got {self.keep_every}")


def select_expired(whole_steps: Collection[int], rule: Retention) -> list[int]:
    """Return the steps that may be deleted, oldest first. The newest is never among them."""
    ordered = sorted(set(whole_steps))
    expired = ordered[: -rule.keep_last]
    if rule.keep_every is not None:
        expired = [step for step in expired if step % rule.keep_every]
    return expired
