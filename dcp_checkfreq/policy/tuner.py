"""From each save that was seen to the next interval: a reducer. Pure.

The interval grows at once when saves need it, shrinks step by step when they clearly need less,
and otherwise stays. See docs/policy.md for the rules and their reasons.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from dcp_checkfreq.policy import constants, interval, save_cost
from dcp_checkfreq.policy.baseline import Baseline, baseline_of, change_s, renewed
from dcp_checkfreq.policy.constants import CLEARLY, FEW, KEPT, SOME, SURE
from dcp_checkfreq.policy.costs import Costs
from dcp_checkfreq.policy.interval import Forecast, Mode, finish_s, stall_s
from dcp_checkfreq.policy.observation import cost_per_save_s
from dcp_checkfreq.policy.save_cost import SaveCost
from dcp_checkfreq.policy.save_timings import SaveTimings, warmer


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """All that the next decision depends on. Made by `start`, changed by `observe`."""

    interval_steps: int  # k
    gap_steps: int  # this interval is longer, to see iterations alone, or shorter, after a profile
    mode: Mode  # how snapshots are copied
    mode_is_fixed: bool  # the user has chosen it
    max_overhead: float  # p
    mtbf_s: float | None  # mean time between failures of the job, or None
    costs: Costs  # the profile, with an iteration as seen lately; a restarted job begins with it
    baseline: Baseline  # iterations with no save under way
    recent: tuple[SaveCost, ...] = ()  # the last saves, the newest last
    shrinking: bool = False  # the interval is on its way down
    blocking_saves: int = 0  # so many more are blocking before overlapping is tried again
    next_blocking_saves: int = KEPT  # how many it will be the next time that overlapping costs more
    warming: bool = False  # k is from a profile that later saves have not confirmed yet
    cold_stall_s: float = 0.0  # how long the loop stood still for the last save that is not judged

    def steps(self, cost_s: float, left_s: float) -> int:
        """Return k for saves that cost ``cost_s`` and go on beside the loop for ``left_s``."""
        base_s = self.baseline.iteration_s
        return interval.needed_steps(cost_s, left_s, base_s, self.max_overhead, self.mtbf_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """When and how to save next. Takes effect in the running interval."""

    interval_steps: int  # k; the next save is ``k + gap_steps`` iterations after the last one
    gap_steps: int  # once; see `Tuning`
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
    base_steps: int = constants.FEWEST_PROFILE_STEPS,
) -> Tuning:
    """Return the state to begin with, from the profile of the worst rank.

    ``mode`` None chooses how to copy, and gives up overlapping if it costs more.
    ``first_interval_steps`` is the k that an earlier run of the same job ended with, under the same
    p and failure rate; without it k is from the costs, and checked with an early save.
    ``base_steps`` is how many iterations ``costs.iteration_s`` was measured from.
    """
    chosen = interval.choose_mode(costs) if mode is None else mode
    k = interval.interval_steps(costs, chosen, max_overhead, mtbf_s)
    warming = first_interval_steps is None
    if first_interval_steps is not None:
        k = min(max(first_interval_steps, 1), interval.MAX_INTERVAL_STEPS)
    return Tuning(
        interval_steps=k,
        gap_steps=min(0, constants.PROFILE_STEPS - k) if warming else 0,
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

    A first save of a process and a failed one are not judged: only the iterations without a save
    are learned from, and after a profile what a first save did faster than that one.
    """
    k, between = tuning.interval_steps, seen.interval
    asked, tuning = tuning.gap_steps > 0, _learned(tuning, seen)
    if seen.is_first or seen.failed or not between.steps:
        tuning, why = _not_judged(replace(tuning, gap_steps=0), seen)
        return tuning, _decision(tuning, k, None, why)
    # Some iterations of a gap may not have been measured, so more than k are enough. Otherwise the
    # interval that was seen had ended before the gap was asked for: it is still to come.
    had_gap = between.unloaded.steps > 0 or between.steps > k
    stale = tuning.baseline.age_saves > 0 and not (asked and had_gap)
    recent = (*tuning.recent, save_cost.judge(tuning.baseline, seen))[-KEPT:]
    gap = 0 if had_gap else max(0, tuning.gap_steps)
    tuning = replace(tuning, recent=save_cost.without_outdated(recent), gap_steps=gap)
    tuning, why = _other_mode(tuning)
    if not why:
        tuning, why = _next(tuning, seen, stale=stale)
    base_s = tuning.baseline.iteration_s
    overhead = cost_per_save_s(between, base_s) / max(between.steps * base_s, 1e-9)
    why = f"the budget is {tuning.max_overhead:.1%}{why}"
    why = f"the last save cost {overhead:.1%} of the training time, {why}"
    return tuning, _decision(tuning, k, overhead, why)


