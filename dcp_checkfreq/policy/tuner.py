"""From each save that was seen to the next interval: a reducer. Pure.

The interval grows at once when saves need it, shrinks step by step when they clearly need less,
and otherwise stays. See docs/policy.md for the reasons behind each number here.
"""

from __future__ import annotations

import enum
import math
import statistics
from dataclasses import dataclass, replace

from dcp_checkfreq.policy.baseline import (
    GAP_STEPS,
    Baseline,
    baseline_error_s,
    baseline_of,
    change_s,
    gap_steps,
    renewed,
)
from dcp_checkfreq.policy.costs import PROFILE_STEPS, Costs
from dcp_checkfreq.policy.interval import (
    MAX_INTERVAL_STEPS,
    Forecast,
    Mode,
    choose_mode,
    finish_s,
    forecast,
    interval_steps,
    stall_s,
    steps_for,
)
from dcp_checkfreq.policy.observation import IntervalSeen, SaveSeen, cost_per_save_s
from dcp_checkfreq.policy.required_interval import (
    CLEARLY,
    FEW,
    SOME,
    SURE,
    Limits,
    RequiredInterval,
    needed_steps,
    needs_of,
)
from dcp_checkfreq.policy.save_cost import (
    KEPT,
    SaveCost,
    judge,
    second,
    warmer,
    without_outdated,
)

