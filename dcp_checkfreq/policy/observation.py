"""What one rank saw of the training in one interval, and what of it one save cost. Pure.

An interval runs from the end of one save's `after_step` to the end of the next one's: with the
background work of the first save, and the `after_step` of the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dcp_checkfreq.policy.costs import spread_s, typical_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration as the training thread of one rank saw it."""

    seconds: float  # from the return of the `after_step` before to the entry of this one
    blocked_s: float  # inside this `after_step`
    waited_s: float  # part of ``seconds``: the weight update waited for a snapshot copy
    update_s: float  # part of ``seconds``: the weight update itself
    loaded: bool  # a snapshot copy or a persist was under way at any time during it
    copying: bool = False  # a snapshot copy was; then ``loaded`` is true as well
    queued_s: float = 0.0  # part of ``blocked_s``: this save waited for the one before

    @property
    def worked_s(self) -> float:
        """What the iteration took without the wait for the copy."""
        return self.seconds - self.waited_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long iterations of one kind took. Without iterations all three are 0."""

    steps: int = 0
    typical_s: float = 0.0
    spread_s: float = 0.0  # standard deviation

    @property
    def sum_s(self) -> float:
        """What all of them took, had each been typical."""
        return self.steps * self.typical_s

    def excess_s(self, base_s: float) -> float:
        """By how much all of them were slower than ``base_s``. Negative if they were faster."""
        return self.steps * (self.typical_s - base_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalSeen:
    """Summary of the iterations of one interval. Times of each kind are without waiting."""

    elapsed_s: float = 0.0  # wall time, ``after_step`` included
    blocked_s: float = 0.0  # sum over the iterations, as are the next two
    queued_s: float = 0.0  # part of ``blocked_s``
    waited_s: float = 0.0
    update_s: float = 0.0  # a typical one
    unloaded: Pace = Pace()  # nothing of a save was under way
    copying: Pace = Pace()  # the snapshot was being copied
    loaded: Pace = Pace()  # the checkpoint was being persisted, and nothing copied

    @property
    def steps(self) -> int:
        """How many iterations the interval had."""
        return self.unloaded.steps + self.copying.steps + self.loaded.steps

    @property
    def stall_s(self) -> float:
        """How long the loop stood still for one save (To), without waiting for another save."""
        return max(0.0, self.blocked_s - self.queued_s + self.waited_s)

    @property
    def pace_s(self) -> float:
        """Mean of the typical iterations; 0.0 without iterations."""
        sum_s = self.unloaded.sum_s + self.copying.sum_s + self.loaded.sum_s
        return sum_s / self.steps if self.steps else 0.0


def summarise(iterations: Sequence[Iteration]) -> IntervalSeen:
    """Return the summary of the iterations of one interval; of none, all zeros."""

    def pace(kind: Iterable[Iteration]) -> Pace:
        worked = [iteration.worked_s for iteration in kind]
        return Pace(steps=len(worked), typical_s=typical_s(worked), spread_s=spread_s(worked))

    return IntervalSeen(
        elapsed_s=sum(i.seconds + i.blocked_s for i in iterations),
        blocked_s=sum(i.blocked_s for i in iterations),
        queued_s=sum(i.queued_s for i in iterations),
        waited_s=sum(i.waited_s for i in iterations),
        update_s=typical_s(i.update_s for i in iterations),
        unloaded=pace(i for i in iterations if not (i.loaded or i.copying)),
        copying=pace(i for i in iterations if i.copying),
        loaded=pace(i for i in iterations if i.loaded and not i.copying),
    )


def slow_down_s(seen: IntervalSeen, base_s: float) -> float:
    """Return by how much a save made the iterations beside it slower; negative if faster.

    The excess of the typical iteration, times their number: one slow iteration does not count.
    """
    return seen.copying.excess_s(base_s) + seen.loaded.excess_s(base_s)


def cost_per_save_s(seen: IntervalSeen, base_s: float) -> float:
    """Return what a save cost the loop: time blocked, waiting for the copy, and the slow-down."""
    return max(0.0, seen.blocked_s + seen.waited_s + slow_down_s(seen, base_s))
