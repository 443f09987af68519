"""From each save that was seen to the next interval: a reducer. Pure.

The interval grows at once when saves need it, shrinks step by step when they clearly need less,
and otherwise stays. See docs/policy.md for the reasons behind each number here.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dcp_checkfreq.policy.baseline import (
    Baseline,
    allowance_s,
    baseline_of,
    change_s,
    gap_steps,
    renewed,
)
from dcp_checkfreq.policy.costs import Costs
from dcp_checkfreq.policy.interval import (
    MAX_INTERVAL_STEPS,
    Forecast,
    Mode,
    choose_mode,
    forecast,
    interval_steps,
    least_waste_interval_steps,
    stall_s,
    steps_for,
)
from dcp_checkfreq.policy.seen import IntervalSeen, SaveSeen, cost_per_save_s, slow_down_s

_JUDGED = 3  # two of the last three saves must agree before the interval grows
_KEPT = 5  # four of the last five before it shrinks
_CLEARLY = 1.25  # it begins to shrink when even costs this much higher would need less
_GAP_EVERY_SAVES = 8  # a baseline is renewed at least this often
_DEARER = 1.1  # an overlapped copy must cost this much more than a blocking one to be given up


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What is kept of one save.

    Attributes:
        cost_s: what it cost the loop for certain; None if it was compared with a baseline that
            has turned out to be an old one.
        stall_s: the part of it in which the loop stood still.
        left_s: how long it went on beside the loop, until it was published.
        finish_s: from its start until it was published.
        persist_s: from copied until published.
        overlap_s: what the overlapped copy cost the loop; 0.0 for a blocking one.
        fresh: the baseline was measured in the same interval.
    """

    cost_s: float | None
    stall_s: float
    left_s: float
    finish_s: float
    persist_s: float
    overlap_s: float
    fresh: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """All that the next decision depends on. Made by `start`, changed by `observe`.

    Attributes:
        interval_steps: k.
        gap_steps: iterations that the running interval is longer, to see some without a save.
        mode: how snapshots are copied.
        mode_is_fixed: the user has chosen it.
        max_overhead: p.
        mtbf_s: mean time between failures of the job, or None.
        costs: the profile, with iteration, update and persist as seen lately.
        baseline: iterations with no save under way.
        recent: the last saves, the newest last.
        shrinking: the interval is on its way down.
    """

    interval_steps: int
    gap_steps: int
    mode: Mode
    mode_is_fixed: bool
    max_overhead: float
    mtbf_s: float | None
    costs: Costs
    baseline: Baseline
    recent: tuple[Judged, ...] = ()
    shrinking: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """When and how to save next. Takes effect in the running interval.

    Attributes:
        interval_steps: k. The next save is ``k + gap_steps`` iterations after the last one.
        gap_steps: iterations more, this once, so that some are seen with no save under way.
        mode: how to copy the snapshot.
        overhead_seen: share of training time that the save cost; None if it is no measure.
        reason: one line for the log.
        forecast: what the interval means for the run.
    """

    interval_steps: int
    gap_steps: int
    mode: Mode
    overhead_seen: float | None
    reason: str
    forecast: Forecast


def start(
    costs: Costs,
    *,
    max_overhead: float,
    mtbf_s: float | None = None,
    mode: Mode | None = None,
    first_interval_steps: int | None = None,
    base_steps: int = 10,
) -> Tuning:
    """Return the state to begin with.

    Args:
        costs: the profile, of the worst rank.
        max_overhead: p, in (0, 1].
        mtbf_s: mean time between failures; None if not known.
        mode: how to copy; None to choose, and to give up overlapping if it costs more.
        first_interval_steps: k that an earlier run of the same job ended with, under the same
            p; None to take it from the costs.
        base_steps: how many iterations ``costs.iteration_s`` was measured from.

    Raises:
        ValueError: ``max_overhead`` is outside (0, 1], ``mtbf_s`` is no positive number, or mode
            GPU without a measured ``snapshot_gpu_s``.
    """
    chosen = choose_mode(costs) if mode is None else mode
    k = interval_steps(costs, chosen, max_overhead, mtbf_s)
    if first_interval_steps is not None:
        k = min(max(first_interval_steps, 1), MAX_INTERVAL_STEPS)
    return Tuning(
        interval_steps=k,
        gap_steps=0,
        mode=chosen,
        mode_is_fixed=mode is not None,
        max_overhead=max_overhead,
        mtbf_s=mtbf_s,
        costs=costs,
        baseline=baseline_of(costs.iteration_s, base_steps),
    )


def opening(tuning: Tuning) -> Decision:
    """Return the decision that `start` amounts to."""
    return _decision(tuning, None, f"k {tuning.interval_steps} to begin with")


