"""One save: as a rank timed it, as the worst of all ranks did, as the run remembers it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dcp_checkfreq.policy.constants import ALIKE
from dcp_checkfreq.policy.costs import Costs
from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.observation import IntervalSeen, cost_per_save_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTimings:
    """One save and the interval that it ended. Bytes and seconds are of this rank."""

    step: int = 0
    interval_steps: int | None = None  # k when it began; None while profiling
    mode: Mode  # how the snapshot was copied: "cpu", "gpu" or "blocking"
    state_bytes: int = 0  # tensors that this rank holds
    copied_bytes: int = 0  # of these, what it copied because no other rank writes it
    blocked_s: float = 0.0  # the loop was held up in `after_step` or `save`
    waited_s: float = 0.0  # the update after it waited for the copy
    call_s: float = 0.0  # before copying begins: looking at the state, agreeing with other ranks
    copy_s: float = 0.0  # Tc or Tg
    persist_s: float = 0.0  # Ts: copied until published, cleaning up after the one before included
    overhead: float | None = None  # share of training time that saving cost in the interval before
    error: str | None = None

    interval: IntervalSeen = field(default_factory=IntervalSeen)  # from the save before to this one
    is_first: bool = False  # of the process, with cold buffers: it is no measure of later ones
    failed: bool = False  # it was not published, so ``persist_s`` says little

    # Measured by a profile.
    gpu_copy_s: float | None = None  # Tg, where it was tried
    written_bytes: int = 0  # of tensors that this rank writes from now on
    gpu_used_bytes: int = 0  # GPU memory in use without a snapshot in it (M)
    gpu_total_bytes: int = 0  # GPU memory there is (Mmax); 0 without a GPU

    def profile(self) -> Costs:
        """Return what later saves are expected to cost."""
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

    def __str__(self) -> str:
        """Return what a log line says of it."""
        return (
            f"{self.copied_bytes / 1e6:.1f} MB of this rank copied in {self.copy_s:.3f} s "
            f"({self.mode}), published {self.persist_s:.3f} s later; training was held up for "
            f"{self.blocked_s + self.waited_s:.3f} s"
        )


SaveRecord = SaveTimings  # its public name


def worst_seen(ranks: Sequence[SaveTimings]) -> SaveTimings:
    """Return what the job saw of a save that all ``ranks`` took part in.

    Copy, persist and bytes are the greatest of all ranks, the start of the save is that of the rank
    which waited least for the others. The interval is that of one rank, taken whole, because what
    one rank waits for shows on others as slow iterations and must not count twice: the rank for
    which the interval was dearest, among those that set the pace. Where ranks do not wait for each
    other in every iteration, the fast ones wait at the save, and that is no cost of saving.
    """
    if not ranks:
        raise ValueError("no rank has seen anything")
    slowest_s = max(rank.interval.pace_s for rank in ranks)
    setting = [rank for rank in ranks if rank.interval.pace_s >= (1 - ALIKE) * slowest_s]
    known = [rank.interval.unloaded.typical_s for rank in setting if rank.interval.unloaded.steps]
    usual_s = statistics.median(known) if known else 0.0

    def dearness(rank: SaveTimings) -> float:
        own = rank.interval.unloaded
        return cost_per_save_s(rank.interval, own.typical_s if own.steps else usual_s)

    return replace(
        max(setting, key=dearness),
        mode=max((rank.mode for rank in ranks), key=list(Mode).index),
        copy_s=max(rank.copy_s for rank in ranks),
        persist_s=max(rank.persist_s for rank in ranks),
        copied_bytes=max(rank.copied_bytes for rank in ranks),
        state_bytes=max(rank.state_bytes for rank in ranks),
        call_s=min(rank.call_s for rank in ranks),
        is_first=any(rank.is_first for rank in ranks),
        failed=any(rank.failed for rank in ranks),
    )


def warmer(costs: Costs, seen: SaveTimings) -> Costs:
    """Return the costs of a profile whose buffers were cold, with what this save did faster."""

    def less(before_s: float, seen_s: float) -> float:
        return seen_s if 0 <= seen_s < before_s else before_s

    cpu_s, gpu_s, persist_s = costs.snapshot_cpu_s, costs.snapshot_gpu_s, max(0.0, seen.persist_s)
    if seen.mode is Mode.GPU:
        gpu_s = None if gpu_s is None else less(gpu_s, seen.copy_s)
        # the copy to the host, which is not measured by itself, is part of what was seen
        left_s = less(cpu_s + costs.persist_s, persist_s)
        cpu_s = min(cpu_s, left_s)
        persist_s = left_s - cpu_s
    else:
        cpu_s, persist_s = less(cpu_s, seen.copy_s), less(costs.persist_s, persist_s)
    call_s = less(costs.call_s, seen.call_s)
    return replace(
        costs, snapshot_cpu_s=cpu_s, snapshot_gpu_s=gpu_s, persist_s=persist_s, call_s=call_s
    )
