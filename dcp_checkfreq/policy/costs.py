"""What a save costs this job, from measured durations. Pure.

The symbols in brackets are those of CheckFreq (Mohan, Phanishayee, Chidambaram, FAST '21).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dcp_checkfreq.policy.constants import FEWEST_PROFILE_STEPS, PROFILE_STEPS

MEDIAN_ERROR = 1.2533  # the standard error of a median is 1.2533 sigma / sqrt(n)
_MAD_TO_SIGMA = 1.4826  # for normally spread samples
# The median deviation of few samples is too small on average by this (Croux, Rousseeuw 1992).
_MAD_OF_FEW = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}


def profile_steps(steps_per_epoch: int | None) -> int:
    """Return how many iterations to measure before the first save.

    50, or 1 % of an epoch if that is fewer, but at least 10, or the whole epoch if that is shorter.
    """
    if steps_per_epoch is None or steps_per_epoch <= 0:
        return PROFILE_STEPS
    return min(PROFILE_STEPS, max(FEWEST_PROFILE_STEPS, steps_per_epoch // 100), steps_per_epoch)


def usable(samples: Iterable[float]) -> list[float]:
    """Return the samples that can be durations: finite and not negative, in rising order."""
    return sorted(s for s in samples if math.isfinite(s) and s >= 0)


def spread_s(samples: Iterable[float]) -> float:
    """Return the standard deviation, which few wild samples hardly change; of one sample 0.0."""
    kept = usable(samples)
    if len(kept) < 2:
        return 0.0
    middle = statistics.median(kept)
    few = _MAD_OF_FEW.get(len(kept), 1.0)
    return few * _MAD_TO_SIGMA * statistics.median(abs(s - middle) for s in kept)


def typical_s(samples: Iterable[float]) -> float:
    """Return the median without those three standard deviations from it; without samples 0.0."""
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

    Of ``iteration_s`` the worst is the *shortest*, as a save has the least time to hide behind it.
    ``call_s`` is the least: what others had more is waiting for the last rank.
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
