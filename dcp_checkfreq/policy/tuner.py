"""From each save that was seen to the next interval: a reducer. Pure.

The interval grows at once when saves need it, shrinks step by step when they clearly need less,
and otherwise stays. See docs/policy.md for the reasons behind each number here.
"""

from __future__ import annotations

import enum
import math
import statistics
from dataclasses import dataclass, replace

from dcp_checkfreq.policy.baseline import GAP_STEPS, Baseline, baseline_of, change_s, renewed
from dcp_checkfreq.policy.costs import (
    CLEARLY,
    FEW,
    FEWEST_PROFILE_STEPS,
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
    left_s_of,
    needed_steps,
    stall_s,
)
from dcp_checkfreq.policy.observation import Observation, cost_per_save_s
from dcp_checkfreq.policy.save_cost import (
    SaveCost,
    cost_of,
    required_interval,
    second,
    warmer,
    without_outdated,
)
from dcp_checkfreq.policy.save_timings import SaveTimings

GAP_EVERY_SAVES = 8  # a baseline is renewed at least this often
# Then copies are blocking for so many saves before overlapping is tried again: what made it
# expensive may have been a busy moment of the machine.
BLOCKING_SAVES = 32


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
        warming: k is from a profile that later saves have not confirmed yet.
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
    warming: bool = False

    def steps(self, cost_s: float, left_s: float) -> int:
        """Return the interval for saves that cost so much and go on so long beside the loop."""
        base_s = self.baseline.iteration_s
        return needed_steps(cost_s, left_s, base_s, self.max_overhead, self.mtbf_s)


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
    return _decision(tuning, None, f"saving every {tuning.interval_steps} steps to begin with")