USUAL_BASE_STEPS = 10  # iterations of a profile of which that is not known
_GAP_EVERY_SAVES = 8  # a baseline is renewed at least this often
# Then copies are blocking for so many saves, and for twice as many with every further time: what
# made overlapping dear may have been a busy moment of the machine.
_FIRST_BLOCKING_SAVES = 16
_DEARER = 1.1  # an overlapped copy must cost this much more than a blocking one to be given up


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """All that the next decision depends on. Made by `start`, changed by `observe`.

    Attributes:
        interval_steps: k.
        gap_steps: iterations that the running interval is longer, to see some without a save;
            negative if it is shorter, to check a profile.
        mode: how snapshots are copied.
        mode_is_fixed: the user has chosen it.
        max_overhead: p.
        mtbf_s: mean time between failures of the job, or None.
        costs: the profile, with iteration, update and persist as seen lately.
        baseline: iterations with no save under way.
        recent: the last saves, the newest last.
        shrinking: the interval is on its way down.
        blocking_saves: how many more saves are blocking before overlapping is tried again.
        next_blocking_saves: how many it will be the next time that overlapping costs more.
        warming: k is from a profile that later saves have not confirmed yet.
        cold_stall_s: how long the loop stood still for the first saves of this process, at most.
    """

    interval_steps: int
    gap_steps: int
    mode: Mode
    mode_is_fixed: bool
    max_overhead: float
    mtbf_s: float | None
    costs: Costs
    baseline: Baseline
    recent: tuple[SaveCost, ...] = ()
    shrinking: bool = False
    blocking_saves: int = 0
    next_blocking_saves: int = _FIRST_BLOCKING_SAVES
    warming: bool = False
    cold_stall_s: float = 0.0

    @property
    def limits(self) -> Limits:
        """What the user allows and expects."""
        return Limits(max_overhead=self.max_overhead, mtbf_s=self.mtbf_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """When and how to save next. Takes effect in the running interval.

    Attributes:
        interval_steps: k. The next save is ``k + gap_steps`` iterations after the last one.
        gap_steps: iterations more, this once, so that some are seen with no save under way; or
            fewer, after a profile, as its save may have been far slower than later ones.
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
    base_steps: int = USUAL_BASE_STEPS,
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
    if first_interval_steps is not None:
        k = min(max(first_interval_steps, 1), MAX_INTERVAL_STEPS)
    warming = first_interval_steps is None
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
    return _decision(tuning, None, f"k {tuning.interval_steps} to begin with")


def observe(tuning: Tuning, seen: SaveSeen) -> tuple[Tuning, Decision]:
    """Return the state after one more save, and what to do now.

    A first save of a process and a failed one say nothing about later saves: the iterations without
    a save are learned from, and after a profile what a first save did faster than that one.
    Otherwise, in this order:

    - Iterations without a save renew the baseline.
    - If overlapping the copy cost more than a blocking copy would, in two of the last three
      saves, snapshots are blocking for a while, for twice as long with every time (unless the
      user has chosen the mode).
    - If two of the last three saves need a longer interval, it grows at once to what they need: to
      be published before the next one starts, to stay within p, and with a failure rate to waste
      least. If only slow iterations say so, and the baseline is not from this interval, it is
      renewed first.
    - If the first save that is judged stood still for clearly longer than the budget, and the cold
      ones before it did so too, the interval grows at once to what the shorter of both needs.
    - Until three saves were judged after a profile, the interval comes down at once to what the
      fastest needed, if that is clearly less.
    - If the last saves would need less even if they cost a quarter more, it shrinks by half of the
      distance with every save, until it is what they need.
    - Else it stays; a gap is asked for when the baseline is old.
    """
    if not seen.interval.steps:
        tuning = replace(tuning, gap_steps=0)
        return tuning, _decision(tuning, None, "nothing was seen")
    tuning = _learned(tuning, seen.interval)
    if seen.is_first or seen.failed:
        tuning = replace(tuning, gap_steps=0)
        return _not_judged(tuning, seen)

    tuning, pending = _gap_taken(tuning, seen.interval)
    recent = without_outdated((*tuning.recent, judge(tuning.baseline, seen))[-KEPT:])
    tuning = _with_costs(replace(tuning, recent=recent), seen)
    base_s = tuning.baseline.iteration_s
    overhead = cost_per_save_s(seen.interval, base_s) / max(seen.interval.steps * base_s, 1e-9)
    saw = f"{overhead:.1%} of {seen.interval.steps} iterations, budget {tuning.max_overhead:.1%}"
    if _overlap_is_dear(tuning):
        return _without_overlap(tuning, overhead, saw)
    if tuning.blocking_saves:
        tuning = replace(tuning, blocking_saves=tuning.blocking_saves - 1)
        if not tuning.blocking_saves:
            return _with_overlap_again(tuning, overhead, saw)

    k, needs = tuning.interval_steps, _needs(tuning)
    stale = tuning.baseline.age_saves > 0 and pending is not _Gap.TAKEN
    doubtful = stale and _baseline_doubtful(tuning, seen.interval)
    surely = needs.without_baseline if doubtful else needs.surely
    if surely > k:
        grown = surely if doubtful else needs.likely
        warming = tuning.warming and len(tuning.recent) == 1  # else k is from what was judged
        tuning = replace(tuning, interval_steps=grown, shrinking=False, warming=warming)
        return tuning, _decision(tuning, overhead, f"k {k} -> {grown}: save cost {saw}")

    why = ""
    if pending is not _Gap.PENDING:
        if doubtful:
            why = "a baseline from this interval is needed first"
        elif stale and tuning.baseline.age_saves >= _GAP_EVERY_SAVES:
            why = f"the baseline is {tuning.baseline.age_saves} saves old"
    if why:
        tuning = replace(tuning, gap_steps=_gap_that_fits(tuning))
        why = f"; {why}: a gap of {tuning.gap_steps}"

    if tuning.warming and not doubtful:
        warm = _warm_interval(tuning)
        tuning = replace(tuning, warming=not needs.known)
        if warm < k:
            tuning = replace(tuning, interval_steps=warm)
            return tuning, _decision(
                tuning, overhead, f"k {k} -> {warm}, the profile was slow: save cost {saw}{why}"
            )

    shrinks = needs.enough < k and (tuning.shrinking or needs.at_most < k)
    if shrinks and needs.known and not doubtful:
        fewer = k - max(1, (k - needs.enough) // 2)
        tuning = replace(tuning, interval_steps=fewer, shrinking=fewer > needs.enough)
        saw = f"{saw}; {needs.enough} would do"
        return tuning, _decision(tuning, overhead, f"k {k} -> {fewer}: save cost {saw}{why}")
    tuning = replace(tuning, shrinking=tuning.shrinking and shrinks)
    return tuning, _decision(tuning, overhead, f"k {k} stays: save cost {saw}{why}")


def _not_judged(tuning: Tuning, seen: SaveSeen) -> tuple[Tuning, Decision]:
    k = tuning.interval_steps
    if seen.failed:
        return tuning, _decision(tuning, None, f"k {k} stays: a failed save is no measure")
    tuning = replace(tuning, cold_stall_s=max(tuning.cold_stall_s, seen.interval.stall_s))
    if tuning.warming:
        tuning = replace(tuning, costs=_warmer(tuning, seen))
        warm = _warm_interval(tuning)
        if warm < k:
            tuning = replace(tuning, interval_steps=warm)
            return tuning, _decision(tuning, None, f"k {k} -> {warm}: the profile was slow")
    why = "the first save of a process is no measure"
    return tuning, _decision(tuning, None, f"k {k} stays: {why}")


def _warmer(tuning: Tuning, seen: SaveSeen) -> Costs:
    return replace(warmer(tuning.costs, seen), iteration_s=tuning.baseline.iteration_s)


def _warm_interval(tuning: Tuning) -> int:
    """Return the interval that the fastest saves so far need; k if that is not clearly less."""
    costs, mode = tuning.costs, tuning.mode
    cost_s = stall_s(costs, mode)
    left_s = max(0.0, finish_s(costs, mode) + costs.call_s - cost_s)
    error_s = 0.0
    if tuning.recent:
        left_s = max(left_s, tuning.recent[-1].left_s)
        known = [(one.cost_s, one.error_s) for one in tuning.recent if one.cost_s is not None]
        if known:
            least_s, error_s = min(known)
            cost_s = max(cost_s, least_s)
    clearly = _interval(tuning, max(CLEARLY * cost_s, cost_s + SURE * error_s), CLEARLY * left_s)
    k = tuning.interval_steps
    return _interval(tuning, cost_s, left_s) if clearly < k else k


def _learned(tuning: Tuning, interval: IntervalSeen) -> Tuning:
    """Return the state with a newer baseline; comparisons with an outdated one are struck out."""
    baseline, changed = renewed(tuning.baseline, interval, tuning.max_overhead)
    recent = tuning.recent
    if changed:
        recent = tuple(old if old.fresh else replace(old, cost_s=None) for old in recent)
    return replace(tuning, baseline=baseline, recent=recent)


def _with_costs(tuning: Tuning, seen: SaveSeen) -> Tuning:
    """Return the state with costs as seen lately, which are what a restarted job begins with."""
    if tuning.warming:
        costs = warmer(tuning.costs, seen)
    else:
        persist_s = statistics.median(judged.persist_s for judged in tuning.recent[-SOME:])
        if seen.mode is Mode.GPU:  # the copy to the host is part of what was seen
            persist_s = max(0.0, persist_s - tuning.costs.snapshot_cpu_s)
        costs = replace(tuning.costs, persist_s=persist_s)
    costs = replace(costs, iteration_s=tuning.baseline.iteration_s, update_s=seen.interval.update_s)
    return replace(tuning, costs=costs)


class _Gap(enum.Enum):
    """What became of the gap that was asked for."""

    NONE = enum.auto()
    PENDING = enum.auto()  # the interval that was seen had ended before it was asked for
    TAKEN = enum.auto()


def _gap_taken(tuning: Tuning, interval: IntervalSeen) -> tuple[Tuning, _Gap]:
    if tuning.gap_steps <= 0:
        return replace(tuning, gap_steps=0), _Gap.NONE
    # some of its iterations may not have been measured, so more than k are enough
    if interval.unloaded.steps or interval.steps > tuning.interval_steps:
        return replace(tuning, gap_steps=0), _Gap.TAKEN
    return tuning, _Gap.PENDING


def _gap_that_fits(tuning: Tuning) -> int:
    """Return a gap with which a crash costs no more than two intervals, if there is room for one.

    Interval, gap and the save in flight after them come to 2k at most. Where saves take as long as
    an interval, no gap fits: then it is as short as can be, and the forecast says what it costs.
    """
    wanted = gap_steps(tuning.baseline, tuning.max_overhead)
    save_steps = steps_for(_longest_s(tuning), 0.0, tuning.baseline.iteration_s, 1.0)
    return min(wanted, max(GAP_STEPS, tuning.interval_steps - save_steps))


def _longest_s(tuning: Tuning) -> float:
    if not tuning.recent:
        return finish_s(tuning.costs, tuning.mode)
    return max(judged.finish_s for judged in tuning.recent)


def _needs(tuning: Tuning) -> RequiredInterval:
    return needs_of(tuning.recent, tuning.baseline, tuning.limits, cold_stall_s=tuning.cold_stall_s)


def _interval(tuning: Tuning, cost_s: float, left_s: float) -> int:
    return needed_steps(cost_s, left_s, tuning.baseline.iteration_s, tuning.limits)


def _baseline_doubtful(tuning: Tuning, interval: IntervalSeen) -> bool:
    """Return whether slow iterations alone call for a longer interval, or fast ones mock the base.

    Both may come from a job that has another pace than when the baseline was measured.
    """
    last = tuning.recent[-1]
    if last.cost_s is not None:
        shared_s = baseline_error_s(tuning.baseline, last.beside_steps)
        surely_s = last.cost_s - SURE * math.hypot(last.error_s, shared_s)
        if _interval(tuning, max(surely_s, last.stall_s), 0.0) > max(
            tuning.interval_steps, _interval(tuning, last.stall_s, 0.0)
        ):
            return True
    beside = [pace for pace in (interval.copying, interval.loaded) if pace.steps]
    return any(change_s(tuning.baseline, pace, tuning.max_overhead) < 0 for pace in beside)


def _overlap_is_dear(tuning: Tuning) -> bool:
    if tuning.mode is Mode.BLOCKING or tuning.mode_is_fixed:
        return False
    overlap_s = second([judged.overlap_s for judged in tuning.recent[-FEW:]])
    return overlap_s > _DEARER * tuning.costs.snapshot_cpu_s


def _without_overlap(tuning: Tuning, overhead: float, saw: str) -> tuple[Tuning, Decision]:
    overlap_s = second([judged.overlap_s for judged in tuning.recent[-FEW:]])
    blocking_s = tuning.costs.snapshot_cpu_s
    k = tuning.interval_steps
    longer = interval_steps(tuning.costs, Mode.BLOCKING, tuning.max_overhead, tuning.mtbf_s)
    tuning = replace(
        tuning,
        interval_steps=max(k, longer),
        mode=Mode.BLOCKING,
        recent=(),  # they say nothing about blocking saves
        cold_stall_s=0.0,
        shrinking=False,
        blocking_saves=tuning.next_blocking_saves,
        next_blocking_saves=2 * tuning.next_blocking_saves,
    )
    why = f"overlapped copy cost {overlap_s:.3g} s, a blocking one {blocking_s:.3g} s"
    return tuning, _decision(
        tuning, overhead, f"k {k} -> {tuning.interval_steps}, blocking: {why}; save cost {saw}"
    )


def _with_overlap_again(tuning: Tuning, overhead: float, saw: str) -> tuple[Tuning, Decision]:
    tuning = replace(tuning, mode=choose_mode(tuning.costs), recent=(), shrinking=False)
    k = tuning.interval_steps
    return tuning, _decision(
        tuning, overhead, f"k {k} stays: the copy overlaps again, to see; save cost {saw}"
    )


def _decision(tuning: Tuning, overhead: float | None, reason: str) -> Decision:
    costs = [judged.cost_s for judged in tuning.recent if judged.cost_s is not None]
    finishes = [judged.finish_s for judged in tuning.recent[-SOME:]]
    if costs:
        cost_s, save_s = statistics.median(costs), statistics.median(finishes)
    else:
        cost_s, save_s = stall_s(tuning.costs, tuning.mode), finish_s(tuning.costs, tuning.mode)
    return Decision(
        interval_steps=tuning.interval_steps,
        gap_steps=tuning.gap_steps,
        mode=tuning.mode,
        overhead_seen=overhead,
        reason=reason,
        forecast=forecast(
            tuning.interval_steps,
            iteration_s=tuning.baseline.iteration_s,
            cost_s=cost_s,
            save_s=save_s,
            longest_save_s=_longest_s(tuning),
            gap_steps=tuning.gap_steps,
            mtbf_s=tuning.mtbf_s,
        ),
    )
