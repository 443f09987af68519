"""When a run saves: at fixed steps, or as the tuner decides. Rank 0 decides, all ranks hear."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from dcp_checkfreq.policy import tuner
from dcp_checkfreq.policy.costs import Costs, profile_steps, typical_s, worst
from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.observation import (
    Iteration,
    SaveSeen,
    summarise,
    worst_seen,
)
from dcp_checkfreq.policy.profile_file import ProfileFiles
from dcp_checkfreq.policy.save_record import Measured
from dcp_checkfreq.policy.stored_profile import StoredProfile, fingerprint
from dcp_checkfreq.policy.tuner import Decision, Tuning
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.storage.tier import Tier

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Facts:
    """What one rank tells rank 0 about a save: of the interval before it, and for a profile."""

    seen: SaveSeen
    costs: Costs | None
    profile_steps: int  # iterations that ``costs`` were measured from


class SaveSchedule(Protocol):
    """Says when the next save is due; the same on all ranks at the same step."""

    @property
    def interval_steps(self) -> int | None:
        """Iterations from one save to the next (k); None while that is not known."""
        ...

    @property
    def mode(self) -> Mode:
        """How to copy the next snapshot."""
        ...

    @property
    def wants_profile(self) -> bool:
        """Whether the next save is measured to begin with."""
        ...

    def step_done(self) -> None:
        """Say that an iteration is done."""
        ...

    def is_due(self, step: int) -> bool:
        """Tell whether to save after this step."""
        ...

    def save_started(self) -> None:
        """Say that a save begins."""
        ...

    def decide(self, step: int, ranks: Sequence[Facts]) -> Decision | None:
        """On rank 0, in the background: decide what comes after this save."""
        ...

    def store(self) -> None:
        """On rank 0, in the background: keep on storage what was learned, if it is new."""
        ...

    def apply(self, decision: Decision | None) -> None:
        """On every rank, at the same step: act on the decision."""
        ...


class FixedSchedule:
    """Saves at steps that are multiples of ``every``."""

    wants_profile = False

    def __init__(self, every: int, mode: Mode) -> None:
        self.interval_steps: int | None = every
        self._every = every
        self.mode = mode

    def step_done(self) -> None:
        """Count an iteration."""

    def is_due(self, step: int) -> bool:
        """Tell whether to save after this step."""
        return step % self._every == 0

    def save_started(self) -> None:
        """Count from here."""

    def decide(self, step: int, ranks: Sequence[Facts]) -> Decision | None:
        """Let the tuner see the save."""
        return None

    def store(self) -> None:
        """Keep what was learned."""

    def apply(self, decision: Decision | None) -> None:
        """Act on the decision."""


class TunedSchedule:
    """Profiles, saves once, and then every k iterations as rank 0's tuner says.

    Args:
        profiles: where to keep what was learned.
        job: its fingerprint.
        stored: what an earlier run of the same job ended with.
        max_overhead: p.
        mtbf_s: mean time between failures of the job, if known.
        steps_per_epoch: for the length of the profile.
        mode: how to copy; None: as the tuner decides.
    """

    def __init__(
        self,
        profiles: ProfileFiles,
        job: str,
        stored: StoredProfile | None,
        *,
        max_overhead: float,
        mtbf_s: float | None,
        steps_per_epoch: int | None,
        mode: Mode | None,
    ) -> None:
        self._profiles, self._job = profiles, job
        self._max_overhead, self._mtbf_s = max_overhead, mtbf_s
        self._fixed_mode = mode
        self._profile_steps = profile_steps(steps_per_epoch)
        self._since = 0  # iterations since the last save began, or since the start
        self._waits_for_decision = False
        self._tuning: Tuning | None = None  # on rank 0 it changes with every save
        self._decision: Decision | None = None
        self._to_store: Tuning | None = None
        if stored is not None:
            self._tuning = self._start(stored.costs, stored.interval_under(max_overhead, mtbf_s))
            self._decision = tuner.opening(self._tuning)

    def _start(
        self,
        costs: Costs,
        first_interval_steps: int | None = None,
        base_steps: int = tuner.USUAL_BASE_STEPS,
    ) -> Tuning:
        mode = self._fixed_mode
        if mode is Mode.GPU and costs.snapshot_gpu_s is None:
            _log.warning("snapshots do not fit into GPU memory: they go to the host")
            mode = Mode.CPU
        return tuner.start(
            costs,
            max_overhead=self._max_overhead,
            mtbf_s=self._mtbf_s,
            mode=mode,
            first_interval_steps=first_interval_steps,
            base_steps=base_steps,
        )

    @property
    def interval_steps(self) -> int | None:
        """k; None while it is not known."""
        return None if self._decision is None else self._decision.interval_steps

    @property
    def mode(self) -> Mode:
        """How to copy the next snapshot."""
        if self._decision is not None:
            return self._decision.mode
        # The first copy is made by itself, so that what it takes does not depend on the training.
        return Mode.BLOCKING

    @property
    def wants_profile(self) -> bool:
        """Whether nothing is known of this job yet."""
        return self._decision is None

    def step_done(self) -> None:
        """Count an iteration."""
        self._since += 1

    def is_due(self, step: int) -> bool:
        """Tell whether to save after this step."""
        if self._waits_for_decision:
            return False
        if self._decision is None:
            return self._since >= self._profile_steps
        return self._since >= self._decision.interval_steps + self._decision.gap_steps

    def save_started(self) -> None:
        """Count from here."""
        self._since = 0
        self._waits_for_decision = self._decision is None
        if self._decision is not None:  # a gap is for one interval
            self._decision = replace(self._decision, gap_steps=0)

    def decide(self, step: int, ranks: Sequence[Facts]) -> Decision | None:
        """Let the tuner see the save."""
        before, known = self._decision, self._tuning
        if self._tuning is not None:
            seen = worst_seen([rank.seen for rank in ranks])
            self._tuning, decision = tuner.observe(self._tuning, seen)
        else:
            measured = [rank.costs for rank in ranks if rank.costs is not None]
            if len(measured) < len(ranks):
                return None  # the save failed, so it said nothing
            steps = min(rank.profile_steps for rank in ranks)
            self._tuning = self._start(worst(measured), base_steps=steps)
            decision = tuner.opening(self._tuning)
        changed = before is None or (before.interval_steps, before.mode) != (
            decision.interval_steps,
            decision.mode,
        )
        _log.log(logging.INFO if changed else logging.DEBUG, "step %d: %s", step, _told(decision))
        if changed or (known is not None and known.warming and not self._tuning.warming):
            self._to_store = self._tuning
        return decision

    def store(self) -> None:
        """Keep what was learned, if it is new.

        Not in `decide`, which the end of the save waits for, and with it the loop if the next one
        is due: on a busy disk it takes seconds.
        """
        tuning, self._to_store = self._to_store, None
        if tuning is None:
            return
        self._profiles.store(
            StoredProfile(
                fingerprint=self._job,
                costs=tuning.costs,
                mode=tuning.mode,
                interval_steps=tuning.interval_steps,
                max_overhead=self._max_overhead,
                mtbf_s=self._mtbf_s,
                confirmed=not tuning.warming,
            )
        )

    def apply(self, decision: Decision | None) -> None:
        """Act on the decision."""
        self._waits_for_decision = False
        if decision is not None:
            self._decision = decision


def _told(decision: Decision) -> str:
    ahead = decision.forecast
    goodput = "" if ahead.goodput is None else f", goodput {ahead.goodput:.1%}"
    return (
        f"{decision.reason}; expected overhead {ahead.overhead:.1%}, a crash loses "
        f"{ahead.lost_work_s:.3g} s (at most {ahead.recovery_bound_s:.3g} s){goodput}"
    )


def tuned_schedule(
    root: Tier,
    ranks: Ranks,
    description: list[object],
    *,
    max_overhead: float,
    mtbf_s: float | None,
    steps_per_epoch: int | None,
    mode: Mode | None,
) -> TunedSchedule:
    """Return the schedule of a tuned run, which goes on from a stored profile if there is one.

    Args:
        root: folder of the run.
        ranks: of this job, which all call this.
        description: plain values that say what saving this rank's state costs.
        max_overhead: see `TunedSchedule`.
        mtbf_s: see `TunedSchedule`.
        steps_per_epoch: see `TunedSchedule`.
        mode: see `TunedSchedule`.
    """
    profiles = ProfileFiles(root)

    def look_up(of_ranks: list[list[object]]) -> tuple[str, StoredProfile | None]:
        job = fingerprint([ranks.world_size, root.location, of_ranks])
        stored = profiles.load(job)
        if stored is not None:
            _log.info("profiled before: k %d, %s", stored.interval_steps, stored.costs)
        return job, stored

    job, stored = ranks.reduce_on_rank_0(description, look_up)
    return TunedSchedule(
        profiles,
        job,
        stored,
        max_overhead=max_overhead,
        mtbf_s=mtbf_s,
        steps_per_epoch=steps_per_epoch,
        mode=mode,
    )


def facts_of(
    iterations: Sequence[Iteration],
    measured: Measured,
    gpu_bytes: tuple[int, int],
    *,
    is_first: bool,
) -> Facts:
    """Return what a rank tells of the interval that a save ended, and of the save itself.

    Args:
        iterations: of the interval.
        measured: what the save cost.
        gpu_bytes: GPU memory in use, and there at all (M, Mmax).
        is_first: the interval or the save is not like later ones.
    """
    interval = summarise(iterations)
    seen = SaveSeen(
        interval=interval,
        mode=measured.mode,
        copy_s=measured.copy_s,
        persist_s=measured.persist_s,
        copied_bytes=measured.copied_bytes,
        state_bytes=measured.state_bytes,
        call_s=measured.call_s,
        is_first=is_first,
        failed=measured.failed,
    )
    if measured.failed:
        return Facts(seen, None, interval.steps)
    # Later saves copy less, where other ranks hold the same.
    share = measured.written_bytes / max(measured.copied_bytes, 1)
    used_bytes, total_bytes = gpu_bytes
    costs = Costs(
        iteration_s=typical_s(one.worked_s for one in iterations),
        update_s=interval.update_s,
        snapshot_gpu_s=None if measured.gpu_copy_s is None else measured.gpu_copy_s * share,
        snapshot_cpu_s=measured.copy_s * share,
        persist_s=measured.persist_s,
        state_bytes=measured.written_bytes,
        gpu_used_bytes=used_bytes,
        gpu_total_bytes=total_bytes,
        # A GPU has work queued while the host does this, so it need not hold up the training.
        call_s=0.0 if total_bytes else measured.call_s,
    )
    return Facts(seen, costs, interval.steps)


def mode_of(snapshot: str) -> Mode | None:
    """Return how snapshots are copied; None: as the costs say.

    Raises:
        ValueError: there is no such device.
    """
    if snapshot == "auto":
        return None
    if snapshot == "gpu" and not torch.cuda.is_available():
        raise ValueError("snapshot='gpu' needs a CUDA device")
    return Mode(snapshot)
