"""`CheckFreqWriter`: the `StorageWriter` that DCP drives through one save."""

from __future__ import annotations

import concurrent.futures
import functools
import io
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from torch.optim import Optimizer

from dcp_checkfreq.commit.in_flight import InFlight, reporting
from dcp_checkfreq.commit.one_at_a_time import Turn
from dcp_checkfreq.commit.phases import Phase
from dcp_checkfreq.dcp.boundary import tells_errors
from dcp_checkfreq.dcp.name_lengths import check_step_lengths
from dcp_checkfreq.dcp.rank_save import OfRun, RankSave
from dcp_checkfreq.errors import (
    SaveFailed,
    UnsupportedOption,
)
from dcp_checkfreq.format.envelope import Envelopes
from dcp_checkfreq.format.value_checks import ValueChecks
from dcp_checkfreq.ranks.watchdog import Watchdog
from dcp_checkfreq.runtime import options
from dcp_checkfreq.runtime.clock import Clock, SystemClock
from dcp_checkfreq.runtime.gc_paused import collector_held
from dcp_checkfreq.runtime.gil_switch_interval import quick_switching
from dcp_checkfreq.shards.codec import finish_gpu_work
from dcp_checkfreq.shards.layout import RankReport, lay_out, lay_out_each, report, resolve, value_of
from dcp_checkfreq.snapshot.optimizer_guard import guard_of
from dcp_checkfreq.snapshot.stager import Stager
from dcp_checkfreq.staging.staged_tier import (
    StagingDir,
    staged_folder,
)
from dcp_checkfreq.storage.object_store.options import Options
from dcp_checkfreq.storage.open import Location, can_open, open_tier
from dcp_checkfreq.storage.tier import Tier

_log = logging.getLogger(__name__)

_ENVELOPES = Envelopes()  # archive headers by dtype and shape: the same for every save


