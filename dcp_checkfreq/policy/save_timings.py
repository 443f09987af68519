"""One save as a rank timed it, for rank 0 and the tuner. Made when the save ends. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dcp_checkfreq.policy.costs import Costs
from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.observation import Observation, cost_per_save_s

# Ranks whose iterations are shorter than this share of the longest wait for others: what they
# wait is no cost of saving.
SETS_THE_PACE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTimings:
    """One save on one rank, or on the worst of all, and the interval that it ended.

    Attributes:
        interval: from the save before to this one.
        mode: how the snapshot was copied.
        copy_s: that copy (Tc or Tg).
        persist_s: copy taken until published (Ts).
        copied_bytes: what the copy moved on this rank.
        state_bytes: size of the state that this rank holds.
        call_s: what starting it took, apart from copying.
        is_first: the first save of the process, with cold buffers: it is no measure of later ones.
        failed: it was not published, so ``persist_s`` says little.
        gpu_copy_s: Tg, where a profile has tried it.
        written_bytes: what this rank writes, and so copies, from now on; of a profile.
        gpu_used_bytes: GPU memory in use without a snapshot in it (M); of a profile.
        gpu_total_bytes: GPU memory there is (Mmax); of a profile, 0 without a GPU.
    """

    interval: Observation
    mode: Mode
    copy_s: float
    persist_s: float
    copied_bytes: int
    state_bytes: int
    call_s: float = 0.0
    is_first: bool = False
    failed: bool = False
    gpu_copy_s: float | None = None
    written_bytes: int = 0
    gpu_used_bytes: int = 0
    gpu_total_bytes: int = 0

    def profile(self) -> Costs:
        """Return what later saves are expected to cost; of a first save that did not fail."""
        # Later saves copy less, where other ranks hold the same.
        share = self.written_bytes / max(self.copied_bytes, 1)
        return Costs(
            iteration_s=self.interval.pace_s,
            update_s=self.interval.update_s,
            snapshot_gpu_s=None if self.gpu_copy_s is None else self.gpu_copy_s * share,
            snapshot_cpu_s=self.copy_s * share,
            persist_s=self.persist_s,
            state_bytes=self.written_bytes,
            gpu_used_bytes=self.gpu_used_bytes,
            gpu_total_bytes=self.gpu_total_bytes,
            # A GPU has work queued while the host does this, so it need not hold up the training.
            call_s=0.0 if self.gpu_total_bytes else self.call_s,
        )


def worst_timings(ranks: Sequence[SaveTimings]) -> SaveTimings:
    """Return what the job saw of a save that all ``ranks`` took part in.

    Copy, persist and bytes are the greatest of all ranks, the start of the save is that of the rank
    which waited least for the others. The interval is that of one rank, taken whole, because what
    one rank waits for shows on others as slow iterations and must not count twice: the rank for
    which the interval was most expensive, among those that set the pace. Where ranks do not wait
    for each other in every iteration, the fast ones wait at the save, which is no cost of saving.

    Raises:
        ValueError: there is no rank.
    """
    if not ranks:
        raise ValueError("no rank has seen anything")
    slowest_s = max(rank.interval.pace_s for rank in ranks)
    setting = [rank for rank in ranks if rank.interval.pace_s >= SETS_THE_PACE * slowest_s]
    known = [rank.interval.unloaded.typical_s for rank in setting if rank.interval.unloaded.steps]
    usual_s = statistics.median(known) if known else 0.0

    def cost_s(rank: SaveTimings) -> float:
        own = rank.interval.unloaded
        return cost_per_save_s(rank.interval, own.typical_s if own.steps else usual_s)

    return replace(
        max(setting, key=cost_s),
        mode=max((rank.mode for rank in ranks), key=list(Mode).index),
        copy_s=max(rank.copy_s for rank in ranks),
        persist_s=max(rank.persist_s for rank in ranks),
        copied_bytes=max(rank.copied_bytes for rank in ranks),
        state_bytes=max(rank.state_bytes for rank in ranks),
        call_s=min(rank.call_s for rank in ranks),
        is_first=any(rank.is_first for rank in ranks),
        failed=any(rank.failed for rank in ranks),
    )
