"""Which intervals the last saves need: at least, probably, and at most. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dcp_checkfreq.policy.baseline import Baseline
from dcp_checkfreq.policy.interval import least_waste_interval_steps, steps_for
from dcp_checkfreq.policy.save_cost import (
    SaveCost,
    estimate,
    second,
    swings,
)

FEW = 3  # two of the last three saves must agree before the interval grows
SOME = 5  # the last five saves must be done within an interval before it shrinks to that
SURE = 2.0  # standard errors of a cost that are not acted on
CLEARLY = 1.25  # it begins to shrink when even costs this much higher would need less


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an interval has to keep to.

    Attributes:
        max_overhead: p.
        mtbf_s: mean time between failures of the job, or None.
    """

    max_overhead: float
    mtbf_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredInterval:
    """Intervals that the last saves need, in iterations.

    Attributes:
        surely: at least.
        likely: by the best estimate.
        enough: like that, but long enough for the longest of the last saves. An interval shrinks
            only so far.
        at_most: the same with the highest costs that they may have.
        without_baseline: counts only what needs none: standing still, and unfinished saves.
        known: there are enough saves to shrink.
    """

    surely: int
    likely: int
    enough: int
    at_most: int
    without_baseline: int
    known: bool


def needs_of(
    recent: Sequence[SaveCost], baseline: Baseline, limits: Limits, *, cold_stall_s: float
) -> RequiredInterval:
    """Return what ``recent``, the last saves with the newest last, need. At least one.

    ``cold_stall_s`` is how long the loop stood still for the saves before them that are not judged.
    """
    base_s = baseline.iteration_s
    cost = estimate(recent, baseline)
    cost_s, error_s = cost.cost_s, SURE * cost.error_s
    most_s = max(CLEARLY * cost_s, cost_s + error_s)
    lefts = [judged.left_s for judged in recent]
    unfinished_s = second(lefts if swings(lefts) else lefts[-FEW:])
    left_s = max(unfinished_s, second(lefts[-SOME:]))
    longest_s = max(lefts if swings(lefts) else lefts[-SOME:])
    # Standing still is measured directly: two saves that did, a judged and a cold one, are enough.
    stood_s = statistics.median_low(judged.stall_s for judged in recent[-FEW:])
    first_s = 0.0
    if len(recent) == 1:
        first_s = stood_s = min(stood_s, cold_stall_s)
    first = needed_steps(first_s, 0.0, base_s, limits)
    first_surely = needed_steps(first_s / CLEARLY, 0.0, base_s, limits)
    return RequiredInterval(
        surely=max(first_surely, needed_steps(cost_s - error_s, unfinished_s, base_s, limits)),
        likely=max(first, needed_steps(cost_s, left_s, base_s, limits)),
        enough=needed_steps(cost_s, longest_s, base_s, limits),
        at_most=needed_steps(most_s, CLEARLY * longest_s, base_s, limits),
        without_baseline=max(first_surely, needed_steps(stood_s, unfinished_s, base_s, limits)),
        known=sum(judged.cost_s is not None for judged in recent) >= FEW,
    )


def needed_steps(cost_s: float, left_s: float, base_s: float, limits: Limits) -> int:
    """Return the interval for saves that cost ``cost_s`` and go on beside the loop for ``left_s``.

    The shortest one within the budget and in which a save is published; with a failure rate not
    shorter than the one that wastes least. ``base_s`` is an iteration without a save.
    """
    shortest = steps_for(left_s, cost_s, base_s, limits.max_overhead)
    if limits.mtbf_s is None:
        return shortest
    return max(shortest, least_waste_interval_steps(cost_s, base_s, limits.mtbf_s))