def observe(tuning: Tuning, timings: SaveTimings) -> tuple[Tuning, Decision]:
    """Return the state after one more save, and what to do now.

    A first save of a process and a failed one say nothing about later saves: the iterations without
    a save are learned from, and after a profile what a first save did faster than that one.
    Otherwise, in this order:

    - Iterations without a save renew the baseline.
    - If overlapping the copy cost more than a blocking copy would, in two of the last three
      saves, snapshots are blocking for a while (unless the user has chosen the mode).
    - If two of the last three saves need a longer interval, it grows at once to what they need: to
      be published before the next one starts, to stay within p, and with a failure rate to waste
      least. If only slow iterations say so, and the baseline is not from this interval, it is
      renewed first.
    - Until three saves were judged after a profile, the interval comes down at once to what the
      fastest needed, if that is clearly less.
    - If the last saves would need less even if they cost a quarter more, it shrinks by half of the
      distance with every save, until it is what they need.
    - Else it stays; a gap is asked for when the baseline is old.
    """
    seen = timings.interval
    if not seen.steps:
        tuning = replace(tuning, gap_steps=0)
        return tuning, _stays(tuning, None, "of the last save nothing was seen")
    tuning = _learned(tuning, seen)
    if timings.is_first or timings.failed:
        return _not_judged(replace(tuning, gap_steps=0), timings)

    tuning, gap = _gap_taken(tuning, seen)
    recent = without_outdated((*tuning.recent, cost_of(tuning.baseline, timings))[-KEPT:])
    tuning = _with_costs(replace(tuning, recent=recent), timings)
    base_s = tuning.baseline.iteration_s
    cost_s = cost_per_save_s(seen, base_s)
    overhead = cost_s / max(seen.steps * base_s, 1e-9)
    saw = f"the last save cost {cost_s:.3g} s of training, {overhead:.1%} of the time before it"
    if _overlap_is_expensive(tuning):
        return _without_overlap(tuning, overhead)
    if tuning.blocking_saves:
        tuning = replace(tuning, blocking_saves=tuning.blocking_saves - 1)
        if not tuning.blocking_saves:
            tuning = replace(tuning, mode=choose_mode(tuning.costs), recent=(), shrinking=False)
            return tuning, _stays(tuning, overhead, "the next copies run beside training again")

    k, needs = tuning.interval_steps, required_interval(recent, tuning.baseline, tuning.steps)
    stale = tuning.baseline.age_saves > 0 and gap is not _Gap.TAKEN
    doubtful = stale and _baseline_doubtful(tuning, seen)
    lower = needs.without_baseline if doubtful else needs.lower
    if lower > k:
        grown = lower if doubtful else needs.expected
        tuning = replace(tuning, interval_steps=grown, shrinking=False, warming=False)
        return tuning, _changed(tuning, k, overhead, _why_longer(tuning, k, saw))

    why = saw
    if gap is not _Gap.PENDING and (
        doubtful or (stale and tuning.baseline.age_saves >= GAP_EVERY_SAVES)
    ):
        tuning = replace(tuning, gap_steps=GAP_STEPS)
        why = f"{saw}; the next one comes {GAP_STEPS} steps later, to time steps without a save"

    if tuning.warming and not doubtful:
        warm = _warm_interval(tuning)
        tuning = replace(tuning, warming=not needs.known)
        if warm < k:
            tuning = replace(tuning, interval_steps=warm)
            return tuning, _changed(tuning, k, overhead, f"saves got faster than the first; {why}")

    shrinks = needs.sufficient < k and (tuning.shrinking or needs.upper < k)
    if shrinks and needs.known and not doubtful:
        fewer = k - max(1, (k - needs.sufficient) // 2)
        tuning = replace(tuning, interval_steps=fewer, shrinking=fewer > needs.sufficient)
        why = f"{needs.sufficient} would be enough; {why}"
        return tuning, _changed(tuning, k, overhead, why)
    tuning = replace(tuning, shrinking=tuning.shrinking and shrinks)
    return tuning, _stays(tuning, overhead, why)


def _not_judged(tuning: Tuning, timings: SaveTimings) -> tuple[Tuning, Decision]:
    if timings.failed:
        return tuning, _stays(tuning, None, "a failed save is no measure")
    k = tuning.interval_steps
    if tuning.warming:
        costs = warmer(tuning.costs, timings)
        tuning = replace(tuning, costs=replace(costs, iteration_s=tuning.baseline.iteration_s))
        warm = _warm_interval(tuning)
        if warm < k:
            tuning = replace(tuning, interval_steps=warm)
            return tuning, _changed(tuning, k, None, "saves got faster than the first")
    return tuning, _stays(tuning, None, "the first save of a process is no measure")


def _warm_interval(tuning: Tuning) -> int:
    """Return the interval that the fastest saves so far need; k if that is not clearly less."""
    cost_s, left_s = stall_s(tuning.costs, tuning.mode), left_s_of(tuning.costs, tuning.mode)
    error_s = 0.0
    if tuning.recent:
        left_s = max(left_s, tuning.recent[-1].left_s)
        known = [(one.cost_s, one.error_s) for one in tuning.recent if one.cost_s is not None]
        if known:
            least_s, error_s = min(known)
            cost_s = max(cost_s, least_s)
    most_s = max(CLEARLY * cost_s, cost_s + SURE * error_s)
    clearly = tuning.steps(most_s, CLEARLY * left_s)
    k = tuning.interval_steps
    return tuning.steps(cost_s, left_s) if clearly < k else k


def _learned(tuning: Tuning, seen: Observation) -> Tuning:
    """Return the state with a newer baseline; comparisons with an outdated one are struck out."""
    baseline, changed = renewed(tuning.baseline, seen, tuning.max_overhead)
    recent = tuning.recent
    if changed:
        recent = tuple(old if old.fresh else replace(old, cost_s=None) for old in recent)
    return replace(tuning, baseline=baseline, recent=recent)


def _with_costs(tuning: Tuning, timings: SaveTimings) -> Tuning:
    """Return the state with costs as seen lately, which are what a restarted job begins with."""
    if tuning.warming:
        costs = warmer(tuning.costs, timings)
    else:
        persist_s = statistics.median(save.persist_s for save in tuning.recent[-SOME:])
        if timings.mode is Mode.GPU:  # the copy to the host is part of what was seen
            persist_s = max(0.0, persist_s - tuning.costs.snapshot_cpu_s)
        costs = replace(tuning.costs, persist_s=persist_s)
    base_s, update_s = tuning.baseline.iteration_s, timings.interval.update_s
    return replace(tuning, costs=replace(costs, iteration_s=base_s, update_s=update_s))


class _Gap(enum.Enum):
    """What became of the gap that was asked for."""

    NONE = enum.auto()
    PENDING = enum.auto()  # the interval that was seen had ended before it was asked for
    TAKEN = enum.auto()


def _gap_taken(tuning: Tuning, seen: Observation) -> tuple[Tuning, _Gap]:
    if tuning.gap_steps <= 0:
        return replace(tuning, gap_steps=0), _Gap.NONE
    # some of its iterations may not have been measured, so more than k are enough
    if seen.unloaded.steps or seen.steps > tuning.interval_steps:
        return replace(tuning, gap_steps=0), _Gap.TAKEN
    return tuning, _Gap.PENDING


def _baseline_doubtful(tuning: Tuning, seen: Observation) -> bool:
    """Return whether slow iterations alone call for a longer interval, or fast ones mock the base.

    Both may come from a job that has another pace than when the baseline was measured.
    """
    last, k = tuning.recent[-1], tuning.interval_steps
    if last.cost_s is not None:
        error_s = math.hypot(last.error_s, tuning.baseline.error_s(last.beside_steps))
        stood = tuning.steps(last.stall_s, 0.0)
        if tuning.steps(last.cost_s - SURE * error_s, 0.0) > max(k, stood):
            return True
    beside = [pace for pace in (seen.copying, seen.loaded) if pace.steps]
    return any(change_s(tuning.baseline, pace, tuning.max_overhead) < 0 for pace in beside)


def _overlap_s(tuning: Tuning) -> float:
    return second([save.overlap_s for save in tuning.recent[-FEW:]])


def _overlap_is_expensive(tuning: Tuning) -> bool:
    if tuning.mode is Mode.BLOCKING or tuning.mode_is_fixed:
        return False
    return _overlap_s(tuning) > tuning.costs.snapshot_cpu_s


def _without_overlap(tuning: Tuning, overhead: float) -> tuple[Tuning, Decision]:
    k, costs = tuning.interval_steps, tuning.costs
    longer = interval_steps(costs, Mode.BLOCKING, tuning.max_overhead, tuning.mtbf_s)
    why = (
        f"training stands still while the state is copied, which takes {costs.snapshot_cpu_s:.3g} "
        f"s; a copy beside it cost {_overlap_s(tuning):.3g} s"
    )
    tuning = replace(
        tuning,
        interval_steps=max(k, longer),
        mode=Mode.BLOCKING,
        recent=(),  # they say nothing about blocking saves
        shrinking=False,
        blocking_saves=BLOCKING_SAVES,
    )
    return tuning, _changed(tuning, k, overhead, why)


def _why_longer(tuning: Tuning, before: int, saw: str) -> str:
    if tuning.steps(0.0, second([save.left_s for save in tuning.recent])) > before:
        longest_s = max(save.finish_s for save in tuning.recent)
        return f"a save takes up to {longest_s:.3g} s; {saw}"
    return f"{saw}, and {tuning.max_overhead:.1%} is allowed"


def _changed(tuning: Tuning, before: int, overhead: float | None, why: str) -> Decision:
    k = tuning.interval_steps
    return _decision(tuning, overhead, f"saving every {k} steps (was {before}): {why}")


def _stays(tuning: Tuning, overhead: float | None, why: str) -> Decision:
    return _decision(tuning, overhead, f"still saving every {tuning.interval_steps} steps: {why}")


def _decision(tuning: Tuning, overhead: float | None, reason: str) -> Decision:
    costs = [save.cost_s for save in tuning.recent if save.cost_s is not None]
    cost_s, save_s = stall_s(tuning.costs, tuning.mode), finish_s(tuning.costs, tuning.mode)
    longest_s = max([save.finish_s for save in tuning.recent], default=save_s)
    if costs:
        cost_s = statistics.median(costs)
        save_s = statistics.median(save.finish_s for save in tuning.recent[-SOME:])
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
            longest_save_s=longest_s,
            gap_steps=tuning.gap_steps,
            mtbf_s=tuning.mtbf_s,
        ),
    )
