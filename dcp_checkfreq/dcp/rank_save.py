"""One save of one rank, whoever drives it: DCP through `CheckFreqWriter`, then `Checkpointer`."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from dcp_checkfreq.commit.assemble import assemble
from dcp_checkfreq.commit.attempt import SaveAttempt, new_attempt
from dcp_checkfreq.commit.phases import Phase
from dcp_checkfreq.commit.publish import publish
from dcp_checkfreq.commit.standing import standing
from dcp_checkfreq.dcp.unsettled import remember, sweep_up
from dcp_checkfreq.errors import PublishUnknown, SaveFailed, WriteFailed
from dcp_checkfreq.format import index, names
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.format.digest import identity
from dcp_checkfreq.format.texts import plain
from dcp_checkfreq.recovery.files import is_published, named_in
from dcp_checkfreq.runtime import version
from dcp_checkfreq.runtime.clock import Clock
from dcp_checkfreq.runtime.crew import Crew
from dcp_checkfreq.runtime.gc_paused import collector_held
from dcp_checkfreq.shards.assign import Placement
from dcp_checkfreq.shards.codec import Item, pieces
from dcp_checkfreq.shards.layout import RankReport
from dcp_checkfreq.staging.staged_save import StagedSave
from dcp_checkfreq.staging.staged_tier import StagedTier, Upload
from dcp_checkfreq.storage.tier import StaleCredentials, Tier


@dataclass(frozen=True, slots=True)
class OfRun:
    """What the run that saves says of it; plain DCP has no run.

    Attributes:
        lineage: the run, and the steps it goes back to.
        uploads_later: `RankSave.finish` commits on the local disks only; the caller goes on with
            `start_upload`, `publish_uploaded` and `settle`.
        may_replace: asked on the coordinator when a checkpoint is there, early and again right
            before the commit: a damaged one, or one that was left behind, may be replaced.
        check_root: called on the coordinator, early and again right before the commit; what it
            raises fails the save.
    """

    lineage: index.Lineage | None = None
    uploads_later: bool = False
    may_replace: Callable[[], bool] | None = None
    check_root: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """What a save has published: by this it is known again."""

    identity: str  # of its ``.metadata``
    files: Mapping[str, int]  # its shards with their sizes in bytes
    lineage: index.Lineage | None


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank says to the coordinator."""

    report: RankReport
    on_remote: tuple[str, ...]  # files that are complete there already


class SignsOfLife(Protocol):
    """Hears that the storage does something."""

    def noted(self, pieces: Iterable[memoryview], size_bytes: int) -> Iterator[memoryview]:
        """Return the pieces of a file; each that is asked for is a sign of life."""
        ...


