"""From what one rank measured in one interval to what one save cost. Pure.

An interval runs from the end of one save's `after_step` to the end of the next one's. The
background work of the first save falls into it, and the `after_step` of the second.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dcp_checkfreq.policy.costs import spread_s, typical_s
from dcp_checkfreq.policy.interval import Mode

# Ranks whose iterations are shorter than this share of the longest wait for others: what they
# wait is no cost of saving.
_SETS_THE_PACE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration as the training thread of one rank saw it.

    Attributes:
        seconds: from the return of the `after_step` before to the entry of this one.
        blocked_s: inside this `after_step`.
        waited_s: part of ``seconds``: the weight update waited for a snapshot copy.
        update_s: part of ``seconds``: the weight update itself.
        loaded: a snapshot copy or a persist was under way at any time during it.
        copying: a snapshot copy was; then ``loaded`` is true as well.
        queued_s: part of ``blocked_s``: this save waited for the one before to finish.
    """

    seconds: float
    blocked_s: float
    waited_s: float
    update_s: float
    loaded: bool
    copying: bool = False
    queued_s: float = 0.0

    @property
    def worked_s(self) -> float:
        """What the iteration took without the wait for the copy."""
        return self.seconds - self.waited_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long iterations of one kind took: how many, a typical one, and how they spread.

    ``spread_s`` is a standard deviation. Without iterations all three are 0.
    """

    steps: int = 0
    typical_s: float = 0.0
    spread_s: float = 0.0

    @property
    def sum_s(self) -> float:
        """What all of them took, had each been typical."""
        return self.steps * self.typical_s

    def excess_s(self, base_s: float) -> float:
        """By how much all of them were slower than ``base_s``. Negative if they were faster."""
        return self.steps * (self.typical_s - base_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalSeen:
    """Summary of the iterations of one interval. Small, plain, pickles.

    Every iteration is in one of three kinds; their times are without the wait for the copy.

    Attributes:
        elapsed_s: wall time, ``after_step`` included.
        blocked_s: sum over the iterations; so are ``queued_s``, which is part of it, and
            ``waited_s``.
        update_s: a typical weight update.
        unloaded: nothing of a save was under way.
        copying: the snapshot was being copied.
        loaded: the checkpoint was being persisted, and nothing copied.
    """

    elapsed_s: float
    blocked_s: float
    queued_s: float
    waited_s: float
    update_s: float
    unloaded: Pace
    copying: Pace
    loaded: Pace

    @property
    def steps(self) -> int:
        """How many iterations the interval had."""
        return self.unloaded.steps + self.copying.steps + self.loaded.steps

    @property
    def stall_s(self) -> float:
        """How long the loop stood still for one save (To), without waiting for another save."""
        return max(0.0, self.blocked_s - self.queued_s + self.waited_s)

    @property
    def pace_s(self) -> float:
        """Mean of the typical iterations; 0.0 without iterations."""
        if not self.steps:
            return 0.0
        return (self.unloaded.sum_s + self.copying.sum_s + self.loaded.sum_s) / self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSeen:
    """One save and the interval that it ended.

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
    """

    interval: IntervalSeen
    mode: Mode
    copy_s: float
    persist_s: float
    copied_bytes: int
    state_bytes: int
    call_s: float = 0.0
    is_first: bool = False
    failed: bool = False


def summarise(iterations: Sequence[Iteration]) -> IntervalSeen:
    """Return the summary of the iterations of one interval; of none, all zeros."""

    def pace(kind: Iterable[Iteration]) -> Pace:
        worked = [iteration.worked_s for iteration in kind]
        return Pace(steps=len(worked), typical_s=typical_s(worked), spread_s=spread_s(worked))

    return IntervalSeen(
        elapsed_s=sum(i.seconds + i.blocked_s for i in iterations),
        blocked_s=sum(i.blocked_s for i in iterations),
        queued_s=sum(i.queued_s for i in iterations),
        waited_s=sum(i.waited_s for i in iterations),
        update_s=typical_s(i.update_s for i in iterations),
        unloaded=pace(i for i in iterations if not (i.loaded or i.copying)),
        copying=pace(i for i in iterations if i.copying),
        loaded=pace(i for i in iterations if i.loaded and not i.copying),
    )


def slow_down_s(seen: IntervalSeen, base_s: float) -> float:
    """Return by how much a save made the iterations beside it slower than ``base_s``.

    The excess of the typical iteration, times their number: one slow iteration does not count.
    Negative if they were faster, which says that ``base_s`` is too high.
    """
    return seen.copying.excess_s(base_s) + seen.loaded.excess_s(base_s)


def cost_per_save_s(seen: IntervalSeen, base_s: float) -> float:
    """Return what one save cost the training loop in seconds, at least 0.

    That is all time blocked in ``after_step``, all waiting for the copy, and the slow-down
    against ``base_s``, an iteration with no save under way.
    """
    return max(0.0, seen.blocked_s + seen.waited_s + slow_down_s(seen, base_s))


def worst_seen(ranks: Sequence[SaveSeen]) -> SaveSeen:
    """Return what the job saw of a save that all ``ranks`` took part in.

    Copy, persist and bytes are the greatest of all ranks, the start of the save is that of the rank
    which waited least for the others. The interval is that of one rank, taken
    whole, because what one rank waits for shows on the others as slow iterations and must not
    count twice: the rank for which the interval was dearest, among those that set the pace. Where
    ranks do not wait for each other in every iteration, the fast ones wait at the save, and that is
    no cost of saving.

    Raises:
        ValueError: there is no rank.
    """
    if not ranks:
        raise ValueError("no rank has seen anything")
    slowest_s = max(rank.interval.pace_s for rank in ranks)
    setting = [rank for rank in ranks if rank.interval.pace_s >= _SETS_THE_PACE * slowest_s]
    known = [rank.interval.unloaded.typical_s for rank in setting if rank.interval.unloaded.steps]
    usual_s = statistics.median(known) if known else 0.0

    def dearness(rank: SaveSeen) -> float:
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
