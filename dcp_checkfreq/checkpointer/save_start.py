"""The start of a save, on the training thread: the ranks agree on what each copies, and copy it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dcp_checkfreq.checkpointer.background_save import SaveInFlight, refusing, save_failed
from dcp_checkfreq.dcp.save_planner import CheckFreqSavePlanner
from dcp_checkfreq.dcp.writer import CheckFreqWriter
from dcp_checkfreq.errors import SaveFailed, SnapshotFailed
from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.save_record import Measured
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.runtime.clock import Clock
from dcp_checkfreq.runtime.told import text_of
from dcp_checkfreq.snapshot.inventory import Survey
from dcp_checkfreq.snapshot.optimizer_guard import Guard
from dcp_checkfreq.snapshot.stager import Snapshot, gpu_copy_s

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks are about to save.

    Attributes:
        writer: of the step's folder.
        survey: of the live state.
        only: flat keys of what this rank copies, because the others copy the rest; None: all.
    """

    writer: CheckFreqWriter
    survey: Survey
    only: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class _Ready:
    """What a rank says before anything is copied."""

    step: int
    plan_fits: bool


class SaveStart:
    """Begins saves.

    Args:
        ranks: of this job.
        guard: of the optimizers.
        planner: kept over all saves; says whether its plan fits the next one.
        clock: for what saves cost.
    """

    def __init__(
        self, ranks: Ranks, guard: Guard, planner: CheckFreqSavePlanner, clock: Clock
    ) -> None:
        self._ranks, self._guard, self._planner, self._clock = ranks, guard, planner, clock

    def agree(
        self,
        step: int,
        capture: Callable[[], Mapping[str, Any]],
        open_writer: Callable[[], CheckFreqWriter],
    ) -> Agreed:
        """Look at the live state. All ranks call it; see `Saver.begin`."""
        found: list[Agreed] = []

        def look() -> _Ready:
            try:
                writer = open_writer()
            except OSError as error:
                raise save_failed(step)(text_of(error)) from error
            writer.watchdog = self._ranks.watchdog
            survey = writer.stager.survey(capture())
            only = self._planner.decide(survey.inventory.structure)
            found.append(Agreed(writer, survey, only))
            return _Ready(step, only is not None)

        with self._ranks.doing("capturing the state", f"of step {step}"):
            all_fit = self._ranks.combine(
                "capturing the state", look, _all_ready, wrap=save_failed(step)
            )
        (mine,) = found
        if all_fit and not self._ranks.is_alone:
            return mine
        return Agreed(mine.writer, mine.survey, None)

    def copy(
        self,
        step: int,
        agreed: Agreed,
        measured: Measured,
        *,
        profile: bool,
        facts: Callable[[], Any],
    ) -> tuple[SaveInFlight, BaseException | None]:
        """Begin the snapshot; return the save, and what ends this process if something does."""
        begun_s = self._clock.monotonic_s()
        planner, snapshot, stopped = self._planner, None, None
        try:
            snapshot = self._begin_snapshot(agreed, measured, profile=profile)
        except BaseException as error:
            # The others are on their way into the save: this rank has to be there and say no.
            planner = refusing(self._ranks, step, "copying the state", error)
            stopped = None if isinstance(error, Exception) else error
            if stopped is not None and self._ranks.is_alone:
                raise
        job = SaveInFlight(
            step,
            measured,
            facts,
            snapshot,
            writer=agreed.writer,
            planner=planner,
            pieces=agreed.survey.inventory.pieces if profile else [],
            begun_s=begun_s,
            started_s=self._clock.monotonic_s(),
        )
        return job, stopped

    def _begin_snapshot(self, agreed: Agreed, measured: Measured, *, profile: bool) -> Snapshot:
        guarded = (
            self._guard.addresses() if profile or measured.mode is not Mode.BLOCKING else set()
        )
        if profile:
            measured.gpu_copy_s = gpu_copy_s(agreed.survey, guarded)

        def begin() -> Snapshot:
            return agreed.writer.stager.begin(
                agreed.survey,
                only=agreed.only,
                guarded=set() if measured.mode is Mode.BLOCKING else guarded,
                on_gpu=measured.mode is Mode.GPU,
                touch_first=profile,
            )

        try:
            snapshot = begin()
        except SnapshotFailed as error:
            if measured.mode is not Mode.GPU:
                raise
            _log.warning("%s; this one goes to the host", error)
            measured.mode = Mode.CPU
            snapshot = begin()
        self._planner.expect_partial(agreed.only is not None)
        self._guard.arm(snapshot)
        measured.copied_bytes = snapshot.copied_bytes
        measured.state_bytes = snapshot.state_bytes
        return snapshot


def _all_ready(ranks: list[_Ready]) -> bool:
    """Return whether the kept plan fits on all ranks; raise if they are not at the same step."""
    steps = sorted({ready.step for ready in ranks})
    if len(steps) > 1:
        raise SaveFailed(f"step {steps[0]}", f"the ranks are saving different steps: {steps}")
    return all(ready.plan_fits for ready in ranks)
