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
        keep_epochs_of_steps: also the last checkpoint of every epoch of so many steps; None for
            none.
    """

    keep_last: int = 2
    keep_every: int | None = None
    keep_epochs_of_steps: int | None = None

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {self.keep_last}")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every must be at least 1, got {self.keep_every}")
        if self.keep_epochs_of_steps is not None and self.keep_epochs_of_steps < 1:
            raise ValueError(f"an epoch has at least 1 step, got {self.keep_epochs_of_steps}")


def select_expired(whole_steps: Collection[int], rule: Retention) -> list[int]:
    """Return the steps that may be deleted, oldest first. The newest is never among them."""
    ordered = sorted(set(whole_steps))
    expired = ordered[: -rule.keep_last]
    if rule.keep_every is not None:
        expired = [step for step in expired if step % rule.keep_every]
    if rule.keep_epochs_of_steps is not None:
        # The first step of an epoch is the one after a multiple of its length.
        last_of = {(step - 1) // rule.keep_epochs_of_steps: step for step in ordered}
        expired = [step for step in expired if step not in last_of.values()]
    return expired
