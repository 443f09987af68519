"""What a save costs this job, from measured durations. Pure.

The symbols in brackets are those of CheckFreq (Mohan, Phanishayee, Chidambaram, FAST '21).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# CheckFreq, section 4, "Checkpointing policy": 1 % of the epoch or 50 iterations, the fewer.
PROFILE_STEPS = 50
PROFILE_SHARE = 100  # one in a hundred
# The first few iterations of a job warm up allocator, kernels and data workers. A median of ten
# is still right when four of them are far too slow; of fewer it soon is not.
FEWEST_PROFILE_STEPS = 10

MAD_TO_SIGMA = 1.4826  # for normally spread samples
MEDIAN_ERROR = 1.2533  # the standard error of their median is 1.2533 sigma / sqrt(n)
# The median deviation of few samples is too small on average by this (Croux, Rousseeuw 1992).
_MAD_OF_FEW = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
_OUTLIER_SIGMAS = 3.0


def profile_steps(steps_per_epoch: int | None) -> int:
    """Return how many iterations to measure before the first save.

    50, or 1 % of an epoch if that is fewer, but at least 10, or the whole epoch if it is shorter
    still. None means that the length of an epoch is not known.
    """
    if steps_per_epoch is None or steps_per_epoch <= 0:
        return PROFILE_STEPS
    share = max(FEWEST_PROFILE_STEPS, steps_per_epoch // PROFILE_SHARE)
    return min(PROFILE_STEPS, share, steps_per_epoch)


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
    return few * MAD_TO_SIGMA * statistics.median(abs(s - middle) for s in kept)


def typical_s(samples: Iterable[float]) -> float:
    """Return a typical duration in seconds: the median after outliers are dropped.

    NaN, infinite and negative samples are no durations and do not count; zero does. An outlier
    is more than three standard deviations from the median, the deviation being estimated from the
    median of all distances to it. The result lies between the least and the greatest usable
    sample. 0.0 if there is none.
    """
    kept = usable(samples)
    if not kept:
        return 0.0
    middle = statistics.median(kept)
    limit = _OUTLIER_SIGMAS * spread_s(kept)
    return statistics.median([s for s in kept if abs(s - middle) <= limit] or [middle])


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one rank measured, or the worst of all ranks.

    Attributes:
        iteration_s: one iteration with no save under way (Ti).
        update_s: the weight update at its end, which a snapshot must not run into (Tw).
        snapshot_gpu_s: copy into GPU memory (Tg); None if it was not measured.
        snapshot_cpu_s: copy into host memory (Tc).
        persist_s: copy taken until checkpoint published (Ts).
        state_bytes: what this rank copies (m).
        gpu_used_bytes: GPU memory in use without a snapshot in it (M).
        gpu_total_bytes: GPU memory there is (Mmax); 0 without a GPU.
        call_s: what starting a save takes apart from copying. The loop stands still for it.
    """

    iteration_s: float
    update_s: float
    snapshot_gpu_s: float | None
    snapshot_cpu_s: float
    persist_s: float
    state_bytes: int
    gpu_used_bytes: int
    gpu_total_bytes: int
    call_s: float = 0.0

    @property
    def gpu_free_bytes(self) -> int:
        """GPU memory that a snapshot could take."""
        return max(0, self.gpu_total_bytes - self.gpu_used_bytes)


def worst(ranks: Sequence[Costs]) -> Costs:
    """Return the costs that no rank exceeds, because the slowest rank holds up all others.

    Every field is the worst one over the ranks by itself; for ``iteration_s`` that is the
    *shortest*, as a save has the least time to hide behind it. GPU memory is that of the rank with
    the least of it free. If one rank could not measure ``snapshot_gpu_s``, none did. ``call_s`` is
    the least: ranks start a save together, and what others had more is waiting for the last one.

    Raises:
        ValueError: there is no rank.
    """
    if not ranks:
        raise ValueError("no rank has measured anything")
    fullest = min(ranks, key=lambda costs: costs.gpu_free_bytes)
    on_gpu = [costs.snapshot_gpu_s for costs in ranks]
    return Costs(
        iteration_s=min(costs.iteration_s for costs in ranks),
        update_s=max(costs.update_s for costs in ranks),
        snapshot_gpu_s=None if None in on_gpu else max(s for s in on_gpu if s is not None),
        snapshot_cpu_s=max(costs.snapshot_cpu_s for costs in ranks),
        persist_s=max(costs.persist_s for costs in ranks),
        state_bytes=max(costs.state_bytes for costs in ranks),
        gpu_used_bytes=fullest.gpu_used_bytes,
        gpu_total_bytes=fullest.gpu_total_bytes,
        call_s=min(costs.call_s for costs in ranks),
    )
