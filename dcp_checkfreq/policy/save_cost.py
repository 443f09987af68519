"""What is kept of each save that was seen, and what the last ones say together. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from dcp_checkfreq.policy.baseline import Baseline, baseline_error_s
from dcp_checkfreq.policy.costs import ALIKE, CHANGED, FEW, MEDIAN_ERROR, SOME, SURE, spread_s
from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.observation import slow_down_s
from dcp_checkfreq.policy.save_timings import SaveTimings


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """What is kept of one save."""

    # What it cost the loop, without waiting for the save before; None if it was compared with a
    # baseline that has turned out to be outdated.
    cost_s: float | None
    error_s: float  # standard error of that, from the noise of the iterations beside the save
    beside_steps: float  # how many iterations were compared with the baseline
    stall_s: float  # the part of the cost in which the loop stood still
    left_s: float  # how long the save went on beside the loop, until it was published
    finish_s: float  # from its start until it was published
    persist_s: float  # from copied until published
    overlap_s: float  # what the overlapped copy cost the loop for certain; 0.0 for a blocking one
    fresh: bool  # the baseline was measured in the same interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A cost and its standard error, in seconds."""

    cost_s: float
    error_s: float


def judge(baseline: Baseline, seen: SaveTimings) -> SaveCost:
    """Return what to keep of a save.

    If no iteration of its interval was free of saves, the interval may have ended before the save
    did. Then the slow-down is scaled to the whole save, which is what it would have cost at a
    longer interval.
    """
    interval, base_s, one_s = seen.interval, baseline.iteration_s, baseline.one_error_s
    copying, loaded = interval.copying, interval.loaded
    finish_s = max(0.0, seen.copy_s) + max(0.0, seen.persist_s)
    beside_s = copying.sum_s + loaded.sum_s + interval.waited_s
    cut_off = not interval.unloaded.steps and beside_s > 0
    scale = max(1.0, finish_s / beside_s) if cut_off else 1.0
    overlap_s = 0.0
    if seen.mode is not Mode.BLOCKING:
        chance_s = one_s * math.sqrt(copying.steps) + baseline_error_s(baseline, copying.steps)
        overlap_s = max(0.0, interval.waited_s + copying.excess_s(base_s) - SURE * chance_s)
    beside = copying.steps + loaded.steps
    error_s = one_s * math.sqrt(beside)
    slower_s = slow_down_s(interval, base_s)
    if slower_s < -SURE * math.hypot(error_s, baseline_error_s(baseline, beside)):
        slower_s = 0.0  # the baseline is outdated; that must not hide the stall
    return SaveCost(
        cost_s=max(0.0, interval.stall_s + scale * slower_s),
        error_s=scale * error_s,
        beside_steps=scale * beside,
        stall_s=interval.stall_s,
        # the copy begins after the call, in which the loop stands still already
        left_s=max(0.0, finish_s + max(0.0, seen.call_s) - interval.stall_s),
        finish_s=finish_s,
        persist_s=max(0.0, seen.persist_s),
        overlap_s=overlap_s,
        fresh=interval.unloaded.steps > 0,
    )


def second(values: Sequence[float]) -> float:
    """Return the second highest value, which one outlier does not raise. 0.0 for fewer than two."""
    return sorted(values)[-2] if len(values) > 1 else 0.0


def swings(values: Sequence[float]) -> bool:
    """Return whether values go up and down: high ones stand in at least two separate rows.

    One outlier does not make values swing, nor does a busy period, which is one row.
    """
    usual = statistics.median(values) if values else 0.0
    high = [value > (1 + ALIKE) * usual for value in values]
    return sum(one and not before for before, one in pairwise([False, *high])) > 1


def estimate(recent: Sequence[SaveCost], baseline: Baseline) -> Estimate:
    """Return what a save costs: the mean of the middle half of all that are comparable.

    Of two saves the cheaper one is taken, and one alone is no evidence: 0.0. The error is that of
    the median, from how the costs differ, and that of the baseline, which all of them share. While
    there are only a few saves, the noise of the iterations counts if it says more.
    """
    costs, errors = _known(recent)
    if len(costs) < 2:
        return Estimate(cost_s=0.0, error_s=0.0)
    own_s = _half_range_s(costs)
    # how the costs of enough saves differ shows all that is chance; their median deviation alone
    # is 0 where most are the same
    own_s = max(own_s, spread_s(costs) if len(costs) >= SOME else statistics.median(errors))
    beside = statistics.median(save.beside_steps for save in recent[-len(costs) :])
    shared_s = baseline_error_s(baseline, beside)
    return Estimate(
        cost_s=min(costs) if len(costs) == 2 else _middle_s(costs),
        error_s=math.hypot(MEDIAN_ERROR * own_s / math.sqrt(len(costs)), shared_s),
    )


def without_outdated(recent: Sequence[SaveCost]) -> tuple[SaveCost, ...]:
    """Return the saves with the costs struck out that no longer hold.

    Costs have changed when two of the last three saves differ from those before by more than can
    be chance. A single save never does that.
    """
    costs, errors = _known(recent)
    older, newest = costs[:-FEW], costs[-FEW:]
    if not older:
        return tuple(recent)
    old_s, new_s = _middle_s(older), statistics.median(newest)
    spread = _half_range_s(older)
    if len(older) < SOME:
        spread = max(spread, ALIKE * max(old_s, new_s))
    own_s = max(spread, statistics.median(errors))
    error_s = MEDIAN_ERROR * own_s * math.sqrt(1 / len(newest) + 1 / len(older))
    if abs(new_s - old_s) <= max(CHANGED * error_s, 0.05 * max(old_s, new_s)):
        return tuple(recent)
    return tuple(
        save
        if save.cost_s is None or abs(save.cost_s - new_s) < abs(save.cost_s - old_s)
        else replace(save, cost_s=None)
        for save in recent
    )


def _known(recent: Sequence[SaveCost]) -> tuple[list[float], list[float]]:
    """Return the costs that are comparable, and the errors of those."""
    known = [(save.cost_s, save.error_s) for save in recent if save.cost_s is not None]
    return [cost for cost, _ in known], [error for _, error in known]


def _middle_s(costs: Sequence[float]) -> float:
    """Return the mean without the highest and the lowest quarter.

    A median jumps where costs are of two kinds, as those of short saves are: they touch two
    iterations or three.
    """
    ordered = sorted(costs)
    cut = max(1, len(ordered) // 4) if len(ordered) > 2 else 0
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _half_range_s(costs: Sequence[float]) -> float:
    """Return half the range of costs, without the highest and the lowest of five or more."""
    ordered = sorted(costs)
    cut = 1 if len(ordered) >= SOME else 0
    return (ordered[-1 - cut] - ordered[cut]) / 2
