"""What a save costs this job, from measured durations; the constants that rules share. Pure.

The symbols in brackets are those of CheckFreq (Mohan, Phanishayee, Chidambaram, FAST '21).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

# The tuning constants of all rules; docs/decisions/0034 has what each buys.
# CheckFreq, section 4, "Checkpointing policy": 1 % of the epoch or 50 iterations, the fewer.
PROFILE_STEPS = 50
# The first few iterations of a job warm up allocator, kernels and data workers. A median of ten
# is still right when four of them are far too slow; of fewer it soon is not.
FEWEST_PROFILE_STEPS = 10
# Two of the last three must agree that something changes: one outlier never does it.
FEW = 3
# What five say together is known: how much they differ by chance, too.
SOME = 5
# So many are looked back at: costs are averaged over them, and what swings comes back within them.
KEPT = 16
# Iterations without a save are looked for at least this often, and so many of them at most.
GAP_EVERY_SAVES = 8
# Standard errors of a cost that are not acted on, of one that is another cost than before.
SURE, CHANGED = 2.0, 4.0
# An interval begins to shrink when even costs this much higher would need less.
CLEARLY = 1.25
# Saves and ranks may differ by this share and are yet alike.
ALIKE = 0.1
# Standard deviation of an iteration, as a share, until iterations were compared with each other.
USUAL_NOISE = 0.02

MEDIAN_ERROR = 1.2533  # the standard error of a median is 1.2533 sigma / sqrt(n)
_MAD_TO_SIGMA = 1.4826  # for normally spread samples
# The median deviation of few samples is too small on average by this (Croux, Rousseeuw 1992).
_MAD_OF_FEW = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}


def profile_steps(steps_per_epoch: int | None) -> int:
    """Return how many iterations to measure before the first save.

    50, or 1 % of an epoch if that is fewer, but at least 10, or the whole epoch if it is shorter
    still. None means that the length of an epoch is not known.
    """
    if steps_per_epoch is None or steps_per_epoch <= 0:
        return PROFILE_STEPS
    return min(PROFILE_STEPS, max(FEWEST_PROFILE_STEPS, steps_per_epoch // 100), steps_per_epoch)


def usable(samples: Iterable[float]) -> list[float]:
    """Return the samples that can be durations: finite and not negative, in rising order."""
    return sorted(s for s in samples if math.isfinite(s) and s >= 0)


def spread_s(samples: Iterable[float]) -> float:
    """Return the standard deviation of durations, by the median deviation from the median.

    A few wild samples hardly change it. 0.0 for fewer than two usable samples.
    """
    kept = usable(samples)
    if len(kept) < 2:
        return 0.0
    middle = statistics.median(kept)
    few = _MAD_OF_FEW.get(len(kept), 1.0)
    return few * _MAD_TO_SIGMA * statistics.median(abs(s - middle) for s in kept)


def typical_s(samples: Iterable[float]) -> float:
    """Return a typical duration: the median without those three standard deviations from it.

    0.0 if there is no usable sample.
    """
    kept = usable(samples)
    if not kept:
        return 0.0
    middle, limit = statistics.median(kept), 3 * spread_s(kept)
    return statistics.median([s for s in kept if abs(s - middle) <= limit] or [middle])


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one rank measured, or the worst of all ranks."""

    iteration_s: float  # with no save under way (Ti)
    update_s: float  # the weight update at its end, which a snapshot must not run into (Tw)
    snapshot_gpu_s: float | None  # copy into GPU memory (Tg); None if it was not measured
    snapshot_cpu_s: float  # copy into host memory (Tc)
    persist_s: float  # copy taken until checkpoint published (Ts)
    state_bytes: int  # what this rank copies (m)
    gpu_used_bytes: int  # GPU memory in use without a snapshot in it (M)
    gpu_total_bytes: int  # GPU memory there is (Mmax); 0 without a GPU
    call_s: float = 0.0  # what starting a save takes apart from copying; the loop stands still

    @property
    def gpu_free_bytes(self) -> int:
        """GPU memory that a snapshot could take."""
        return max(0, self.gpu_total_bytes - self.gpu_used_bytes)


def worst(ranks: Sequence[Costs]) -> Costs:
    """Return the costs that no rank exceeds, because the slowest rank holds up all others.

    Every field is the worst one by itself; of ``iteration_s`` the *shortest*, as a save has the
    least time to hide behind it. GPU memory is that of the rank with the least of it free.
    ``call_s`` is the least: what others had more is waiting for the last rank.

    Raises:
        ValueError: there is no rank.
    """
    if not ranks:
        raise ValueError("no rank has measured anything")
    on_gpu = [costs.snapshot_gpu_s for costs in ranks]
    return replace(
        min(ranks, key=lambda costs: costs.gpu_free_bytes),
        iteration_s=min(costs.iteration_s for costs in ranks),
        update_s=max(costs.update_s for costs in ranks),
        snapshot_gpu_s=None if None in on_gpu else max(s for s in on_gpu if s is not None),
        snapshot_cpu_s=max(costs.snapshot_cpu_s for costs in ranks),
        persist_s=max(costs.persist_s for costs in ranks),
        state_bytes=max(costs.state_bytes for costs in ranks),
        call_s=min(costs.call_s for costs in ranks),
    )
