"""`CheckFreqWriter`: the `StorageWriter` that DCP drives through one save."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import io
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
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

from dcp_checkfreq import options
from dcp_checkfreq.commit.assemble import assemble
from dcp_checkfreq.commit.attempt import SaveAttempt, new_attempt
from dcp_checkfreq.commit.in_flight import InFlight, told
from dcp_checkfreq.commit.one_at_a_time import Turn
from dcp_checkfreq.commit.phases import Phase
from dcp_checkfreq.commit.publish import publish
from dcp_checkfreq.commit.standing import standing
from dcp_checkfreq.dcp.boundary import tells_errors
from dcp_checkfreq.dcp.name_lengths import check_step_lengths
from dcp_checkfreq.dcp.unsettled import remember, sweep_up
from dcp_checkfreq.errors import (
    PublishUnknown,
    SaveFailed,
    UnsupportedOption,
    WriteFailed,
)
from dcp_checkfreq.format import index, names
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.format.digest import identity
from dcp_checkfreq.format.envelope import Envelopes
from dcp_checkfreq.format.texts import plain
from dcp_checkfreq.format.value_checks import ValueChecks
from dcp_checkfreq.ranks.watchdog import Watchdog
from dcp_checkfreq.recovery.files import is_published, named_in
from dcp_checkfreq.runtime import version
from dcp_checkfreq.runtime.clock import Clock, SystemClock
from dcp_checkfreq.runtime.crew import Crew
from dcp_checkfreq.runtime.gc_paused import collector_held
from dcp_checkfreq.runtime.gil_switch_interval import quick_switching
from dcp_checkfreq.shards.assign import Placement
from dcp_checkfreq.shards.codec import Item, finish_gpu_work, pieces
from dcp_checkfreq.shards.layout import RankReport, lay_out, report, resolve, value_of
from dcp_checkfreq.snapshot.inventory import Survey
from dcp_checkfreq.snapshot.optimizer_guard import Address, guard_of
from dcp_checkfreq.snapshot.stager import Snapshot, Stager
from dcp_checkfreq.staging.staged_save import Place, StagedSave
from dcp_checkfreq.staging.staged_tier import (
    StagedTier,
    StagingDir,
    Upload,
    staged_folder,
)
from dcp_checkfreq.storage.object_store.options import Options
from dcp_checkfreq.storage.open import Location, can_open, open_tier
from dcp_checkfreq.storage.tier import StaleCredentials, Tier

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
        overwrite: replace a whole checkpoint that is there. New files are written beside the old
            ones, ``.metadata`` is replaced atomically, then the old files are removed.
        threads: files this rank writes at once.
        direct_io: None: past the page cache where the file system can; False: never.
        allow_pickle: save values whose unpickling runs code; whoever loads has to allow it, too.
            Without it they are refused when they are saved.
        overlap: optimizers whose `step` alone changes their parameters and state.
        staging_dir: folder on a local disk of each node. Shards are written there first, which
            frees the snapshot buffers, and are copied from there to ``path``; the save ends, as
            ever, when ``.metadata`` is there. A local disk that is full is passed by.
        staging_bytes: what a rank may keep on the local disk. None: see `StagingArea`.
        storage_options: for the file system of a URL, as fsspec (for ``s3://`` s3fs) takes them.
            Not in pickles, but for what is known to be no secret; see `RemoteTier`.
        lineage: the run that saves; `Checkpointer` fills it in.
        uploads_later: `finish` commits on the local disks only; whoever drives this writer calls
            `start_upload`, `publish_uploaded` and `settle`. `Checkpointer` does.
        may_replace: asked on the coordinator when a checkpoint is there and ``overwrite`` is not
            set, early and again right before the commit. `Checkpointer` passes one by that is
            damaged or was left behind.
        check_root: called on the coordinator, early and again right before the commit; what it
            raises fails the save. `Checkpointer` lets it look for other runs.
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
        lineage: index.Lineage | None = None,
        uploads_later: bool = False,
        may_replace: Callable[[], bool] | None = None,
        check_root: Callable[[], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        options.check(options.WRITER, locals())
        super().__init__()
        self._direct_io = direct_io
        self._options = Options(storage_options or {})
        self._staging = (staging_dir, staging_bytes)
        self._tier = self._opened(path)
        self._threads = threads
        self._allow_pickle = allow_pickle
        self._values = ValueChecks()
        self._overlap = tuple(overlap)
        self._lineage = lineage
        self._uploads_later = uploads_later
        self._may_replace = _always if overwrite else may_replace
        self._clock = clock or SystemClock()
        self._check_root = check_root
        self._stager = Stager(clock=clock)
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
        self._attempt: SaveAttempt = new_attempt(self._tier)
        self._staged: StagedSave | None = None
        if isinstance(self._tier, StagedTier):
            self._staged = StagedSave(self._tier, self._attempt.id, threads=self._threads)
        self._to_publish: tuple[bytes, Mapping[str, int]] = b"", {}
        self.published: Published | None = None
        self._is_coordinator = False
        self._rank = 0
        self._world_size = 1

    # --- DCP's calls, in their order ---

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new save, into ``checkpoint_id`` if given; all other options stay."""
        self._stager.handed_to(threading.current_thread())
        self._turn.wait()
        if self._is_coordinator:
            # If `finish` was never called for it, it failed: only this object could have.
            self.abandon()
        if checkpoint_id is not None:
            self._tier = self._opened(checkpoint_id)
        self._begin()

    def storage_meta(self) -> StorageMeta:
        """Name the checkpoint and the attempt for DCP's logs and metadata."""
        # DCP's first call in the thread that saves: if it dies now, this is all that is known.
        self._stager.handed_to(threading.current_thread())
        return StorageMeta(checkpoint_id=plain(self._tier.location), save_id=self._attempt.id)

    @property
    def save_id(self) -> str:
        """Name of the save under way or next, as stock writers have it."""
        return self._attempt.id

    # DCP passes rank and use_collectives only to a parameter that is named `kwargs`.
    @tells_errors(SaveFailed, "looking whether it can save")
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that this save can be kept, before anything is written.

        Raises:
            UnsupportedOption: ``use_collectives=False``.
            CheckpointExists: a whole checkpoint is there and ``overwrite`` is False.
            WriteFailed: the storage failed.
        """
        if self._attempt.phase is not Phase.IDLE:
            self.reset()  # DCP itself calls it only when it is given a checkpoint_id
        worker = self._turn.take()
        self._stager.handed_to(worker)
        self.in_flight.taken_up(worker)
        if not kwargs.get("use_collectives", True):
            raise UnsupportedOption(
                "use_collectives=False",
                "without the ranks' agreement nobody can tell when the checkpoint is whole",
            )
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank", 0)
        if is_coordinator:
            if self._check_root is not None:
                self._check_root()
            with self._storage_errors():
                sweep_up(self._tier)
                if is_published(self._tier) and not (self._may_replace and self._may_replace()):
                    raise standing(self._tier)

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WriteFailed(self._tier.location, f"rank {self._rank}: {error}") from error

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
        self._world_size = len(plans)
        with self._storage_errors():
            self._attempt.reserve()
        remember(self._attempt)
        return plans

    @told("writing", ends=lambda writer: not writer._is_coordinator)
    @tells_errors(SaveFailed, "writing")
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items. On return they are durable, under names nobody knows yet.

        Raises:
            UnsupportedState: an item cannot be written or loaded again; nothing was written.
            WriteFailed: the storage failed; this rank's files were removed.
        """
        try:
            with quick_switching():  # a training loop may run beside it
                written = self._write_data(plan, planner)
                if self._staged is not None and not self._uploads_later:
                    self._upload_now(self._staged)
        finally:
            if not self._is_coordinator:
                self._turn.give_back()
        # One result for all items: DCP only carries results from `write_data` to `finish`.
        result = WriteResult(
            index=MetadataIndex(f"__rank_{self._rank}"),
            size_in_bytes=sum(written.files.values()),
            storage_data=_Written(written, self._on_slow_side()),
        )
        future: Future[list[WriteResult]] = Future()
        future.set_result([result])
        return future

    def _write_data(self, plan: SavePlan, planner: SavePlanner) -> RankReport:
        try:
            self._attempt.begin()
            with collector_held():
                check = (
                    None if self._allow_pickle else functools.partial(self._check_value, planner)
                )
                items = resolve(plan, planner, _ENVELOPES, check)
                if not self._stager.holds_a_snapshot:
                    finish_gpu_work(item.source for item in items)
                placements = lay_out(items, self._threads)
            files = [
                names.shard_file(self._rank, number, self._attempt.id)
                for number in range(len(placements))
            ]
            self._attempt.files = files
            self._write_files(items, placements)
            self._stager.check()
        except OSError as error:
            self.abandon()
            raise WriteFailed(self._tier.location, f"rank {self._rank}: {error}") from error
        except BaseException:
            self.abandon()
            raise
        finally:
            self._stager.release()
        self._attempt.wrote()
        with collector_held():
            return report(plan, items, placements, files)

    def _check_value(self, planner: SavePlanner, item: WriteItem, stream: io.BytesIO) -> None:
        """Refuse what a restart would refuse."""
        look_up = functools.partial(value_of, item, planner)
        self._values.check(item.index.fqn, stream, self._tier.location, look_up)

    @told("publishing")
    @tells_errors(SaveFailed, "publishing")
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint. Called on the coordinator, after every rank has succeeded.

        Raises:
            ItemsMissing: something planned was not written; nothing was published.
            SaveFailed: a file is gone that a rank had written; nothing was published.
            CheckpointExists: another writer published first.
            PublishUnknown: the storage gave no clear answer; nothing was deleted.
        """
        told: list[_Written] = [done.storage_data for rank in results for done in rank]
        reports = [written.report for written in told]
        files = {name: size for written in reports for name, size in written.files.items()}
        try:
            with collector_held():
                columns = assemble(metadata, reports, self._tier.location)
            metadata.storage_meta = self.storage_meta()
            record = index.Record(
                attempt=self._attempt.id,
                world_size=self._world_size,
                step=names.parse_step(os.path.basename(self._tier.location)),
                lineage=self._lineage,
                written_by=version.WRITTEN_BY,
                files=files,
                columns=columns,
            )
            with collector_held():
                content = metadata_format.dump(metadata, record)
            if self._staged is not None and self._uploads_later:
                self._staged.commit(content, {name for one in told for name in one.on_slow_side})
                self._to_publish = content, files
            else:
                self._publish(content, files)
        except PublishUnknown:
            raise
        except BaseException as error:
            if self._attempt.may_be_published:  # every rank must hear that: they delete their files
                raise PublishUnknown(self._tier.location, f"interrupted by {error!r}") from error
            self.abandon()
            raise
        else:
            if self._staged is not None and not self._uploads_later:
                self._staged.settle()
        finally:
            self._turn.give_back()

    def _publish(self, content: bytes, files: Mapping[str, int]) -> None:
        if self._check_root is not None:
            self._check_root()
        replaced = self._attempt.commit(
            lambda reservation: publish(
                self._tier,
                content,
                reservation=reservation,
                files=files,
                may_replace=self._may_replace,
                clock=self._clock,
            )
        )
        self.published = Published(identity(content), files, self._lineage)
        if replaced is not None:
            named = named_in(replaced, self._tier.location) or frozenset()
            self._attempt.remove(sorted(named - files.keys()))

    # --- what follows if the upload comes later ---

    @property
    def uploads_later(self) -> bool:
        """Whether something is left to do when DCP's save has returned; the same on all ranks."""
        return self._staged is not None and self._uploads_later

    def start_upload(self) -> Upload:
        """On every rank, once DCP's save has returned: start to copy to the remote side."""
        assert self._staged is not None
        self._staged.committed()
        return self._staged.start_upload()

    def publish_uploaded(self) -> None:
        """On the coordinator, once the uploads of all ranks are complete: publish.

        Raises:
            SaveFailed, PublishUnknown: as `finish`.
        """
        self._publish(*self._to_publish)

    def settle(self) -> None:
        """On every rank, once it is known that the save is published."""
        if self._staged is not None:
            self._staged.settle()

    # --- pieces of the above ---

    def _upload_now(self, staged: StagedSave) -> None:
        try:
            current = self.in_flight.current
            staged.upload(_nobody if current is None else current.moved)
        except OSError as error:
            self.abandon()
            raise WriteFailed(self._tier.location, f"rank {self._rank}: {error}") from error
        except BaseException:
            self.abandon()
            raise
        if not self._is_coordinator:
            staged.close()  # DCP does not tell this rank how the save ends

    def _on_slow_side(self) -> tuple[str, ...]:
        """Return this rank's files that no upload has to bring there."""
        staged = self._staged is not None and self._staged.place is not Place.MEMORY
        return () if staged else tuple(self._attempt.files)

    def _write_files(self, items: list[Item], placements: list[Placement]) -> None:
        if self._staged is not None and placements:
            sizes = {
                name: placement.size_bytes
                for name, placement in zip(self._attempt.files, placements, strict=True)
            }
            if self._staged.stage(
                self._rank,
                sizes,
                lambda folder: self._write_shards(folder.stage, items, placements),
            ):
                return
        if placements and not self._is_coordinator:  # which has made it already
            self._tier.make()
        self._write_shards(self._tier.write_shard, items, placements)
        if placements:
            self._tier.sync()

    def _write_shards(
        self,
        write: Callable[[str, Iterable[memoryview], int], None],
        items: list[Item],
        placements: list[Placement],
    ) -> None:
        def one(name: str, placement: Placement) -> None:
            try:
                write(name, self._noted(items, placement), placement.size_bytes)
            except StaleCredentials:
                write(name, self._noted(items, placement), placement.size_bytes)

        jobs = list(zip(self._attempt.files, placements, strict=True))
        if len(jobs) == 1:
            one(*jobs[0])
        elif jobs:
            with Crew(self._threads - 1, "checkfreq-write") as crew:  # and this thread
                crew.run_all([functools.partial(one, *job) for job in jobs])

    def _noted(self, items: list[Item], placement: Placement) -> Iterator[memoryview]:
        """Return the pieces of a file; each that the storage asks for is a sign of life of it."""
        made, told_to = pieces(items, placement), self.watchdog or self.in_flight.current
        return made if told_to is None else told_to.noted(made, placement.size_bytes)

    def give_up(self, why: str) -> bool:
        """On any thread: let this save come to nothing, if its storage ever comes back.

        Returns:
            Whether it is too late for that: the commit was begun.
        """
        self._attempt.give_up(SaveFailed(self._tier.location, why))
        return self._attempt.may_be_published

    def abandon(self) -> None:
        """Remove this rank's files of a save that is known to have failed.

        `Checkpointer` calls it on every rank. Does nothing once the files may be part of a
        checkpoint. Errors of the removal are left to the cleaning at the next restore.
        """
        if self._staged is not None and self._attempt.may_delete:
            self._staged.abandon(list(self._attempt.files))
        self._attempt.abandon()

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
            return self._stager.stage(state_dict)
        guards = [guard_of(optimizer) for optimizer in self._overlap]
        addresses = set().union(*(guard.addresses() for guard in guards))
        snapshot = self._stager.begin(self.survey(state_dict), guarded=addresses)
        for guard in guards:
            guard.arm(snapshot)
        return in_flight.staged_by(snapshot.when_done(), self._stager.release)

    def survey(self, state: Mapping[str, Any]) -> Survey:
        """Look at a state, to begin a snapshot of it; see `Stager.survey`."""
        return self._stager.survey(state)

    def begin_snapshot(
        self,
        survey: Survey,
        *,
        only: AbstractSet[str] | None,
        guarded: AbstractSet[Address],
        on_gpu: bool,
        touch_first: bool,
    ) -> Snapshot:
        """Start the snapshot that this writer will write; see `Stager.begin`."""
        return self._stager.begin(
            survey,
            only=only,
            guarded=guarded,
            on_gpu=on_gpu,
            touch_first=touch_first,
        )

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` has copied everything when it returns."""

    def close(self) -> None:
        """Give the snapshot buffers back to the process-wide pool. May be called twice."""
        self._stager.release()
        if self._staged is not None:
            self._staged.close()


@dataclass(frozen=True, slots=True)
class Published:
    """What a save has published: by this it is known again."""

    identity: str  # of its ``.metadata``
    files: Mapping[str, int]  # its shards with their sizes in bytes
    lineage: index.Lineage | None


@dataclass(frozen=True, slots=True)
class _Written:
    """What a rank says to the coordinator."""

    report: RankReport
    on_slow_side: tuple[str, ...]  # files that are complete there already


def _always() -> bool:
    return True


def _nobody(size_bytes: int) -> None:
    """Take note for nobody."""
