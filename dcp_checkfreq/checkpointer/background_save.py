"""What a save does in the background: the snapshot is written and published by DCP."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq.checkpointer.replicas import inner_paths_named
from dcp_checkfreq.dcp.save_planner import CheckFreqSavePlanner, FailingSavePlanner
from dcp_checkfreq.dcp.writer import CheckFreqWriter
from dcp_checkfreq.errors import CheckFreqError, PublishUnknown, RankLost, SaveFailed
from dcp_checkfreq.format.torch_private import dcp_save
from dcp_checkfreq.policy.observation import Iteration
from dcp_checkfreq.policy.save_timings import SaveTimings
from dcp_checkfreq.policy.tuner import Decision
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.ranks.own_group import GROUP_IS_GONE
from dcp_checkfreq.runtime.clock import Clock
from dcp_checkfreq.runtime.error_reports import report_of
from dcp_checkfreq.runtime.outcome import is_certain
from dcp_checkfreq.snapshot.inventory import Piece
from dcp_checkfreq.snapshot.stager import Snapshot
from dcp_checkfreq.staging.upload import upload_and_publish

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """A save that has ended, as all ranks know it."""

    timings: SaveTimings  # of this rank
    at: int  # the first step at which all ranks act on it
    error: BaseException | None
    decision: Decision | None = None


@dataclass(slots=True)
class BackgroundWork:
    """What is in flight."""

    timings: SaveTimings  # as far as they are known
    # Returns the iterations before it; None: nothing follows from what it cost.
    iterations: Callable[[], Sequence[Iteration]] | None
    snapshot: Snapshot | None = None
    ended: Ended | None = None
    is_given_up: bool = False  # and the training thread has heard of it

    @property
    def step(self) -> int:
        """The step that is being saved."""
        return self.timings.step


@dataclass(slots=True)
class SaveInFlight(BackgroundWork):
    """A save, from its snapshot on."""

    begun_s: float = field(kw_only=True)  # the snapshot was; the background work somewhat later
    started_s: float = field(kw_only=True)
    writer: CheckFreqWriter = field(kw_only=True)
    planner: CheckFreqSavePlanner = field(kw_only=True)
    pieces: list[Piece] = field(kw_only=True)  # of a profile: what there is to write


def save_failed(step: int) -> Callable[[str], SaveFailed]:
    """Return what makes the error of a save of this step, given what went wrong."""
    return functools.partial(SaveFailed, f"step {step}")


def refusing(ranks: Ranks, step: int, doing: str, error: BaseException) -> CheckFreqSavePlanner:
    """Return a planner that tells all ranks in the save that this one cannot."""
    report = report_of(error, ranks.rank, doing, save_failed(step), named=False)
    if ranks.is_alone and isinstance(error, Exception):
        return FailingSavePlanner(error)
    return FailingSavePlanner(report.rebuilt())


def ends_of(work: BackgroundWork) -> list[Callable[[], None]]:
    """Return what lets go of all that a save has held, however it has ended."""
    if not isinstance(work, SaveInFlight):
        return []
    ends = [] if work.snapshot is None else [work.snapshot.end]
    return [work.writer.close, work.planner.let_go, *ends]


def write_and_publish(
    job: SaveInFlight, ranks: Ranks, clock: Clock, before_writing: Callable[[], None]
) -> None:
    """Write a snapshot and publish it; fill in what that cost.

    Args:
        job: the save.
        ranks: which all call this.
        clock: for what the save costs.
        before_writing: called on rank 0; must not raise.

    Raises:
        CheckFreqError: the save failed, or it is not known whether it is published.
    """
    planner = job.planner
    where = job.writer.checkpoint_id
    try:
        if job.snapshot is not None:
            # Before anything else: this thread's Python would hold up the loop's.
            job.snapshot.wait()
            job.timings = replace(job.timings, copy_s=job.snapshot.copy_s)
        if ranks.rank == 0:
            with ranks.asking("renewing the lease"):
                before_writing()
        state = dict(job.snapshot.state) if job.snapshot is not None else {}
    except BaseException as error:  # noqa: BLE001  the others are in the save already
        planner, state = refusing(ranks, job.step, "copying the state", error), {}
    if ranks.is_gone():
        raise RankLost(where, GROUP_IS_GONE)
    try:
        with (
            inner_paths_named(ranks, planner),
            ranks.dcp("saving", where, wrap=functools.partial(SaveFailed, where)),
        ):
            dcp_save(
                state,
                storage_writer=job.writer,
                planner=planner,
                process_group=ranks.group,
                no_dist=ranks.is_alone,
            )
    except BaseException as failed:
        of_all = failed.__cause__
        if isinstance(of_all, CheckpointException):
            certain = is_certain(of_all)
        else:  # then no one but rank 0's writer could have published it, and that knows
            certain = ranks.rank == 0 and isinstance(failed, Exception)
        if certain:
            job.writer.rank_save.abandon()
        raise
    _upload(job, ranks, before_writing)
    copied_s = max(job.started_s, job.begun_s + job.timings.copy_s)
    persist_s = max(0.0, clock.monotonic_s() - copied_s)
    if job.pieces:  # later saves keep the plan
        persist_s = max(0.0, persist_s - planner.planning_s)
    written = planner.written_keys
    written_bytes = sum(
        piece.size_bytes for piece in job.pieces if not written.isdisjoint(piece.paths)
    )
    job.timings = replace(job.timings, persist_s=persist_s, written_bytes=written_bytes)


def _upload(job: SaveInFlight, ranks: Ranks, before_writing: Callable[[], None]) -> None:
    """Bring what was staged on local disks to where it is published."""
    step, save = job.step, job.writer.rank_save
    if not save.uploads_later:
        return
    if ranks.rank == 0:
        _log.info("step %d is on the local disks; it is being uploaded", step)
    try:
        with ranks.region("uploading", wrap=save_failed(step)):
            upload_and_publish(
                ranks,
                save.start_upload(),
                save.location,
                save.publish_uploaded,
                each_round=before_writing,
            )
    except (PublishUnknown, RankLost):
        raise  # it may be published; or the next start finishes it
    except CheckFreqError:
        save.abandon()
        raise
    save.settle()
