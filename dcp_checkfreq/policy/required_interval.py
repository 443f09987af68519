"""Which intervals the last saves need: at least, probably, and at most. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcp_checkfreq.policy.baseline import Baseline
from dcp_checkfreq.policy.costs import CLEARLY, FEW, SOME, SURE
from dcp_checkfreq.policy.save_cost import SaveCost, estimate, second, swings


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredInterval:
    """Intervals that the last saves need, in iterations."""

    surely: int  # at least
    likely: int  # by the best estimate
    # Like that, but long enough for the longest of the last saves. It shrinks only so far.
    enough: int
    at_most: int  # the same with the highest costs that they may have
    without_baseline: int  # counts only what needs none: standing still, and unfinished saves
    known: bool  # there are enough saves to shrink


def needs_of(
    recent: Sequence[SaveCost],
    baseline: Baseline,
    steps: Callable[[float, float], int],
    *,
    cold_stall_s: float,
) -> RequiredInterval:
    """Return what ``recent``, the last saves with the newest last, need. At least one.

    Args:
        recent: what is kept of them.
        baseline: an iteration without a save.
        steps: the interval for a cost and a time that a save goes on beside the loop.
        cold_stall_s: how long the loop stood still for the saves before that are not judged.
    """
    cost = estimate(recent, baseline)
    cost_s, error_s = cost.cost_s, SURE * cost.error_s
    most_s = max(CLEARLY * cost_s, cost_s + error_s)
    lefts = [save.left_s for save in recent]
    unfinished_s = second(lefts if swings(lefts) else lefts[-FEW:])
    left_s = max(unfinished_s, second(lefts[-SOME:]))
    longest_s = max(lefts if swings(lefts) else lefts[-SOME:])
    # Standing still is measured directly: two saves that did, a judged and a cold one, are enough.
    stood_s = statistics.median_low(save.stall_s for save in recent[-FEW:])
    first_s = 0.0
    if len(recent) == 1:
        first_s = stood_s = min(stood_s, cold_stall_s)
    first_surely = steps(first_s / CLEARLY, 0.0)
    return RequiredInterval(
        surely=max(first_surely, steps(cost_s - error_s, unfinished_s)),
        likely=max(steps(first_s, 0.0), steps(cost_s, left_s)),
        enough=steps(cost_s, longest_s),
        at_most=steps(most_s, CLEARLY * longest_s),
        without_baseline=max(first_surely, steps(stood_s, unfinished_s)),
        known=sum(save.cost_s is not None for save in recent) >= FEW,
    )
