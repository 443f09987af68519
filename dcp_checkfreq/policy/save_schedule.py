"""When a run saves: at fixed steps, or as the tuner decides. Rank 0 decides, all ranks hear."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from dcp_checkfreq.format.checked_json import fingerprint
from dcp_checkfreq.policy import tuner
from dcp_checkfreq.policy.costs import Costs, profile_steps, worst
from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.profile_file import ProfileFiles
from dcp_checkfreq.policy.save_timings import SaveTimings, worst_seen
from dcp_checkfreq.policy.stored_profile import StoredProfile
from dcp_checkfreq.policy.tuner import Decision, Tuning
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.storage.tier import Tier

_log = logging.getLogger(__name__)


class SaveSchedule:
    """Says when the next save is due; the same on all ranks at the same step.

    With ``every``, at multiples of that. Else it profiles, saves once, and then every k iterations
    as rank 0's tuner says; it begins with a stored profile of the same job if there is one. All
    ranks make it together. ``describe`` returns plain values that say what saving this rank's state
    costs; ``mode`` None lets the tuner decide how to copy. ``learns``: saves are a measure.
    """

    def __init__(
        self,
        root: Tier,
        ranks: Ranks,
        describe: Callable[[], list[object]],
        *,
        every: int | None,
        max_overhead: float,
        mtbf_s: float | None,
        steps_per_epoch: int | None,
        mode: Mode | None,
    ) -> None:
        self._every, self._fixed_mode = every, mode
        self._profile_steps = profile_steps(steps_per_epoch)
        self._start = functools.partial(tuner.start, max_overhead=max_overhead, mtbf_s=mtbf_s)
        self._since = self.saves = 0  # iterations since the last save began, or since the start
        self._waits_for_decision, self.learns = False, every is None
        self._tuning: Tuning | None = None  # on rank 0 it changes with every save
        self._decision: Decision | None = None
        self._to_store: Tuning | None = None
        self._profiles, self._job = ProfileFiles(root), ""
        if every is None:
            job = (ranks.world_size, root.location)
            self._job, stored = ranks.reduce_on_rank_0(
                describe(), lambda of_ranks: self._look_up([*job, of_ranks])
            )
            if stored is not None:
                k = stored.interval_under(max_overhead, mtbf_s)
                mode = self._mode_for(stored.costs)
                self._tuning = self._start(stored.costs, mode=mode, first_interval_steps=k)
                self._decision = tuner.opening(self._tuning)

    def _look_up(self, of_job: list[object]) -> tuple[str, StoredProfile | None]:
        job = fingerprint(of_job)
        stored = self._profiles.load(job)
        if stored is not None:
            why = f"as an earlier run of this job did last: {stored.costs}"
            _log.info("save every %d iterations, %s", stored.interval_steps, why)
        return job, stored

    def _mode_for(self, costs: Costs) -> Mode | None:
        if self._fixed_mode is Mode.GPU and costs.snapshot_gpu_s is None:
            _log.warning("snapshots do not fit into GPU memory: they go to the host")
            return Mode.CPU
        return self._fixed_mode

    # --- on every rank, on the training thread ---

    @property
    def interval_steps(self) -> int | None:
        """Iterations from one save to the next (k); None while that is not known."""
        return self._every if self._decision is None else self._decision.interval_steps

    @property
    def wants_profile(self) -> bool:
        """Whether the next save is measured to begin with."""
        return self.interval_steps is None

    @property
    def mode(self) -> Mode:
        """How to copy the next snapshot."""
        if self._decision is not None:
            return self._decision.mode
        # The first copy is made by itself, so that what it takes does not depend on the training.
        return Mode.BLOCKING if self.wants_profile else self._fixed_mode or Mode.CPU

    def step_done(self) -> None:
        """Say that an iteration is done."""
        self._since += 1

    def is_due(self, step: int) -> bool:
        """Tell whether to save after this step."""
        if self._every is not None:
            return step % self._every == 0
        if self._waits_for_decision:
            return False
        if self._decision is None:
            return self._since >= self._profile_steps
        return self._since >= self._decision.interval_steps + self._decision.gap_steps

    def next_save(self, step: int) -> SaveTimings:
        """Return what is known of the next save before it begins."""
        # The interval before the second save holds the first one, whose buffers were cold.
        is_first, k = self.saves < 2, self.interval_steps
        return SaveTimings(step=step, interval_steps=k, mode=self.mode, is_first=is_first)

    def save_started(self) -> None:
        """Say that a save has begun."""
        self.saves += 1
        self._since = 0
        self._waits_for_decision = self.wants_profile
        if self._decision is not None:  # a gap is for one interval
            self._decision = replace(self._decision, gap_steps=0)

    def apply(self, decision: Decision | None) -> None:
        """Act on what `decide` has returned; all ranks do at the same step."""
        self._waits_for_decision = False
        if decision is not None:
            self._decision = decision

    # --- on rank 0, in the background ---

    def decide(self, ranks: Sequence[SaveTimings]) -> Decision | None:
        """Return what comes after this save, as all ranks have timed it."""
        if not self.learns:
            return None
        before, known = self._decision, self._tuning
        if known is not None:
            self._tuning, decision = tuner.observe(known, worst_seen(ranks))
        elif any(rank.failed for rank in ranks):
            return None  # it said nothing
        else:
            costs = worst([rank.profile() for rank in ranks])
            steps = min(rank.interval.steps for rank in ranks)
            self._tuning = self._start(costs, mode=self._mode_for(costs), base_steps=steps)
            decision = tuner.opening(self._tuning)
        now = (decision.interval_steps, decision.mode)
        changed = before is None or (before.interval_steps, before.mode) != now
        tell = _log.info if changed else _log.debug
        tell("step %d: %s", ranks[0].step, _told(decision))
        if changed or (known is not None and known.warming and not self._tuning.warming):
            self._to_store = self._tuning
        return decision

    def store(self) -> None:
        """Keep on storage what was learned, if it is new. On a busy disk that takes seconds."""
        tuning, self._to_store = self._to_store, None
        if tuning is not None:
            self._profiles.store(
                StoredProfile(
                    fingerprint=self._job,
                    costs=tuning.costs,
                    mode=tuning.mode,
                    interval_steps=tuning.interval_steps,
                    max_overhead=tuning.max_overhead,
                    mtbf_s=tuning.mtbf_s,
                    confirmed=not tuning.warming,
                )
            )


def _told(decision: Decision) -> str:
    ahead = decision.forecast
    goodput = "" if ahead.goodput is None else f"; {ahead.goodput:.1%} of the time is training"
    return (
        f"{decision.reason}. Expected: {ahead.overhead:.1%} overhead, and a crash loses "
        f"{ahead.lost_work_s:.3g} s of work (at most {ahead.recovery_bound_s:.3g} s){goodput}"
    )
