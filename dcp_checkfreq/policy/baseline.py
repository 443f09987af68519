"""What an iteration takes with no save under way, while saves nearly always are. Pure."""

from __future__ import annotations

import bisect
import math
import statistics
from dataclasses import dataclass, replace
from itertools import accumulate

from dcp_checkfreq.policy.constants import CHANGED, FEW, KEPT, SOME, USUAL_NOISE
from dcp_checkfreq.policy.costs import MEDIAN_ERROR, spread_s, typical_s
from dcp_checkfreq.policy.observation import IntervalSeen, Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The pace of the job without saves."""

    paces: tuple[Pace, ...]  # of the last intervals that had such iterations, the newest last
    age_saves: int = 0  # since one was measured
    # How much iterations with no save under way differed from each other, as a share. Those beside
    # a save differ by how much of them was beside it, which is no chance.
    noises: tuple[float, ...] = ()

    @property
    def pace(self) -> Pace:
        """All measurements joined to one: the median, each with the weight of its iterations."""
        ordered = sorted(self.paces, key=lambda pace: pace.typical_s)
        passed = list(accumulate(pace.steps for pace in ordered))
        middle = ordered[bisect.bisect_left(passed, passed[-1] / 2)]
        return Pace(steps=passed[-1], typical_s=middle.typical_s)

    @property
    def iteration_s(self) -> float:
        """One iteration with no save under way, in seconds."""
        return self.pace.typical_s

    @property
    def noise(self) -> float:
        """Standard deviation of an iteration, as a share of it."""
        if not self.noises:
            return USUAL_NOISE
        cut = len(self.noises) // 4  # the mean of the middle half
        return statistics.fmean(sorted(self.noises)[cut : len(self.noises) - cut])

    @property
    def one_error_s(self) -> float:
        """Standard error of one typical iteration."""
        return MEDIAN_ERROR * self.noise * self.iteration_s


def baseline_of(iteration_s: float, steps: int) -> Baseline:
    """Return the baseline of a profile: ``iteration_s``, typical of ``steps`` iterations."""
    return Baseline(paces=(Pace(steps=max(1, steps), typical_s=typical_s([iteration_s])),))


def renewed(baseline: Baseline, seen: IntervalSeen, max_overhead: float) -> tuple[Baseline, bool]:
    """Return the baseline after one more interval, and whether the job has another pace now.

    Then the old measurements are dropped. Three iterations are believed at once, fewer only if the
    measurement before says the same. If no iteration was free of saves, but those beside a save
    were faster than the baseline, theirs is taken: it cannot be slower. It is then no younger.
    """
    new, *first, last = seen.unloaded, *baseline.paces
    noises = (*baseline.noises, *_noise_of(new, last))[-KEPT:]
    if not new.steps:
        baseline = replace(baseline, noises=noises, age_saves=baseline.age_saves + 1)
        most = max((seen.copying, seen.loaded), key=lambda kind: kind.steps)
        enough = min(FEW, baseline.pace.steps)  # a short profile had fewer
        if most.steps >= enough and change_s(baseline, most, max_overhead) < 0:
            return replace(baseline, paces=(most,)), True
        return baseline, False
    baseline = replace(baseline, noises=noises, age_saves=0)
    change = change_s(baseline, new, max_overhead)
    if change and new.steps >= FEW:
        return replace(baseline, paces=(new,)), True
    if change and first:
        before = replace(baseline, paces=tuple(first))
        if change_s(before, last, max_overhead) * change > 0:
            return replace(baseline, paces=(last, new)), True
    kept = (*baseline.paces, new)
    # the last five, and more if those are fewer than twelve iterations
    while len(kept) > SOME and sum(one.steps for one in kept[1:]) >= 4 * FEW:
        kept = kept[1:]
    return replace(baseline, paces=kept), False


def change_s(baseline: Baseline, pace: Pace, max_overhead: float) -> float:
    """Return how much slower ``pace`` is; 0.0 if that can be chance, or is small beside p."""
    if not pace.steps:
        return 0.0
    error_s = baseline.one_error_s * math.sqrt(1 / pace.steps + 1 / baseline.pace.steps)
    change = pace.typical_s - baseline.iteration_s
    least = max(CHANGED * error_s, max_overhead / 2 * baseline.iteration_s)
    return change if abs(change) > least else 0.0


def baseline_error_s(baseline: Baseline, steps: float) -> float:
    """Return the standard error that the baseline brings to the sum over ``steps`` iterations."""
    return steps * baseline.one_error_s / math.sqrt(baseline.pace.steps)


def _noise_of(new: Pace, before: Pace) -> list[float]:
    """Return how much iterations differed, as a share, if that can be told."""
    # a lone one is compared with the lone one before it: an interval may never have two
    if new.typical_s <= 0 or not (new.steps > 1 or new.steps == before.steps == 1):
        return []
    alone_s = spread_s([before.typical_s, new.typical_s])
    return [(new.spread_s if new.steps > 1 else alone_s) / new.typical_s]
