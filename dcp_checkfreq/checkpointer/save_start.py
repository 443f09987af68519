"""The start of a save, on the training thread: the ranks agree on what each copies, and copy it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dcp_checkfreq.checkpointer.background_save import SaveInFlight, refusing, save_failed
from dcp_checkfreq.checkpointer.memory_forecast import (
    MemoryForecast,
    Needs,
    first_lines,
    forecasts,
)
from dcp_checkfreq.dcp.save_planner import CheckFreqSavePlanner
from dcp_checkfreq.dcp.writer import CheckFreqWriter
from dcp_checkfreq.errors import SaveFailed, SnapshotFailed
from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.observation import Iteration
from dcp_checkfreq.policy.save_timings import SaveTimings
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.runtime.clock import Clock
from dcp_checkfreq.runtime.error_reports import text_of
from dcp_checkfreq.snapshot.inventory import Survey
from dcp_checkfreq.snapshot.optimizer_guard import Address, Guard
from dcp_checkfreq.snapshot.stager import Snapshot, Stager, gpu_copy_s

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
    needs: Needs | None  # of the first one; None once that is told


@dataclass(frozen=True, slots=True)
class _Start:
    """What all ranks hear before anything is copied."""

    plan_fits: bool  # on all of them
    memory: Mapping[int, str]  # before the first snapshot, by the first rank of each node


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
        self._memory_is_told = False

    def agree(
        self,
        timings: SaveTimings,
        capture: Callable[[], Mapping[str, Any]],
        open_writer: Callable[[], CheckFreqWriter],
        *,
        profile: bool,
    ) -> Agreed:
        """Look at the live state, and say what the first snapshot takes before it takes it.

        All ranks call it; see `Saver.begin`.
        """
        step = timings.step
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
            needs = None
            if not self._memory_is_told:
                guarded = self._guarded(timings.mode, profile=profile)
                needs = _needs(writer.stager, survey, guarded, timings.mode, profile=profile)
            return _Ready(step, only is not None, needs)

        with self._ranks.doing("capturing the state", f"of step {step}"):
            start = self._ranks.combine(
                "capturing the state", look, _all_ready, wrap=save_failed(step)
            )
        if not self._memory_is_told and self._ranks.rank in start.memory:
            _log.info("%s", start.memory[self._ranks.rank])
        self._memory_is_told = True
        (mine,) = found
        if start.plan_fits and not self._ranks.is_alone:
            return mine
        return Agreed(mine.writer, mine.survey, None)

    def forecast(
        self,
        mode: Mode,
        capture: Callable[[], Mapping[str, Any]],
        without_state: Callable[[], tuple[str, ...]],
        *,
        profile: bool,
    ) -> MemoryForecast:
        """Say what the snapshot of a save takes; begin none. All ranks call it."""

        def look() -> Needs:
            stager = Stager()
            # Those that have not stepped since the last snapshot will have by the next one.
            guarded = self._guarded(mode, profile=profile, of_all=True)
            needs = _needs(stager, stager.survey(capture()), guarded, mode, profile=profile)
            return replace(needs, without_state=without_state())

        return self._ranks.combine("looking at the memory", look, forecasts)[self._ranks.rank]

    def copy(
        self,
        agreed: Agreed,
        timings: SaveTimings,
        *,
        profile: bool,
        iterations: Callable[[], Sequence[Iteration]],
    ) -> tuple[SaveInFlight, BaseException | None]:
        """Begin the snapshot; return the save, and what ends this process if something does."""
        begun_s = self._clock.monotonic_s()
        planner, snapshot, stopped = self._planner, None, None
        try:
            snapshot, timings = self._begin_snapshot(agreed, timings, profile=profile)
        except BaseException as error:
            # The others are on their way into the save: this rank has to be there and say no.
            planner = refusing(self._ranks, timings.step, "copying the state", error)
            stopped = None if isinstance(error, Exception) else error
            if stopped is not None and self._ranks.is_alone:
                raise
        job = SaveInFlight(
            timings,
            iterations,
            snapshot,
            writer=agreed.writer,
            planner=planner,
            pieces=agreed.survey.inventory.pieces if profile else [],
            begun_s=begun_s,
            started_s=self._clock.monotonic_s(),
        )
        return job, stopped

    def _guarded(self, mode: Mode, *, profile: bool, of_all: bool = False) -> set[Address]:
        may_overlap = profile or mode is not Mode.BLOCKING
        return self._guard.addresses(of_all=of_all) if may_overlap else set()

    def _begin_snapshot(
        self, agreed: Agreed, timings: SaveTimings, *, profile: bool
    ) -> tuple[Snapshot, SaveTimings]:
        mode = timings.mode
        guarded = self._guarded(mode, profile=profile)
        tried_gpu_s = gpu_copy_s(agreed.survey, guarded) if profile else None

        def begin(mode: Mode) -> Snapshot:
            return agreed.writer.stager.begin(
                agreed.survey,
                only=agreed.only,
                guarded=set() if mode is Mode.BLOCKING else guarded,
                on_gpu=mode is Mode.GPU,
                touch_first=profile,
            )

        try:
            snapshot = begin(mode)
        except SnapshotFailed as error:
            if mode is not Mode.GPU:
                raise
            _log.warning("%s; this one goes to the host", error)
            mode = Mode.CPU
            snapshot = begin(mode)
        self._planner.expect_partial(agreed.only is not None)
        self._guard.arm(snapshot)
        return snapshot, replace(
            timings,
            mode=mode,
            copied_bytes=snapshot.copied_bytes,
            state_bytes=snapshot.state_bytes,
            gpu_copy_s=tried_gpu_s,
        )


def _all_ready(ranks: list[_Ready]) -> _Start:
    """Return what all ranks hear; raise if they are not at the same step."""
    steps = sorted({ready.step for ready in ranks})
    if len(steps) > 1:
        raise SaveFailed(f"step {steps[0]}", f"the ranks are saving different steps: {steps}")
    needs = [ready.needs for ready in ranks if ready.needs is not None]  # all, or none
    return _Start(all(ready.plan_fits for ready in ranks), first_lines(needs))


def _needs(
    stager: Stager, survey: Survey, guarded: set[Address], mode: Mode, *, profile: bool
) -> Needs:
    # a profile tries a copy on the GPU, too
    on_gpu = profile or mode is Mode.GPU
    host_bytes, gpu_bytes = stager.needed_bytes(survey, guarded=guarded, on_gpu=on_gpu)
    return Needs(socket.gethostname(), host_bytes, gpu_bytes)
