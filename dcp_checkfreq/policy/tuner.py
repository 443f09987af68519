"""From each save that was seen to the next interval: a reducer. Pure.

The interval grows at once when saves need it, shrinks step by step when they clearly need less,
and otherwise stays. See docs/policy.md for the reasons behind each number here.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from dcp_checkfreq.policy.baseline import (
    Baseline,
    baseline_error_s,
    baseline_of,
    change_s,
    gap_steps,
    renewed,
)
from dcp_checkfreq.policy.costs import (
    ALIKE,
    CLEARLY,
    FEW,
    FEWEST_PROFILE_STEPS,
    GAP_EVERY_SAVES,
    KEPT,
    PROFILE_STEPS,
    SOME,
    SURE,
    Costs,
)
from dcp_checkfreq.policy.interval import (
    MAX_INTERVAL_STEPS,
    Forecast,
    Mode,
    choose_mode,
    finish_s,
    forecast,
    interval_steps,
    needed_steps,
    stall_s,
    steps_for,
)
from dcp_checkfreq.policy.observation import IntervalSeen, cost_per_save_s
from dcp_checkfreq.policy.required_interval import needs_of
from dcp_checkfreq.policy.save_cost import SaveCost, judge, second, without_outdated
from dcp_checkfreq.policy.save_timings import SaveTimings, warmer


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """All that the next decision depends on. Made by `start`, changed by `observe`."""

    interval_steps: int  # k
    # Iterations that the running interval is longer, to see some without a save; negative if it is
    # shorter, to check a profile.
    gap_steps: int
    mode: Mode  # how snapshots are copied
    mode_is_fixed: bool  # the user has chosen it
    max_overhead: float  # p
    mtbf_s: float | None  # mean time between failures of the job, or None
    costs: Costs  # the profile, with iteration, update and persist as seen lately
    baseline: Baseline  # iterations with no save under way
    recent: tuple[SaveCost, ...] = ()  # the last saves, the newest last
    shrinking: bool = False  # the interval is on its way down
    blocking_saves: int = 0  # so many more are blocking before overlapping is tried again
    next_blocking_saves: int = KEPT  # how many it will be the next time that overlapping costs more
    warming: bool = False  # k is from a profile that later saves have not confirmed yet
    cold_stall_s: float = 0.0  # the loop stood still for the first saves of this process, at most

    def steps(self, cost_s: float, left_s: float) -> int:
        """Return k for saves that cost ``cost_s`` and go on beside the loop for ``left_s``."""
        base_s = self.baseline.iteration_s
        return needed_steps(cost_s, left_s, base_s, self.max_overhead, self.mtbf_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """When and how to save next. Takes effect in the running interval."""

    interval_steps: int  # k; the next save is ``k + gap_steps`` iterations after the last one
    # Iterations more, this once, so that some are seen with no save under way; or fewer, after a
    # profile, as its save may have been far slower than later ones.
    gap_steps: int
    mode: Mode  # how to copy the snapshot
    overhead_seen: float | None  # share of training time that the save cost; None: no measure
    reason: str  # one line for the log
    forecast: Forecast  # what the interval means for the run


def start(
    costs: Costs,
    *,
    max_overhead: float,
    mtbf_s: float | None = None,
    mode: Mode | None = None,
    first_interval_steps: int | None = None,
    base_steps: int = FEWEST_PROFILE_STEPS,
) -> Tuning:
    """Return the state to begin with.

    Args:
        costs: the profile, of the worst rank.
        max_overhead: p, in (0, 1].
        mtbf_s: mean time between failures; None if not known.
        mode: how to copy; None to choose, and to give up overlapping if it costs more.
        first_interval_steps: k that an earlier run of the same job ended with, under the same
            p and failure rate; None to take it from the costs, and check it with an early save.
        base_steps: how many iterations ``costs.iteration_s`` was measured from.

    Raises:
        ValueError: ``max_overhead`` is outside (0, 1], ``mtbf_s`` is no positive number, or mode
            GPU without a measured ``snapshot_gpu_s``.
    """
    chosen = choose_mode(costs) if mode is None else mode
    k = interval_steps(costs, chosen, max_overhead, mtbf_s)
    warming = first_interval_steps is None
    if first_interval_steps is not None:
        k = min(max(first_interval_steps, 1), MAX_INTERVAL_STEPS)
    return Tuning(
        interval_steps=k,
        gap_steps=min(0, PROFILE_STEPS - k) if warming else 0,
        mode=chosen,
        mode_is_fixed=mode is not None,
        max_overhead=max_overhead,
        mtbf_s=mtbf_s,
        costs=costs,
        baseline=baseline_of(costs.iteration_s, base_steps),
        warming=warming,
    )


def opening(tuning: Tuning) -> Decision:
    """Return the decision that `start` amounts to."""
    return _decision(tuning, None, None, "")


def observe(tuning: Tuning, seen: SaveTimings) -> tuple[Tuning, Decision]:
    """Return the state after one more save, and what to do now.

    A first save of a process and a failed one say nothing about later saves: the iterations without
    a save are learned from, and after a profile what a first save did faster than that one.
    For others see `_next`.
    """
    k = tuning.interval_steps
    if not seen.interval.steps:
        tuning = replace(tuning, gap_steps=0)
        return tuning, _decision(tuning, k, None, "no iteration was seen since the last save")
    tuning = _learned(tuning, seen.interval)
    if seen.is_first or seen.failed:
        tuning, why = _not_judged(replace(tuning, gap_steps=0), seen)
        return tuning, _decision(tuning, k, None, why)
    # Some iterations of a gap may not have been measured, so more than k are enough. Otherwise the
    # interval that was seen had ended before the gap was asked for: it is still to come.
    asked = tuning.gap_steps > 0
    had_gap = seen.interval.unloaded.steps > 0 or seen.interval.steps > k
    tuning = replace(tuning, gap_steps=0 if had_gap else max(0, tuning.gap_steps))
    recent = without_outdated((*tuning.recent, judge(tuning.baseline, seen))[-KEPT:])
    tuning = _with_costs(replace(tuning, recent=recent), seen)
    base_s = tuning.baseline.iteration_s
    overhead = cost_per_save_s(seen.interval, base_s) / max(seen.interval.steps * base_s, 1e-9)
    stale = tuning.baseline.age_saves > 0 and not (asked and had_gap)
    tuning, why = _next(tuning, seen.interval, stale=stale)
    cost = f"the last save cost {overhead:.1%} of the training time"
    said = f"{cost}, the budget is {tuning.max_overhead:.1%}"
    return tuning, _decision(tuning, k, overhead, f"{said}{why}")


def _next(tuning: Tuning, interval: IntervalSeen, *, stale: bool) -> tuple[Tuning, str]:
    """Return the state with the next interval, and why.

    In this order:

    - If overlapping the copy cost more than a blocking copy would, in two of the last three
      saves, snapshots are blocking for a while, for twice as long with every time (unless the
      user has chosen the mode).
    - If two of the last three saves need a longer interval, it grows at once to what they need: to
      be published before the next one starts, to stay within p, and with a failure rate to waste
      least. If only slow iterations say so, and the baseline is not from this interval
      (``stale``), it is renewed first.
    - If the first save that is judged stood still for clearly longer than the budget, and the cold
      ones before it did so too, the interval grows at once to what the shorter of both needs.
    - Until three saves were judged after a profile, the interval comes down at once to what the
      fastest needed, if that is clearly less.
    - If the last saves would need less even if they cost a quarter more, it shrinks by half of the
      distance with every save, until it is what they need.
    - Else it stays; a gap is asked for when the baseline is old.
    """
    if _overlap_is_dear(tuning):
        return _without_overlap(tuning)
    if tuning.blocking_saves:
        tuning = replace(tuning, blocking_saves=tuning.blocking_saves - 1)
        if not tuning.blocking_saves:
            tuning = replace(tuning, mode=choose_mode(tuning.costs), recent=(), shrinking=False)
            return tuning, "; the copy is made beside the training again, to see what it costs now"

    k = tuning.interval_steps
    needs = needs_of(tuning.recent, tuning.baseline, tuning.steps, cold_stall_s=tuning.cold_stall_s)
    doubtful = stale and _baseline_doubtful(tuning, interval)
    surely = needs.without_baseline if doubtful else needs.surely
    if surely > k:
        grown = surely if doubtful else needs.likely
        warming = tuning.warming and len(tuning.recent) == 1  # else k is from what was judged
        return replace(tuning, interval_steps=grown, shrinking=False, warming=warming), ""

    why, age = "", tuning.baseline.age_saves
    if not tuning.gap_steps and (doubtful or (stale and age >= GAP_EVERY_SAVES)):
        tuning = replace(tuning, gap_steps=_gap_that_fits(tuning))
        why = "must be seen first" if doubtful else f"was last seen {age} saves ago"
        why = f"; an iteration without a save {why}: the next save is {tuning.gap_steps} later"

    if tuning.warming and not doubtful:
        warm = _warm_interval(tuning)
        tuning = replace(tuning, warming=not needs.known)
        if warm < k:
            return replace(tuning, interval_steps=warm), f"; the first save was slower{why}"

    shrinks = needs.enough < k and (tuning.shrinking or needs.at_most < k)
    if not (shrinks and needs.known and not doubtful):
        return replace(tuning, shrinking=tuning.shrinking and shrinks), why
    fewer = k - max(1, (k - needs.enough) // 2)
    tuning = replace(tuning, interval_steps=fewer, shrinking=fewer > needs.enough)
    return tuning, f"; every {needs.enough} would do{why}"


def _not_judged(tuning: Tuning, seen: SaveTimings) -> tuple[Tuning, str]:
    if seen.failed:
        return tuning, "a failed save is no measure"
    tuning = replace(tuning, cold_stall_s=max(tuning.cold_stall_s, seen.interval.stall_s))
    if tuning.warming:
        costs = replace(warmer(tuning.costs, seen), iteration_s=tuning.baseline.iteration_s)
        tuning = replace(tuning, costs=costs)
        warm = _warm_interval(tuning)
        if warm < tuning.interval_steps:
            return replace(tuning, interval_steps=warm), "the profile's save was slower"
    return tuning, "the first save of a process is no measure"


def _warm_interval(tuning: Tuning) -> int:
    """Return the interval that the fastest saves so far need; k if that is not clearly less."""
    costs, mode = tuning.costs, tuning.mode
    cost_s = stall_s(costs, mode)
    left_s = max(0.0, finish_s(costs, mode) + costs.call_s - cost_s)
    error_s = 0.0
    if tuning.recent:
        left_s = max(left_s, tuning.recent[-1].left_s)
        known = [(save.cost_s, save.error_s) for save in tuning.recent if save.cost_s is not None]
        least_s, error_s = min(known, default=(0.0, 0.0))
        cost_s = max(cost_s, least_s)
    clearly = tuning.steps(max(CLEARLY * cost_s, cost_s + SURE * error_s), CLEARLY * left_s)
    k = tuning.interval_steps
    return tuning.steps(cost_s, left_s) if clearly < k else k


def _learned(tuning: Tuning, interval: IntervalSeen) -> Tuning:
    """Return the state with a newer baseline; comparisons with an outdated one are struck out."""
    baseline, changed = renewed(tuning.baseline, interval, tuning.max_overhead)
    recent = tuning.recent
    if changed:
        recent = tuple(save if save.fresh else replace(save, cost_s=None) for save in recent)
    return replace(tuning, baseline=baseline, recent=recent)


def _with_costs(tuning: Tuning, seen: SaveTimings) -> Tuning:
    """Return the state with costs as seen lately, which are what a restarted job begins with."""
    if tuning.warming:
        costs = warmer(tuning.costs, seen)
    else:
        persist_s = statistics.median(save.persist_s for save in tuning.recent[-SOME:])
        if seen.mode is Mode.GPU:  # the copy to the host is part of what was seen
            persist_s = max(0.0, persist_s - tuning.costs.snapshot_cpu_s)
        costs = replace(tuning.costs, persist_s=persist_s)
    costs = replace(costs, iteration_s=tuning.baseline.iteration_s, update_s=seen.interval.update_s)
    return replace(tuning, costs=costs)


def _gap_that_fits(tuning: Tuning) -> int:
    """Return a gap with which a crash costs no more than two intervals, if there is room for one.

    Interval, gap and the save in flight after them come to 2k at most. Where saves take as long as
    an interval, no gap fits: then it is as short as can be, and the forecast says what it costs.
    """
    save_steps = steps_for(_longest_s(tuning), 0.0, tuning.baseline.iteration_s, 1.0)
    fits = max(FEW, tuning.interval_steps - save_steps)
    return min(gap_steps(tuning.baseline, tuning.max_overhead), fits)


def _longest_s(tuning: Tuning) -> float:
    of_profile_s = finish_s(tuning.costs, tuning.mode)
    return max((save.finish_s for save in tuning.recent), default=of_profile_s)


def _baseline_doubtful(tuning: Tuning, interval: IntervalSeen) -> bool:
    """Return whether slow iterations alone call for a longer interval, or fast ones mock the base.

    Both may come from a job that has another pace than when the baseline was measured.
    """
    last = tuning.recent[-1]
    if last.cost_s is not None:
        shared_s = baseline_error_s(tuning.baseline, last.beside_steps)
        surely_s = last.cost_s - SURE * math.hypot(last.error_s, shared_s)
        without = max(tuning.interval_steps, tuning.steps(last.stall_s, 0.0))
        if tuning.steps(max(surely_s, last.stall_s), 0.0) > without:
            return True
    beside = [pace for pace in (interval.copying, interval.loaded) if pace.steps]
    return any(change_s(tuning.baseline, pace, tuning.max_overhead) < 0 for pace in beside)


def _overlap_s(tuning: Tuning) -> float:
    return second([save.overlap_s for save in tuning.recent[-FEW:]])


def _overlap_is_dear(tuning: Tuning) -> bool:
    may_block = tuning.mode is not Mode.BLOCKING and not tuning.mode_is_fixed
    return may_block and _overlap_s(tuning) > (1 + ALIKE) * tuning.costs.snapshot_cpu_s


def _without_overlap(tuning: Tuning) -> tuple[Tuning, str]:
    beside_s, by_itself_s = _overlap_s(tuning), tuning.costs.snapshot_cpu_s
    longer = interval_steps(tuning.costs, Mode.BLOCKING, tuning.max_overhead, tuning.mtbf_s)
    tuning = replace(
        tuning,
        interval_steps=max(tuning.interval_steps, longer),
        mode=Mode.BLOCKING,
        recent=(),  # they say nothing about blocking saves
        cold_stall_s=0.0,
        shrinking=False,
        blocking_saves=tuning.next_blocking_saves,
        next_blocking_saves=2 * tuning.next_blocking_saves,
    )
    why = f"a copy beside it cost {beside_s:.3g} s, one that it waits for {by_itself_s:.3g} s"
    return tuning, f"; training waits for the copy now: {why}"


def _decision(tuning: Tuning, before: int | None, overhead: float | None, why: str) -> Decision:
    """Return what the state amounts to; ``before`` is k until now, None to begin with."""
    k = tuning.interval_steps
    told = "to begin with" if before is None else "as before" if k == before else f"(was {before})"
    costs = [save.cost_s for save in tuning.recent if save.cost_s is not None]
    cost_s, save_s = stall_s(tuning.costs, tuning.mode), finish_s(tuning.costs, tuning.mode)
    if costs:
        cost_s = statistics.median(costs)
        save_s = statistics.median(save.finish_s for save in tuning.recent[-SOME:])
    return Decision(
        interval_steps=k,
        gap_steps=tuning.gap_steps,
        mode=tuning.mode,
        overhead_seen=overhead,
        reason=f"save every {k} iterations {told}{why and ': '}{why}",
        forecast=forecast(
            k,
            iteration_s=tuning.baseline.iteration_s,
            cost_s=cost_s,
            save_s=save_s,
            longest_save_s=_longest_s(tuning),
            gap_steps=tuning.gap_steps,
            mtbf_s=tuning.mtbf_s,
        ),
    )
