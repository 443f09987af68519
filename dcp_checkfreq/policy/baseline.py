"""What an iteration takes with no save under way, while saves nearly always are. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dcp_checkfreq.policy.costs import MEDIAN_ERROR, spread_s, typical_s
from dcp_checkfreq.policy.observation import IntervalSeen, Pace

GAP_STEPS = 3  # a median of three survives one slow iteration
_LONGEST_GAP_STEPS = 8
_KEPT = 5  # so many measurements are joined to one, or more if that is
_KEPT_STEPS = 12  # fewer iterations than this
_USUAL_NOISE = 0.02  # taken until iterations have been compared with each other
_NOISES = 16  # with few iterations each is a rough one
_CHANGED = 3.5  # standard errors at which the job itself has another pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The pace of the job without saves.

    Attributes:
        paces: as measured in the last intervals that had such iterations, the newest last.
        age_saves: saves since one was measured.
        noises: how much iterations with no save under way differed from each other, as a share.
            Those beside a save differ by how much of them was beside it, which is no chance.
    """

    paces: tuple[Pace, ...]
    age_saves: int = 0
    noises: tuple[float, ...] = ()

    @property
    def pace(self) -> Pace:
        """All measurements joined to one: the median, each with the weight of its iterations."""
        return _joined(self.paces)

    @property
    def iteration_s(self) -> float:
        """One iteration with no save under way, in seconds."""
        return self.pace.typical_s

    @property
    def noise(self) -> float:
        """Standard deviation of an iteration, as a share of it."""
        if not self.noises:
            return _USUAL_NOISE
        cut = len(self.noises) // 4  # the mean of the middle half
        return statistics.fmean(sorted(self.noises)[cut : len(self.noises) - cut])


def baseline_of(iteration_s: float, steps: int) -> Baseline:
    """Return the baseline of a profile: ``iteration_s``, typical of ``steps`` iterations."""
    return Baseline(paces=(Pace(steps=max(1, steps), typical_s=typical_s([iteration_s])),))


def renewed(baseline: Baseline, seen: IntervalSeen, max_overhead: float) -> tuple[Baseline, bool]:
    """Return the baseline after one more interval, and whether the job has another pace now.

    In that case the old measurements are dropped. Three iterations are believed at once, fewer
    only if the measurement before says the same. If no iteration was free of saves, but those
    beside a save were faster than the baseline, theirs is taken: it cannot be slower than that.
    The baseline is then no younger.
    """
    new = seen.unloaded
    baseline = replace(
        baseline, noises=(*baseline.noises, *_noise_of(new, baseline.paces[-1]))[-_NOISES:]
    )
    if not new.steps:
        most = max((seen.copying, seen.loaded), key=lambda kind: kind.steps)
        older = replace(baseline, age_saves=baseline.age_saves + 1)
        enough = min(GAP_STEPS, baseline.pace.steps)  # a short profile had fewer
        if most.steps >= enough and change_s(baseline, most, max_overhead) < 0:
            return replace(older, paces=(most,)), True
        return older, False
    paces, changed = _kept((*baseline.paces, new)), False
    change = change_s(baseline, new, max_overhead)
    if change and new.steps >= GAP_STEPS:
        paces, changed = (new,), True
    elif change and len(baseline.paces) > 1:
        *first, last = baseline.paces
        before = replace(baseline, paces=tuple(first))
        if change_s(before, last, max_overhead) * change > 0:
            paces, changed = (last, new), True
    return replace(baseline, paces=paces, age_saves=0), changed


def change_s(baseline: Baseline, pace: Pace, max_overhead: float) -> float:
    """Return how much slower ``pace`` is; 0.0 if that can be chance, or is small beside p."""
    base = baseline.pace
    error_s = MEDIAN_ERROR * baseline.noise * base.typical_s
    limit_s = max(
        _CHANGED * error_s * math.sqrt(1 / pace.steps + 1 / base.steps),
        max_overhead / 2 * base.typical_s,
    )
    change = pace.typical_s - base.typical_s
    return change if abs(change) > limit_s else 0.0


def baseline_error_s(baseline: Baseline, steps: float) -> float:
    """Return the standard error that the baseline brings to the sum over ``steps`` iterations."""
    base = baseline.pace
    return steps * MEDIAN_ERROR * baseline.noise * base.typical_s / math.sqrt(base.steps)


def gap_steps(baseline: Baseline, max_overhead: float) -> int:
    """Return how many iterations make a baseline whose error is half the budget. 3 to 8."""
    error = min(2 * MEDIAN_ERROR * baseline.noise / max_overhead, 100)
    return min(max(math.ceil(error**2), GAP_STEPS), _LONGEST_GAP_STEPS)


def _kept(paces: tuple[Pace, ...]) -> tuple[Pace, ...]:
    kept = _KEPT
    while kept < len(paces) and sum(pace.steps for pace in paces[-kept:]) < _KEPT_STEPS:
        kept += 1
    return paces[-kept:]


def _noise_of(new: Pace, before: Pace) -> list[float]:
    """Return how much the iterations of ``new`` differed, as a share, if that can be told.

    A lone one is compared with the lone one before it: an interval may never have two.
    """
    if new.typical_s <= 0:
        return []
    if new.steps > 1:
        return [new.spread_s / new.typical_s]
    if before.steps == 1:
        return [spread_s([before.typical_s, new.typical_s]) / new.typical_s]
    return []


def _joined(paces: Sequence[Pace]) -> Pace:
    total = sum(pace.steps for pace in paces)
    passed = 0
    middle = paces[0].typical_s
    for pace in sorted(paces, key=lambda pace: pace.typical_s):
        middle = pace.typical_s
        passed += pace.steps
        if 2 * passed >= total:
            break
    return Pace(steps=total, typical_s=middle)
