"""What is kept of each save that was seen, and what the last ones say together. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from dcp_checkfreq.policy.baseline import Baseline
from dcp_checkfreq.policy.costs import CHANGED, CLEARLY, FEW, MEDIAN_ERROR, SOME, SURE, Costs
from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.observation import slow_down_s
from dcp_checkfreq.policy.save_timings import SaveTimings

USUAL_SPREAD = 0.1  # a save may differ from others by this share, and yet be like them


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """What is kept of one save.

    Attributes:
        cost_s: what it cost the loop, without waiting for the save before; None if it was compared
            with a baseline that has turned out to be outdated.
        error_s: standard error of that, from the noise of the iterations beside the save.
        beside_steps: how many iterations were compared with the baseline.
        stall_s: the part of the cost in which the loop stood still.
        left_s: how long the save went on beside the loop, until it was published.
        finish_s: from its start until it was published.
        persist_s: from copied until published.
        overlap_s: what the overlapped copy cost the loop for certain; 0.0 for a blocking one.
        fresh: the baseline was measured in the same interval.
    """

    cost_s: float | None
    error_s: float
    beside_steps: int
    stall_s: float
    left_s: float
    finish_s: float
    persist_s: float
    overlap_s: float
    fresh: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A cost and its standard error, in seconds."""

    cost_s: float
    error_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredInterval:
    """Intervals that the last saves need, in iterations.

    Attributes:
        lower: at least.
        expected: by the best estimate.
        sufficient: like that, but long enough for the longest of the last saves. An interval
            shrinks only so far.
        upper: the same with the highest costs that they may have.
        without_baseline: at least; of what needs none: standing still, and unfinished saves.
        known: there are enough saves to shrink.
    """

    lower: int
    expected: int
    sufficient: int
    upper: int
    without_baseline: int
    known: bool


def cost_of(baseline: Baseline, timings: SaveTimings) -> SaveCost:
    """Return what to keep of a save."""
    seen = timings.interval
    finish_s = max(0.0, timings.copy_s) + max(0.0, timings.persist_s)
    copying, beside = seen.copying.steps, seen.copying.steps + seen.loaded.steps
    one_s = baseline.one_error_s
    overlap_s = 0.0
    if timings.mode is not Mode.BLOCKING:
        chance_s = SURE * (one_s * math.sqrt(copying) + baseline.error_s(copying))
        excess_s = seen.copying.excess_s(baseline.iteration_s)
        overlap_s = max(0.0, seen.waited_s + excess_s - chance_s)
    error_s = one_s * math.sqrt(beside)
    slower_s = slow_down_s(seen, baseline.iteration_s)
    if slower_s < -SURE * math.hypot(error_s, baseline.error_s(beside)):
        slower_s = 0.0  # the baseline is outdated; that must not hide the stall
    return SaveCost(
        cost_s=max(0.0, seen.stall_s + slower_s),
        error_s=error_s,
        beside_steps=beside,
        stall_s=seen.stall_s,
        # the copy begins after the call, in which the loop stands still already
        left_s=max(0.0, finish_s + max(0.0, timings.call_s) - seen.stall_s),
        finish_s=finish_s,
        persist_s=max(0.0, timings.persist_s),
        overlap_s=overlap_s,
        fresh=seen.unloaded.steps > 0,
    )


def warmer(costs: Costs, timings: SaveTimings) -> Costs:
    """Return the costs of a profile whose buffers were cold, with what this save did faster.

    What it did slower is left out: that may be chance, and a profile is there already.
    """
    cpu_s, gpu_s, persist_s = costs.snapshot_cpu_s, costs.snapshot_gpu_s, timings.persist_s
    if timings.mode is Mode.GPU:
        gpu_s = None if gpu_s is None else _less(gpu_s, timings.copy_s)
        # the copy to the host, which is not measured by itself, is part of what was seen
        left_s = _less(cpu_s + costs.persist_s, persist_s)
        cpu_s = min(cpu_s, left_s)
        persist_s = left_s - cpu_s
    else:
        cpu_s = _less(cpu_s, timings.copy_s)
        persist_s = _less(costs.persist_s, persist_s)
    call_s = _less(costs.call_s, timings.call_s)
    return replace(
        costs, snapshot_cpu_s=cpu_s, snapshot_gpu_s=gpu_s, persist_s=persist_s, call_s=call_s
    )


def _less(before_s: float, seen_s: float) -> float:
    return seen_s if 0 <= seen_s < before_s else before_s


def second(values: Sequence[float]) -> float:
    """Return the second highest value, which one outlier does not raise. 0.0 for fewer than two."""
    return sorted(values)[-2] if len(values) > 1 else 0.0