def observe(tuning: Tuning, seen: SaveSeen) -> tuple[Tuning, Decision]:
    """Return the state after one more save, and what to do now.

    A first save of a process and a failed one say nothing about later saves: only the iterations
    without a save are learned from. Otherwise, in this order:

    - Iterations without a save renew the baseline.
    - If overlapping the copy cost more than a blocking copy would, in two of the last three
      saves, snapshots are blocking from now on (unless the user has chosen the mode).
    - If two of the last three saves need a longer interval, it grows at once to what they need: to
      be published before the next one starts, to stay within p, and with a failure rate to waste
      least. If only slow iterations say so, and the baseline is not from this interval, it is
      renewed first.
    - If the last saves would need less even if they cost a quarter more, it shrinks by half of the
      distance with every save, until it is what they need.
    - Else it stays; a gap is asked for when the baseline is old.
    """
    if not seen.interval.steps:
        return replace(tuning, gap_steps=0), _decision(tuning, None, "nothing was seen")
    tuning = _learned(tuning, seen.interval)
    if seen.is_first or seen.failed:
        why = "a failed save is" if seen.failed else "the first save of a process is"
        tuning = replace(tuning, gap_steps=0)
        return tuning, _decision(tuning, None, f"k {tuning.interval_steps} stays: {why} no measure")

    recent = (*tuning.recent, _judge(tuning, seen))[-_KEPT:]
    asked_before = tuning.gap_steps > 0
    tuning = _with_costs(replace(tuning, recent=recent, gap_steps=0))
    base_s = tuning.baseline.iteration_s
    cost_s = cost_per_save_s(seen.interval, base_s)
    overhead = cost_s / max(seen.interval.steps * base_s, 1e-9)
    saw = f"{overhead:.1%} of {seen.interval.steps} iterations, budget {tuning.max_overhead:.1%}"

    if _overlap_is_dear(tuning):
        return _without_overlap(tuning, overhead, saw)

    k = tuning.interval_steps
    needed = _needed(tuning, _JUDGED)
    doubtful = tuning.baseline.age_saves > 0 and _baseline_doubtful(tuning, seen.interval)
    if doubtful and not asked_before:
        needed = _needed(tuning, _JUDGED, certain=True)
    if needed > k:
        tuning = replace(tuning, interval_steps=needed, shrinking=False)
        return tuning, _decision(tuning, overhead, f"k {k} -> {needed}: save cost {saw}")
    if doubtful and not asked_before:
        why = "a baseline from this interval is needed first"
        return _with_gap(tuning, overhead, f"k {k} stays: save cost {saw}; {why}")

    least = _needed(tuning, _KEPT)
    clearly = _needed(tuning, _KEPT, factor=_CLEARLY) < k
    if _enough_to_shrink(tuning) and least < k and (tuning.shrinking or clearly):
        fewer = k - max(1, (k - least) // 2)
        tuning = replace(tuning, interval_steps=fewer, shrinking=fewer > least)
        why = f"{least} would do"
        return tuning, _decision(tuning, overhead, f"k {k} -> {fewer}: save cost {saw}; {why}")

    tuning = replace(tuning, shrinking=tuning.shrinking and least < k)
    if tuning.baseline.age_saves >= _GAP_EVERY_SAVES and not asked_before:
        why = f"the baseline is {tuning.baseline.age_saves} saves old"
        return _with_gap(tuning, overhead, f"k {k} stays: save cost {saw}; {why}")
    return tuning, _decision(tuning, overhead, f"k {k} stays: save cost {saw}")


def _learned(tuning: Tuning, interval: IntervalSeen) -> Tuning:
    """Return the state with a newer baseline; comparisons with an outdated one are struck out."""
    baseline, changed = renewed(tuning.baseline, interval, tuning.max_overhead)
    recent = tuning.recent
    if changed:
        recent = tuple(old if old.fresh else replace(old, cost_s=None) for old in recent)
    return replace(tuning, baseline=baseline, recent=recent)


def _judge(tuning: Tuning, seen: SaveSeen) -> Judged:
    interval = seen.interval
    finish_s = max(0.0, seen.copy_s) + max(0.0, seen.persist_s)
    baseline = tuning.baseline
    copying, loaded = interval.copying, interval.loaded
    chance_s = allowance_s(baseline, copying.steps + loaded.steps)
    slower_s = max(0.0, slow_down_s(interval, baseline.iteration_s) - chance_s)
    beside_s = copying.sum_s + loaded.sum_s + interval.waited_s
    if not interval.unloaded.steps and beside_s > 0:
        slower_s *= max(1.0, finish_s / beside_s)  # the interval ended before the save did
    overlap_s = 0.0
    if seen.mode is not Mode.BLOCKING:
        overlap_s = interval.waited_s + copying.excess_s(baseline.iteration_s)
        overlap_s -= allowance_s(baseline, copying.steps)
    return Judged(
        cost_s=interval.stall_s + slower_s,
        stall_s=interval.stall_s,
        left_s=max(0.0, finish_s - interval.stall_s),
        finish_s=finish_s,
        persist_s=max(0.0, seen.persist_s),
        overlap_s=max(0.0, overlap_s),
        fresh=interval.unloaded.steps > 0,
    )


def _with_costs(tuning: Tuning) -> Tuning:
    """Return the state with costs as seen lately, which are what a restarted job begins with."""
    persist_s = statistics.median(judged.persist_s for judged in tuning.recent)
    costs = replace(tuning.costs, iteration_s=tuning.baseline.iteration_s, persist_s=persist_s)
    return replace(tuning, costs=costs)


def _second(values: Sequence[float]) -> float:
    """Return the second highest value, which one outlier does not raise. 0.0 for fewer than two."""
    return sorted(values)[-2] if len(values) > 1 else 0.0


def _needed(tuning: Tuning, window: int, factor: float = 1.0, *, certain: bool = False) -> int:
    """Return the interval that the last saves need, the dearest left out.

    With ``certain`` slow iterations are not counted, for which a baseline is needed.
    """
    recent = tuning.recent[-window:]
    if certain:
        costs = [judged.stall_s for judged in recent]
    else:
        costs = [judged.cost_s for judged in recent if judged.cost_s is not None]
    left_s = factor * _second([judged.left_s for judged in recent])
    return _interval(tuning, factor * _second(costs), left_s)


def _interval(tuning: Tuning, cost_s: float, left_s: float) -> int:
    shortest = steps_for(left_s, cost_s, tuning.baseline.iteration_s, tuning.max_overhead)
    if tuning.mtbf_s is None:
        return shortest
    return max(
        shortest, least_waste_interval_steps(cost_s, tuning.baseline.iteration_s, tuning.mtbf_s)
    )


def _enough_to_shrink(tuning: Tuning) -> bool:
    return sum(judged.cost_s is not None for judged in tuning.recent) >= _JUDGED


def _baseline_doubtful(tuning: Tuning, interval: IntervalSeen) -> bool:
    """Return whether slow iterations alone call for a longer interval, or fast ones mock the base.

    Both may come from a job that has another pace than when the baseline was measured.
    """
    last = tuning.recent[-1]
    if last.cost_s is not None:
        with_slow = _interval(tuning, last.cost_s, 0.0)
        if with_slow > max(tuning.interval_steps, _interval(tuning, last.stall_s, 0.0)):
            return True
    beside = [pace for pace in (interval.copying, interval.loaded) if pace.steps]
    return any(change_s(tuning.baseline, pace, tuning.max_overhead) < 0 for pace in beside)


def _with_gap(tuning: Tuning, overhead: float, reason: str) -> tuple[Tuning, Decision]:
    tuning = replace(tuning, gap_steps=gap_steps(tuning.baseline, tuning.max_overhead))
    return tuning, _decision(tuning, overhead, f"{reason}: a gap of {tuning.gap_steps}")


def _overlap_is_dear(tuning: Tuning) -> bool:
    if tuning.mode is Mode.BLOCKING or tuning.mode_is_fixed:
        return False
    overlap_s = _second([judged.overlap_s for judged in tuning.recent[-_JUDGED:]])
    return overlap_s > _DEARER * stall_s(tuning.costs, Mode.BLOCKING)


def _without_overlap(tuning: Tuning, overhead: float, saw: str) -> tuple[Tuning, Decision]:
    overlap_s = _second([judged.overlap_s for judged in tuning.recent[-_JUDGED:]])
    blocking_s = stall_s(tuning.costs, Mode.BLOCKING)
    k = tuning.interval_steps
    longer = interval_steps(tuning.costs, Mode.BLOCKING, tuning.max_overhead, tuning.mtbf_s)
    tuning = replace(
        tuning,
        interval_steps=max(k, longer),
        mode=Mode.BLOCKING,
        recent=(),  # they say nothing about blocking saves
        shrinking=False,
    )
    why = f"overlapped copy cost {overlap_s:.3g} s, a blocking one {blocking_s:.3g} s"
    return tuning, _decision(
        tuning, overhead, f"k {k} -> {tuning.interval_steps}, blocking: {why}; save cost {saw}"
    )


def _decision(tuning: Tuning, overhead: float | None, reason: str) -> Decision:
    costs = [judged.cost_s for judged in tuning.recent if judged.cost_s is not None]
    finishes = [judged.finish_s for judged in tuning.recent]
    expected = stall_s(tuning.costs, tuning.mode)
    copied_s = tuning.costs.snapshot_cpu_s
    return Decision(
        interval_steps=tuning.interval_steps,
        gap_steps=tuning.gap_steps,
        mode=tuning.mode,
        overhead_seen=overhead,
        reason=reason,
        forecast=forecast(
            tuning.interval_steps,
            iteration_s=tuning.baseline.iteration_s,
            stall_s=statistics.median(costs) if costs else expected,
            finish_s=statistics.median(finishes) if finishes else copied_s + tuning.costs.persist_s,
            mtbf_s=tuning.mtbf_s,
        ),
    )