def _learned(tuning: Tuning, seen: SaveTimings) -> Tuning:
    """Return the state with a newer baseline; comparisons with an outdated one are struck out."""
    baseline, changed = renewed(tuning.baseline, seen.interval, tuning.max_overhead)
    recent, costs = tuning.recent, tuning.costs
    if changed:
        recent = tuple(save if save.fresh else replace(save, cost_s=None) for save in recent)
    if tuning.warming and not seen.failed:
        costs = warmer(costs, seen)
    update_s = seen.interval.update_s if seen.interval.steps else costs.update_s
    costs = replace(costs, iteration_s=baseline.iteration_s, update_s=update_s)
    return replace(tuning, baseline=baseline, recent=recent, costs=costs)


def _not_judged(tuning: Tuning, seen: SaveTimings) -> tuple[Tuning, str]:
    if seen.failed or not seen.interval.steps:
        return tuning, "a save that failed, or with no iteration before it, is no measure"
    k, before = _warm_interval(tuning), tuning.interval_steps
    why = "the profile's save was slower" if k < before else "a first save is no measure"
    return replace(tuning, cold_stall_s=seen.interval.stall_s, interval_steps=k), why


def _next(tuning: Tuning, seen: SaveTimings, *, stale: bool) -> tuple[Tuning, str]:
    """Return the state with the next interval, and why; ``stale``: the baseline is an older one."""
    k, recent, steps = tuning.interval_steps, tuning.recent, tuning.steps
    cost = save_cost.estimate(recent, tuning.baseline)
    cost_s, error_s = cost.cost_s, SURE * cost.error_s
    lefts = [save.left_s for save in recent]
    swings = save_cost.swings(lefts)
    left_s = save_cost.second(lefts if swings else lefts[-FEW:])
    longest_s = max(lefts if swings else lefts[-SOME:])
    # Standing still is measured directly: two saves that did, a judged and a cold one, are enough.
    stood_s = statistics.median_low([tuning.cold_stall_s, *(one.stall_s for one in recent)][-FEW:])

    # At once to what two of the last saves need: to be published in time, and to be paid. If only
    # slow iterations say so, and the baseline may be outdated, that is renewed first.
    doubtful = stale and _baseline_doubtful(tuning, seen)
    surely = steps(stood_s / CLEARLY, left_s)
    if not doubtful:
        surely = max(surely, steps(cost_s - error_s, left_s))
    if surely > k:
        grown = surely if doubtful else max(steps(stood_s, 0.0), steps(cost_s, left_s))
        warming = tuning.warming and len(recent) == 1  # else k is from what was judged
        return replace(tuning, interval_steps=grown, shrinking=False, warming=warming), ""

    why, age = "", tuning.baseline.age_saves
    if not tuning.gap_steps and (doubtful or (stale and age >= constants.GAP_EVERY_SAVES)):
        tuning = replace(tuning, gap_steps=FEW)
        why = "must be seen first" if doubtful else f"was last seen {age} saves ago"
        why = f"; an iteration without a save {why}: the next save is {FEW} later"

    # A profile was one save: until three more were judged, at once to what the fastest needed.
    known = sum(save.cost_s is not None for save in recent) >= FEW
    if not doubtful:
        warm = _warm_interval(tuning)
        tuning = replace(tuning, warming=tuning.warming and not known, interval_steps=warm)
        if warm < k:
            return tuning, f"; the profile's save was slower{why}"

    # Half of the distance with every save, once even higher costs would need less.
    enough = steps(cost_s, longest_s)
    at_most = steps(max(CLEARLY * cost_s, cost_s + error_s), CLEARLY * longest_s)
    shrinks = enough < k and (tuning.shrinking or at_most < k)
    if not (shrinks and known and not doubtful):
        return replace(tuning, shrinking=tuning.shrinking and shrinks), why
    fewer = k - max(1, (k - enough) // 2)
    tuning = replace(tuning, interval_steps=fewer, shrinking=fewer > enough)
    return tuning, f"; every {enough} would do{why}"


def _warm_interval(tuning: Tuning) -> int:
    """Return the interval that the fastest saves so far need; k if that is not clearly less."""
    costs, mode, recent, k = tuning.costs, tuning.mode, tuning.recent, tuning.interval_steps
    if not tuning.warming:
        return k
    cost_s, error_s = stall_s(costs, mode), 0.0
    left_s = max(0.0, finish_s(costs, mode) + costs.call_s - cost_s)
    if recent:
        left_s = max(left_s, recent[-1].left_s)
        known = [(save.cost_s, save.error_s) for save in recent if save.cost_s is not None]
        least_s, error_s = min(known, default=(0.0, 0.0))
        cost_s = max(cost_s, least_s)
    clearly = tuning.steps(max(CLEARLY * cost_s, cost_s + SURE * error_s), CLEARLY * left_s)
    return tuning.steps(cost_s, left_s) if clearly < k else k


def _baseline_doubtful(tuning: Tuning, seen: SaveTimings) -> bool:
    """Return whether slow iterations alone call for a longer interval, or some beat the baseline.

    Both may come from a job that has another pace than when the baseline was measured.
    """
    last = tuning.recent[-1]
    if last.cost_s is not None:
        surely = tuning.steps(last.cost_s - SURE * last.error_s, 0.0)
        if surely > max(tuning.interval_steps, tuning.steps(last.stall_s, 0.0)):
            return True
    beside = (seen.interval.copying, seen.interval.loaded)
    return any(change_s(tuning.baseline, one, tuning.max_overhead) < 0 for one in beside)


def _other_mode(tuning: Tuning) -> tuple[Tuning, str]:
    """Return the state with snapshots copied in another way, and why; "" if it is the same way.

    Overlapping is given up if it cost more than a blocking copy in two of the last three saves,
    unless the user has chosen it. That may have been a busy moment of the machine: after a while
    it is tried again, after twice as long with every further time.
    """
    if tuning.mode is Mode.BLOCKING or tuning.mode_is_fixed:
        left = tuning.blocking_saves - 1
        tuning = replace(tuning, blocking_saves=max(0, left))
        if left:
            return tuning, ""
        # saves of one mode say nothing about those of the other
        mode = interval.choose_mode(tuning.costs)
        tuning = replace(tuning, mode=mode, recent=(), shrinking=False)
        return tuning, "; the copy is made beside the training again, to see what it costs now"
    blocking_s = tuning.costs.snapshot_cpu_s
    overlap_s = save_cost.second([save.overlap_s for save in tuning.recent[-FEW:]])
    if overlap_s <= (1 + constants.ALIKE) * blocking_s:
        return tuning, ""
    p, mtbf_s, mode = tuning.max_overhead, tuning.mtbf_s, Mode.BLOCKING
    k = max(tuning.interval_steps, interval.interval_steps(tuning.costs, mode, p, mtbf_s))
    saves = tuning.next_blocking_saves
    tuning = replace(tuning, blocking_saves=saves, next_blocking_saves=2 * saves)
    tuning = replace(tuning, interval_steps=k, mode=mode, shrinking=False, recent=())
    why = f"a copy beside it cost {overlap_s:.3g} s, one that it waits for {blocking_s:.3g} s"
    return tuning, f"; training waits for the copy now: {why}"


def _decision(tuning: Tuning, before: int | None, overhead: float | None, why: str) -> Decision:
    """Return what the state amounts to; ``before`` is k until now, None to begin with."""
    k, mode = tuning.interval_steps, tuning.mode
    told = "to begin with" if before is None else "as before" if k == before else f"(was {before})"
    costs = [save.cost_s for save in tuning.recent if save.cost_s is not None]
    finishes = [save.finish_s for save in tuning.recent]
    of_profile_s = finish_s(tuning.costs, mode)
    return Decision(
        interval_steps=k,
        gap_steps=tuning.gap_steps,
        mode=mode,
        overhead_seen=overhead,
        reason=f"save every {k} iterations {told}{why and ': '}{why}",
        forecast=interval.forecast(
            k,
            iteration_s=tuning.baseline.iteration_s,
            cost_s=statistics.median(costs or [stall_s(tuning.costs, mode)]),
            save_s=statistics.median(finishes or [of_profile_s]),
            longest_save_s=max(finishes, default=of_profile_s),
            gap_steps=tuning.gap_steps,
            mtbf_s=tuning.mtbf_s,
        ),
    )
