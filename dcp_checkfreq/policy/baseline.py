"""What an iteration takes with no save under way, while saves nearly always are. Pure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

from dcp_checkfreq.policy.costs import CHANGED, KEPT, MEDIAN_ERROR, SOME, spread_s, typical_s
from dcp_checkfreq.policy.observation import Observation, Pace

GAP_STEPS = 3  # iterations without a save that are asked for: a median survives one slow one
_USUAL_NOISE = 0.02  # taken until iterations have been compared with each other


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
    def steps(self) -> int:
        """How many iterations were measured."""
        return sum(pace.steps for pace in self.paces)

    @property
    def iteration_s(self) -> float:
        """One iteration with no save under way: the median, each pace with its weight."""
        ordered = sorted(self.paces, key=lambda pace: pace.typical_s)
        passed = 0
        for pace in ordered:
            passed += pace.steps
            if 2 * passed >= self.steps:
                return pace.typical_s
        return ordered[-1].typical_s

    @property
    def noise(self) -> float:
        """Standard deviation of an iteration, as a share of it."""
        if not self.noises:
            return _USUAL_NOISE
        cut = len(self.noises) // 4  # the mean of the middle half
        return statistics.fmean(sorted(self.noises)[cut : len(self.noises) - cut])

    @property
    def one_error_s(self) -> float:
        """Standard error of the typical time of one iteration."""
        return MEDIAN_ERROR * self.noise * self.iteration_s

    def error_s(self, steps: float) -> float:
        """Return the standard error that the baseline brings to a sum over ``steps`` iterations."""
        return steps * self.one_error_s / math.sqrt(self.steps)


def baseline_of(iteration_s: float, steps: int) -> Baseline:
    """Return the baseline of a profile: ``iteration_s``, typical of ``steps`` iterations."""
    return Baseline(paces=(Pace(steps=max(1, steps), typical_s=typical_s([iteration_s])),))


def renewed(baseline: Baseline, seen: Observation, max_overhead: float) -> tuple[Baseline, bool]:
    """Return the baseline after one more interval, and whether the job has another pace now.

    In that case the old measurements are dropped. Three iterations are believed at once, fewer
    only if the measurement before says the same. If no iteration was free of saves, but those
    beside a save were faster than the baseline, theirs is taken: it cannot be slower than that.
    The baseline is then no younger.
    """
    new = seen.unloaded
    if not new.steps:
        most = max((seen.copying, seen.loaded), key=lambda kind: kind.steps)
        older = replace(baseline, age_saves=baseline.age_saves + 1)
        enough = min(GAP_STEPS, baseline.steps)  # a short profile had fewer
        if most.steps >= enough and change_s(baseline, most, max_overhead) < 0:
            return replace(older, paces=(most,)), True
        return older, False
    *first, last = baseline.paces
    if new.typical_s > 0 and (new.steps > 1 or last.steps == 1):
        # a lone one is compared with the lone one before it: an interval may never have two
        lone_s = spread_s([last.typical_s, new.typical_s])
        noise = (new.spread_s if new.steps > 1 else lone_s) / new.typical_s
        baseline = replace(baseline, noises=(*baseline.noises, noise)[-KEPT:])
    change = change_s(baseline, new, max_overhead)
    if change and new.steps >= GAP_STEPS:
        return replace(baseline, paces=(new,), age_saves=0), True
    if change and first:
        before = replace(baseline, paces=tuple(first))
        if change_s(before, last, max_overhead) * change > 0:
            return replace(baseline, paces=(last, new), age_saves=0), True
    return replace(baseline, paces=(*baseline.paces, new)[-SOME:], age_saves=0), False


def change_s(baseline: Baseline, pace: Pace, max_overhead: float) -> float:
    """Return how much slower ``pace`` is; 0.0 if that can be chance, or is small beside p."""
    limit_s = max(
        CHANGED * baseline.one_error_s * math.sqrt(1 / pace.steps + 1 / baseline.steps),
        max_overhead / 2 * baseline.iteration_s,
    )
    change = pace.typical_s - baseline.iteration_s
    return change if abs(change) > limit_s else 0.0