class CheckFreqWriter(StorageWriter, AsyncStager):
    """Writes one checkpoint into its own folder, and publishes it last, durably, or not at all.

    Use it with `dcp.save` and `dcp.async_save`, made anew for every save or reused with
    ``checkpoint_id=``. The result is a plain DCP checkpoint that stock readers load.

    Promises: shard files have names of this attempt, so nothing that exists is written into. Every
    file and folder is fsynced before ``.metadata`` appears, in one atomic step, on the coordinator,
    after every rank has succeeded and every planned item is accounted for. If this rank's writing
    fails, its files are removed and the error is raised (DCP wraps it in `CheckpointException`).

    As a stager it copies the state into reused host buffers before `dcp.async_save` returns; one
    snapshot is held at a time and never rewritten while its bytes are still being written out.
    With ``overlap`` the parameters and state of these optimizers are copied while the next forward
    and backward run, and their `step` waits for the copy. `dcp.async_save` then returns DCP's
    `AsyncSaveResponse`.

    Args:
        path: folder of the checkpoint: a path, URL or `Tier`; made if missing. URLs are those of
            fsspec: ``s3://``, ``gs://``, ``file://`` and others.
        overwrite: replace a whole checkpoint that is there. New files are written next to the old
            ones, ``.metadata`` is replaced atomically, then the old files are removed.
        threads: files this rank writes at once.
        direct_io: None: past the page cache where the file system can; False: never.
        allow_pickle: save values whose unpickling runs code; the reader has to allow it, too.
            Without it they are refused when they are saved.
        overlap: optimizers whose `step` alone changes their parameters and state.
        staging_dir: folder on a local disk of each node. Shards are written there first, which
            frees the snapshot buffers, and are copied from there to ``path``; the save ends, as
            ever, when ``.metadata`` is there. A local disk that is full is passed by.
        staging_bytes: what a rank may keep on the local disk. None: see `StagingArea`.
        storage_options: for the file system of a URL, as fsspec (for ``s3://`` s3fs) takes them.
            Not in pickles, but for what is known to be no secret; see `RemoteTier`.
        clock: by which copies are timed.

    Not thread-safe: one save at a time.
    """

    def __init__(
        self,
        path: Location,
        *,
        overwrite: bool = False,
        threads: int = 2,
        direct_io: bool | None = None,
        allow_pickle: bool = False,
        overlap: Sequence[Optimizer] = (),
        staging_dir: StagingDir | None = None,
        staging_bytes: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        clock: Clock | None = None,
        _of_run: OfRun | None = None,  # of `Checkpointer`
        _file_for_each: bool = False,  # item; of the drop-in
    ) -> None:
        options.check(options.WRITER, locals())
        super().__init__()
        self._direct_io = direct_io
        self._options = Options(storage_options or {})
        self._staging = (staging_dir, staging_bytes)
        self._tier = self._opened(path)
        self._threads = threads
        self._file_for_each = _file_for_each
        self._allow_pickle = allow_pickle
        self._values = ValueChecks()
        self._overlap = tuple(overlap)
        self._of_run = _of_run or OfRun(may_replace=_always if overwrite else None)
        self._clock = clock or SystemClock()
        self.stager = Stager(clock=clock)
        self._turn = Turn()
        self.in_flight = InFlight()
        self.watchdog: Watchdog | None = None  # hears what this rank is at
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        # Optimizers stay in the process that steps them.
        return self.__dict__ | {"_overlap": (), "watchdog": None}

    def _opened(self, path: Location) -> Tier:
        tier = open_tier(path, direct_io=self._direct_io, storage_options=self._options.all())
        staging_dir, limit_bytes = self._staging
        if staging_dir is not None:
            tier = staged_folder(tier, staging_dir, limit_bytes=limit_bytes)
        check_step_lengths(tier)
        return tier

    def _begin(self) -> None:
        self.rank_save = RankSave(
            self._tier, self._of_run, threads=self._threads, clock=self._clock
        )

    # --- DCP's calls, in their order ---

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new save, into ``checkpoint_id`` if given; all other options stay."""
        self.stager.handed_to(threading.current_thread())
        self._turn.wait()
        if self.rank_save.is_coordinator:
            # If `finish` was never called for it, it failed: only this object could have.
            self.rank_save.abandon()
        if checkpoint_id is not None:
            self._tier = self._opened(checkpoint_id)
        self._begin()

    def storage_meta(self) -> StorageMeta:
        """Name the checkpoint and the attempt for DCP's logs and metadata."""
        # DCP's first call in the thread that saves: if it dies now, this is all that is known.
        self.stager.handed_to(threading.current_thread())
        return self.rank_save.meta

    @property
    def save_id(self) -> str:
        """Name of the save under way or next, as stock writers have it."""
        return self.rank_save.attempt.id

    # DCP passes rank and use_collectives only to a parameter that is named `kwargs`.
    @tells_errors(SaveFailed, "looking whether it can save")
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that this save can be kept, before anything is written.

        Raises:
            UnsupportedOption: ``use_collectives=False``.
            CheckpointExists: a whole checkpoint is there and ``overwrite`` is False.
            WriteFailed: the storage failed.
        """
        if self.rank_save.attempt.phase is not Phase.IDLE:
            self.reset()  # DCP itself calls it only when it is given a checkpoint_id
        worker = self._turn.take()
        self.stager.handed_to(worker)
        self.in_flight.taken_up(worker)
        if not kwargs.get("use_collectives", True):
            raise UnsupportedOption(
                "use_collectives=False",
                "without the ranks' agreement nobody can tell when the checkpoint is whole",
            )
        self.rank_save.is_coordinator = is_coordinator
        self.rank_save.rank = kwargs.get("rank", 0)
        if is_coordinator:
            self.rank_save.check()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    @tells_errors(SaveFailed, "reserving the commit")
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are; nothing of ours travels in them, so cached plans do.

        Called on the coordinator, when every rank has planned and none has begun to write.

        Raises:
            WriteFailed: the storage failed.
        """
        self.rank_save.world_size = len(plans)
        self.rank_save.reserve()
        return plans

    @reporting("writing", ends=lambda writer: not writer.rank_save.is_coordinator)
    @tells_errors(SaveFailed, "writing")
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items. On return they are durable, under names nobody knows yet.

        Raises:
            UnsupportedState: an item cannot be written or loaded again; nothing was written.
            WriteFailed: the storage failed; this rank's files were removed.
        """
        save = self.rank_save
        try:
            with quick_switching():  # a training loop may run meanwhile
                mine = self._written(plan, planner)
                current = self.in_flight.current
                save.upload_now(_nobody if current is None else current.moved)
        finally:
            if not save.is_coordinator:
                self._turn.give_back()
        # One result for all items: DCP only carries results from `write_data` to `finish`.
        result = WriteResult(
            index=MetadataIndex(f"__rank_{save.rank}"),
            size_in_bytes=sum(mine.files.values()),
            storage_data=save.written(mine),
        )
        future: Future[list[WriteResult]] = Future()
        future.set_result([result])
        return future

    def _written(self, plan: SavePlan, planner: SavePlanner) -> RankReport:
        try:
            with self.rank_save.writing():
                with collector_held():
                    check = (
                        None
                        if self._allow_pickle
                        else functools.partial(self._check_value, planner)
                    )
                    items = resolve(plan, planner, _ENVELOPES, check)
                    if not self.stager.holds_a_snapshot:
                        finish_gpu_work(item.source for item in items)
                    placements = (
                        lay_out_each(items)
                        if self._file_for_each
                        else lay_out(items, self._threads)
                    )
                signs = self.watchdog or self.in_flight.current
                files = self.rank_save.write_files(items, placements, signs)
                self.stager.check()
        finally:
            self.stager.release()
        with collector_held():
            return report(plan, items, placements, files)

    def _check_value(self, planner: SavePlanner, item: WriteItem, stream: io.BytesIO) -> None:
        """Refuse what a restart would refuse."""
        look_up = functools.partial(value_of, item, planner)
        self._values.check(item.index.fqn, stream, self._tier.location, look_up)

    @reporting("publishing")
    @tells_errors(SaveFailed, "publishing")
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint. Called on the coordinator, after every rank has succeeded.

        Raises:
            ItemsMissing: something planned was not written; nothing was published.
            SaveFailed: a file is gone that a rank had written; nothing was published.
            CheckpointExists: another writer published first.
            PublishUnknown: the storage gave no clear answer; nothing was deleted.
        """
        try:
            self.rank_save.finish(
                metadata, [done.storage_data for rank in results for done in rank]
            )
        finally:
            self._turn.give_back()

    @property
    def checkpoint_id(self) -> str:
        """The folder this writer saves into."""
        return self._tier.location

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this writer could save to ``checkpoint_id``."""
        return can_open(checkpoint_id)

    # --- the stager's face ---

    _synchronize_after_execute = False

    def stage(
        self, state_dict: dict[str, Any]
    ) -> dict[str, Any] | concurrent.futures.Future[dict[str, Any]]:
        """Copy the state into reused host buffers.

        It may be changed as soon as this returns, but for what ``overlap`` names: that may be
        changed by these optimizers' `step`, or when the future that is then returned is done.
        """
        in_flight = self.in_flight.next(self._tier.location)
        if not self._overlap:
            return self.stager.stage(state_dict)
        guards = [guard_of(optimizer) for optimizer in self._overlap]
        addresses = set().union(*(guard.addresses() for guard in guards))
        snapshot = self.stager.begin(self.stager.survey(state_dict), guarded=addresses)
        for guard in guards:
            guard.arm(snapshot)
        return in_flight.staged_by(snapshot.when_done(), self.stager.release)

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` has copied everything when it returns."""

    def close(self) -> None:
        """Give the snapshot buffers back to the process-wide pool. May be called twice."""
        self.stager.release()
        self.rank_save.close()


def _always() -> bool:
    return True


def _nobody(size_bytes: int) -> None:
    """Take note for nobody."""
