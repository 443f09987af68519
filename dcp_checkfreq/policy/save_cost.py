"""What is kept of each save that was seen, and what the last ones say together. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from dcp_checkfreq.policy.baseline import Baseline, baseline_error_s
from dcp_checkfreq.policy.constants import ALIKE, CHANGED, FEW, SOME, SURE
from dcp_checkfreq.policy.costs import MEDIAN_ERROR, spread_s
from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.observation import slow_down_s
from dcp_checkfreq.policy.save_timings import SaveTimings


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """What is kept of one save."""

    cost_s: float | None  # to the loop; None if the baseline has turned out to be outdated
    error_s: float  # standard error of that, from the noise of the iterations beside the save
    beside_steps: float  # how many iterations were compared with the baseline
    stall_s: float  # the part of the cost in which the loop stood still
    left_s: float  # how long the save went on beside the loop, until it was published
    finish_s: float  # from its start until it was published
    overlap_s: float  # what the overlapped copy cost the loop for certain; 0.0 for a blocking one
    fresh: bool  # the baseline was measured in the same interval


class Estimate(NamedTuple):
    """A cost and its standard error, in seconds."""

    cost_s: float
    error_s: float


def judge(baseline: Baseline, seen: SaveTimings) -> SaveCost:
    """Return what to keep of a save. Its cost is without waiting for the save before.

    If no iteration of its interval was free of saves, the interval may have ended before the save
    did. Then the slow-down is scaled to the whole save: it costs that at a longer interval.
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

    Of two saves the cheaper one is taken, and one alone is no evidence: 0.0. The error is from how
    the costs differ, and that of the baseline, which all of them share. While there are only a few
    saves, the noise of the iterations counts if it says more.
    """
    costs, errors = _known(recent)
    if len(costs) < 2:
        return Estimate(0.0, 0.0)
    # where most costs are the same, their median deviation alone is 0
    own_s = spread_s(costs) if len(costs) >= SOME else statistics.median(errors)
    own_s = MEDIAN_ERROR * max(_half_range_s(costs), own_s) / math.sqrt(len(costs))
    beside = statistics.median(save.beside_steps for save in recent[-len(costs) :])
    cost_s = min(costs) if len(costs) == 2 else _middle_s(costs)
    return Estimate(cost_s, math.hypot(own_s, baseline_error_s(baseline, beside)))


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
    own_s = max(_half_range_s(older), statistics.median(errors))
    if len(older) < SOME:
        own_s = max(own_s, ALIKE * max(old_s, new_s))
    error_s = MEDIAN_ERROR * own_s * math.sqrt(1 / len(newest) + 1 / len(older))
    changed = abs(new_s - old_s) > max(CHANGED * error_s, ALIKE * max(old_s, new_s))

    def holds(cost_s: float) -> bool:
        return not changed or abs(cost_s - new_s) < abs(cost_s - old_s)

    return tuple(
        save if save.cost_s is None or holds(save.cost_s) else replace(save, cost_s=None)
        for save in recent
    )


def _known(recent: Sequence[SaveCost]) -> tuple[list[float], list[float]]:
    """Return the costs that are comparable, and their errors."""
    known = [(save.cost_s, save.error_s) for save in recent if save.cost_s is not None]
    return [cost for cost, _ in known], [error for _, error in known]


def _middle_s(costs: Sequence[float]) -> float:
    """Return the mean of the middle half: a median jumps where costs are of two kinds."""
    cut = max(1, len(costs) // 4) if len(costs) > 2 else 0
    return statistics.fmean(sorted(costs)[cut : len(costs) - cut])


def _half_range_s(costs: Sequence[float]) -> float:
    """Return half the range of costs, without the highest and the lowest of five or more."""
    ordered, cut = sorted(costs), int(len(costs) >= SOME)
    return (ordered[-1 - cut] - ordered[cut]) / 2
