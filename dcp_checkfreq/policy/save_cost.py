"""What is kept of each save that was seen, and what the last ones say together. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from dcp_checkfreq.policy.baseline import Baseline, baseline_error_s
from dcp_checkfreq.policy.costs import MEDIAN_ERROR, Costs, spread_s
from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.observation import SaveSeen, slow_down_s

KEPT = 16  # saves whose cost is averaged while nothing changes
_NEWEST = 3  # two of the last three saves show that something has changed
_CHANGED = 4.0  # standard errors: a cost that differs by more is another cost
_SAME = 0.05  # a cost that differs by less than this share is the same
_ENOUGH = 5  # of fewer saves it is not known how much they differ by chance; then a tenth
_FEW_SPREAD = 0.1
_HIGH = 1.1  # times the median
_ROWS = 2


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
    beside_steps: float
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


def judge(baseline: Baseline, seen: SaveSeen) -> SaveCost:
    """Return what to keep of a save.

    If no iteration of its interval was free of saves, the interval may have ended before the save
    did. Then the slow-down is scaled to the whole save, which is what it would have cost at a
    longer interval.
    """
    interval = seen.interval
    base_s = baseline.iteration_s
    copying, loaded = interval.copying, interval.loaded
    finish_s = max(0.0, seen.copy_s) + max(0.0, seen.persist_s)
    beside_s = copying.sum_s + loaded.sum_s + interval.waited_s
    scale = 1.0
    if not interval.unloaded.steps and beside_s > 0:
        scale = max(1.0, finish_s / beside_s)
    beside = copying.steps + loaded.steps
    one_s = MEDIAN_ERROR * baseline.noise * base_s  # of one iteration
    overlap_s = 0.0
    if seen.mode is not Mode.BLOCKING:
        chance_s = 2 * (
            one_s * math.sqrt(copying.steps) + baseline_error_s(baseline, copying.steps)
        )
        overlap_s = max(0.0, interval.waited_s + copying.excess_s(base_s) - chance_s)
    error_s = one_s * math.sqrt(beside)
    slower_s = slow_down_s(interval, base_s)
    if slower_s < -2 * math.hypot(error_s, baseline_error_s(baseline, beside)):
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


def warmer(costs: Costs, seen: SaveSeen) -> Costs:
    """Return the costs of a profile whose buffers were cold, with what this save did faster.

    What it did slower is left out: that may be chance, and a profile is there already.
    """
    cpu_s, gpu_s, persist_s = costs.snapshot_cpu_s, costs.snapshot_gpu_s, max(0.0, seen.persist_s)
    if seen.mode is Mode.GPU:
        gpu_s = None if gpu_s is None else _less(gpu_s, seen.copy_s)
        # the copy to the host, which is not measured by itself, is part of what was seen
        left_s = _less(cpu_s + costs.persist_s, persist_s)
        cpu_s = min(cpu_s, left_s)
        persist_s = left_s - cpu_s
    else:
        cpu_s = _less(cpu_s, seen.copy_s)
        persist_s = _less(costs.persist_s, persist_s)
    return replace(
        costs,
        snapshot_cpu_s=cpu_s,
        snapshot_gpu_s=gpu_s,
        persist_s=persist_s,
        call_s=_less(costs.call_s, seen.call_s),
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
    if not values:
        return False
    usual = statistics.median(values)
    high = [value > _HIGH * usual for value in values]
    return sum(one and not before for before, one in pairwise([False, *high])) >= _ROWS


def estimate(recent: Sequence[SaveCost], baseline: Baseline) -> Estimate:
    """Return what a save costs: the mean of the middle half of all that are comparable.

    Of two saves the cheaper one is taken, and one alone is no evidence: 0.0. The error is that of
    the median, from how the costs differ, and that of the baseline, which all of them share. While
    there are only a few saves, the noise of the iterations counts if it says more.
    """
    known = _known(recent)
    if len(known) < 2:
        return Estimate(cost_s=0.0, error_s=0.0)
    costs = [cost for cost, _ in known]
    own_s = _own_s(known)
    beside = statistics.median(judged.beside_steps for judged in recent[-len(known) :])
    return Estimate(
        cost_s=min(costs) if len(costs) == 2 else _middle_s(costs),
        error_s=math.hypot(
            MEDIAN_ERROR * own_s / math.sqrt(len(costs)), baseline_error_s(baseline, beside)
        ),
    )


def without_outdated(recent: Sequence[SaveCost]) -> tuple[SaveCost, ...]:
    """Return the saves with the costs struck out that no longer hold.

    Costs have changed when two of the last three saves differ from those before by more than can
    be chance. A single save never does that.
    """
    known = _known(recent)
    older, newest = known[:-_NEWEST], known[-_NEWEST:]
    if not older:
        return tuple(recent)
    old_s = _middle_s([cost for cost, _ in older])
    new_s = statistics.median(cost for cost, _ in newest)
    spread = _spread_s([cost for cost, _ in older])
    if len(older) < _ENOUGH:
        spread = max(spread, _FEW_SPREAD * max(old_s, new_s))
    own_s = max(spread, statistics.median(error for _, error in known))
    error_s = MEDIAN_ERROR * own_s * math.sqrt(1 / len(newest) + 1 / len(older))
    if abs(new_s - old_s) <= max(_CHANGED * error_s, _SAME * max(old_s, new_s)):
        return tuple(recent)

    def holds(cost_s: float) -> bool:
        return abs(cost_s - new_s) < abs(cost_s - old_s)

    return tuple(
        judged if judged.cost_s is None or holds(judged.cost_s) else replace(judged, cost_s=None)
        for judged in recent
    )


def _middle_s(costs: Sequence[float]) -> float:
    """Return the mean without the highest and the lowest quarter.

    A median jumps where costs are of two kinds, as those of short saves are: they touch two
    iterations or three.
    """
    ordered = sorted(costs)
    cut = max(1, len(ordered) // 4) if len(ordered) > 2 else 0
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def _spread_s(costs: Sequence[float]) -> float:
    """Return half the range of costs, without the highest and the lowest of five or more."""
    ordered = sorted(costs)
    cut = 1 if len(ordered) >= _ENOUGH else 0
    return (ordered[-1 - cut] - ordered[cut]) / 2


def _own_s(known: Sequence[tuple[float, float]]) -> float:
    """Return the standard error of a single cost. ``known`` has each cost with its own error.

    How the costs of enough saves differ shows all that is chance. The noise of iterations is only
    a guess at that.
    """
    costs = [cost for cost, _ in known]
    if len(costs) >= _ENOUGH:
        # the median distance alone is 0 where most costs are the same
        return max(_spread_s(costs), spread_s(costs))
    return max(_spread_s(costs), statistics.median(error for _, error in known))


def _known(recent: Sequence[SaveCost]) -> list[tuple[float, float]]:
    return [(judged.cost_s, judged.error_s) for judged in recent if judged.cost_s is not None]