class RankSave:
    """The files of this rank, the local disk in front of them, and on the coordinator the commit.

    Not thread-safe, but for `give_up`.

    Args:
        tier: folder of the checkpoint.
        of_run: what the run says.
        threads: files that are written at once.
        clock: for waiting.
    """

    def __init__(self, tier: Tier, of_run: OfRun, *, threads: int, clock: Clock) -> None:
        self.attempt: SaveAttempt = new_attempt(tier)
        self.published: Published | None = None
        self.rank = 0
        self.world_size = 1
        self.is_coordinator = False
        self._tier = tier
        self._of_run = of_run
        self._threads = threads
        self._clock = clock
        self._to_publish: tuple[bytes, Mapping[str, int]] = b"", {}
        self._staged: StagedSave | None = None
        if isinstance(tier, StagedTier):
            self._staged = StagedSave(tier, self.attempt.id, threads=threads)

    @property
    def location(self) -> str:
        """Where the checkpoint will be."""
        return self._tier.location

    @property
    def meta(self) -> StorageMeta:
        """Name of the checkpoint and the attempt for DCP's logs and metadata."""
        return StorageMeta(checkpoint_id=plain(self.location), save_id=self.attempt.id)

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        """Name this rank in errors of the storage."""
        try:
            yield
        except OSError as error:
            raise WriteFailed(self.location, f"rank {self.rank}: {error}") from error

    @contextlib.contextmanager
    def _abandoned_on_errors(self) -> Iterator[None]:
        """Abandon the save for whatever is raised."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    # --- before anything is written, on the coordinator ---

    def check(self) -> None:
        """Make sure that this save can be kept.

        Raises:
            CheckpointExists: a whole checkpoint is there, which may not be replaced.
            WriteFailed: the storage failed.
        """
        if self._of_run.check_root is not None:
            self._of_run.check_root()
        with self._storage_errors():
            sweep_up(self._tier)
            if is_published(self._tier) and not self._may_replace():
                raise standing(self._tier)

    def _may_replace(self) -> bool:
        return self._of_run.may_replace is not None and self._of_run.may_replace()

    def reserve(self) -> None:
        """Reserve the commit: every rank has planned, and none has begun to write.

        Raises:
            WriteFailed: the storage failed.
        """
        with self._storage_errors():
            self.attempt.reserve()
        remember(self.attempt)

    # --- writing ---

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Write in here: whatever is raised removes this rank's files.

        Raises:
            WriteFailed: the storage failed.
        """
        with self._abandoned_on_errors(), self._storage_errors():
            self.attempt.begin()
            yield
        self.attempt.wrote()

    def write_files(
        self, items: list[Item], placements: Sequence[Placement], signs: SignsOfLife | None
    ) -> list[str]:
        """Write one file for each placement, durably; return their names.

        Args:
            items: of this rank.
            placements: in files.
            signs: hears of the storage's.

        Raises:
            OSError: of the storage.
        """
        files = [
            names.shard_file(self.rank, number, self.attempt.id)
            for number in range(len(placements))
        ]
        self.attempt.files = files
        if not files:
            return files

        def write_by(write: Callable[[str, Iterable[memoryview], int], None]) -> None:
            def one(name: str, placement: Placement) -> None:
                def made() -> Iterator[memoryview]:
                    some = pieces(items, placement)
                    return some if signs is None else signs.noted(some, placement.size_bytes)

                try:
                    write(name, made(), placement.size_bytes)
                except StaleCredentials:
                    write(name, made(), placement.size_bytes)

            self._side_by_side(
                [
                    functools.partial(one, name, placement)
                    for name, placement in zip(files, placements, strict=True)
                ]
            )

        if self._staged is not None:
            sizes = {
                name: placement.size_bytes
                for name, placement in zip(files, placements, strict=True)
            }
            if self._staged.stage(self.rank, sizes, lambda folder: write_by(folder.stage)):
                self.attempt.staged()
                return files
        if not self.is_coordinator:  # which has made it already
            self._tier.make()
        write_by(self._tier.write_shard)
        self._tier.sync()
        return files

    def _side_by_side(self, jobs: Sequence[Callable[[], None]]) -> None:
        if len(jobs) == 1:
            jobs[0]()
        else:
            with Crew(self._threads - 1, "checkfreq-write") as crew:  # and this thread
                crew.run_all(jobs)

    def upload_now(self, moved: Callable[[int], None]) -> None:
        """Bring what lies on the local disk to the remote side, if nobody does so later.

        Args:
            moved: see `StagedTier.upload`.

        Raises:
            WriteFailed: the storage failed; this rank's files were removed.
        """
        if self._staged is None or self.uploads_later:
            return
        with self._abandoned_on_errors(), self._storage_errors():
            self._staged.upload(moved)
        self.attempt.uploaded()
        if not self.is_coordinator:
            self._staged.close()  # DCP does not tell this rank how the save ends

    def written(self, report: RankReport) -> Written:
        """Return what this rank says to the coordinator."""
        is_on_remote = self.attempt.phase is Phase.WRITTEN
        return Written(report, tuple(self.attempt.files) if is_on_remote else ())

    # --- the commit, on the coordinator ---

    def finish(self, metadata: Metadata, written: Sequence[Written]) -> None:
        """Publish the checkpoint, or commit on the local disks what is uploaded later.

        Args:
            metadata: of DCP.
            written: what all ranks say.

        Raises:
            ItemsMissing: something planned was not written; nothing was published.
            SaveFailed: a file is gone that a rank had written; nothing was published.
            CheckpointExists: another writer published first.
            PublishUnknown: the storage gave no clear answer; nothing was deleted.
        """
        files = {name: size for one in written for name, size in one.report.files.items()}
        try:
            content = self._metadata_file(metadata, written, files)
            if self._staged is not None and self._of_run.uploads_later:
                self._staged.commit(content, {name for one in written for name in one.on_remote})
                self._to_publish = content, files
            else:
                self._publish(content, files)
        except PublishUnknown:
            raise
        except BaseException as error:
            if self.attempt.may_be_published:  # every rank must hear that: they delete their files
                raise PublishUnknown(self.location, f"interrupted by {error!r}") from error
            self.abandon()
            raise
        if not self.uploads_later:
            self.settle()

    def _metadata_file(
        self, metadata: Metadata, written: Sequence[Written], files: Mapping[str, int]
    ) -> bytes:
        with collector_held():
            columns = assemble(metadata, [one.report for one in written], self.location)
            metadata.storage_meta = self.meta
            record = index.Record(
                attempt=self.attempt.id,
                world_size=self.world_size,
                step=names.parse_step(os.path.basename(self.location)),
                lineage=self._of_run.lineage,
                written_by=version.WRITTEN_BY,
                files=dict(files),
                columns=columns,
            )
            return metadata_format.dump(metadata, record)

    def _publish(self, content: bytes, files: Mapping[str, int]) -> None:
        if self._of_run.check_root is not None:
            self._of_run.check_root()
        replaced = self.attempt.commit(
            lambda reservation: publish(
                self._tier,
                content,
                reservation=reservation,
                files=files,
                may_replace=self._of_run.may_replace,
                clock=self._clock,
            )
        )
        self.published = Published(identity(content), files, self._of_run.lineage)
        if replaced is not None:
            named = named_in(replaced, self.location) or frozenset()
            self.attempt.remove(sorted(named - files.keys()))

    # --- what follows if the upload comes later ---

    @property
    def uploads_later(self) -> bool:
        """Whether something is left to do when DCP's save has returned; the same on all ranks."""
        return self._staged is not None and self._of_run.uploads_later

    def start_upload(self) -> Upload:
        """On every rank, once DCP's save has returned: start to copy to the remote side."""
        assert self._staged is not None
        self.attempt.all_staged()
        return self._staged.start_upload()

    def publish_uploaded(self) -> None:
        """On the coordinator, once the uploads of all ranks are complete: publish.

        Raises:
            SaveFailed, PublishUnknown: as `finish`.
        """
        self.attempt.uploaded()
        self._publish(*self._to_publish)

    def settle(self) -> None:
        """On every rank, once it is known that the save is published."""
        if self._staged is not None:
            self._staged.settle()

    # --- the end ---

    def give_up(self, why: str) -> bool:
        """On any thread: let this save come to nothing, if its storage ever comes back.

        Returns:
            Whether it is too late for that: the commit was begun.
        """
        self.attempt.give_up(SaveFailed(self.location, why))
        return self.attempt.may_be_published

    def abandon(self) -> None:
        """Remove this rank's files of a save that is known to have failed.

        Does nothing once the files may be part of a checkpoint. Errors of the removal are left to
        the cleaning at the next restore.
        """
        if self._staged is not None and self.attempt.may_delete:
            if self.attempt.may_resume:
                self._staged.leave(list(self.attempt.files))
            else:
                self._staged.abandon()
        self.attempt.abandon()

    def close(self) -> None:
        """Let go of the local disk. May be called twice."""
        if self._staged is not None:
            self._staged.close()