def swings(values: Sequence[float]) -> bool:
    """Return whether values go up and down: high ones stand in at least two separate rows.

    One outlier does not make values swing, nor does a busy period, which is one row.
    """
    usual = statistics.median(values)
    high = [value > (1 + USUAL_SPREAD) * usual for value in values]
    return sum(one and not before for before, one in pairwise([False, *high])) >= 2


def estimate(recent: Sequence[SaveCost], baseline: Baseline) -> Estimate:
    """Return what a save costs: the mean of the middle half of all that are comparable.

    Of two saves the cheaper one is taken, and one alone is no evidence: 0.0. The error is that of
    the median, from how the costs differ, and that of the baseline, which all of them share. While
    there are only a few saves, the noise of the iterations counts if it says more.
    """
    known = [save for save in recent if save.cost_s is not None]
    if len(known) < 2:
        return Estimate(cost_s=0.0, error_s=0.0)
    costs = _costs(known)
    shared_s = baseline.error_s(statistics.median(save.beside_steps for save in known))
    return Estimate(
        cost_s=min(costs) if len(costs) == 2 else _middle_s(costs),
        error_s=math.hypot(MEDIAN_ERROR * _own_s(known) / math.sqrt(len(known)), shared_s),
    )


def without_outdated(recent: Sequence[SaveCost]) -> tuple[SaveCost, ...]:
    """Return the saves with the costs struck out that no longer hold.

    Costs have changed when two of the last three saves differ from those before by more than can
    be chance. A single save never does that.
    """
    known = [save for save in recent if save.cost_s is not None]
    older, newest = known[:-FEW], known[-FEW:]
    if not older:
        return tuple(recent)
    old_s, new_s = _middle_s(_costs(older)), statistics.median(_costs(newest))
    own_s = max(_own_s(older), statistics.median(save.error_s for save in known))
    if len(older) < SOME:  # by how much costs differ by chance is not known yet
        own_s = max(own_s, USUAL_SPREAD * max(old_s, new_s))
    error_s = MEDIAN_ERROR * own_s * math.sqrt(1 / len(newest) + 1 / len(older))
    if abs(new_s - old_s) <= max(CHANGED * error_s, USUAL_SPREAD * max(old_s, new_s)):
        return tuple(recent)

    def holds(cost_s: float) -> bool:
        return abs(cost_s - new_s) < abs(cost_s - old_s)

    return tuple(
        save if save.cost_s is None or holds(save.cost_s) else replace(save, cost_s=None)
        for save in recent
    )


def required_interval(
    recent: Sequence[SaveCost], baseline: Baseline, steps: Callable[[float, float], int]
) -> RequiredInterval:
    """Return what ``recent``, the last saves with the newest last, need. At least one.

    ``steps`` returns the interval for a cost, and for what is left of a save beside the loop.
    """
    cost = estimate(recent, baseline)
    sure_s = cost.cost_s - SURE * cost.error_s
    most_s = max(CLEARLY * cost.cost_s, cost.cost_s + SURE * cost.error_s)
    lefts = [save.left_s for save in recent]
    swing = swings(lefts)
    unfinished_s = second(lefts if swing else lefts[-FEW:])
    longest_s = max(lefts if swing else lefts[-SOME:])
    stood_s = second([save.stall_s for save in recent[-FEW:]])
    return RequiredInterval(
        lower=steps(sure_s, unfinished_s),
        expected=steps(cost.cost_s, max(unfinished_s, second(lefts[-SOME:]))),
        sufficient=steps(cost.cost_s, longest_s),
        upper=steps(most_s, CLEARLY * longest_s),
        without_baseline=steps(stood_s, unfinished_s),
        known=sum(save.cost_s is not None for save in recent) >= FEW,
    )


def _costs(known: Sequence[SaveCost]) -> list[float]:
    return [save.cost_s for save in known if save.cost_s is not None]


def _middle_s(costs: Sequence[float]) -> float:
    """Return the mean without the highest and the lowest quarter.

    A median jumps where costs are of two kinds, as those of short saves are: they touch two
    iterations or three.
    """
    ordered = sorted(costs)
    cut = max(1, len(ordered) // 4) if len(ordered) > 2 else 0
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _own_s(known: Sequence[SaveCost]) -> float:
    """Return the standard error of a single cost.

    How the costs of enough saves differ shows all that is chance: half their range, without the
    highest and the lowest. The noise of iterations is only a guess at that.
    """
    ordered = sorted(_costs(known))
    if len(ordered) >= SOME:
        return (ordered[-2] - ordered[1]) / 2
    errors = [save.error_s for save in known]
    return max((ordered[-1] - ordered[0]) / 2, statistics.median(errors))
