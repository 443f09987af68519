"""`CheckFreqReader`: the `StorageReader` that DCP drives through one load."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_checkfreq.dcp.boundary import tells_errors
from dcp_checkfreq.dcp.item_reads import ItemRead, ItemReads
from dcp_checkfreq.dcp.read_metadata import read_metadata
from dcp_checkfreq.dcp.wanted_planner import WantedPlanner
from dcp_checkfreq.errors import (
    BrokenMetadata,
    BrokenShard,
    CheckFreqError,
    LoadFailed,
)
from dcp_checkfreq.format import names
from dcp_checkfreq.format.index import Record
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.ranks.patience import Asking
from dcp_checkfreq.ranks.watchdog import Watchdog
from dcp_checkfreq.runtime import options
from dcp_checkfreq.runtime.clock import SystemClock
from dcp_checkfreq.runtime.gc_paused import collector_held
from dcp_checkfreq.shards.codec import finish_gpu_work
from dcp_checkfreq.shards.fetch import Fetcher
from dcp_checkfreq.shards.shared_read import share
from dcp_checkfreq.shards.targets import TensorTarget
from dcp_checkfreq.staging.staged_tier import StagedTier, StagingDir, staged_folder
from dcp_checkfreq.storage.object_store.options import Options
from dcp_checkfreq.storage.open import Location, can_open, open_tier
from dcp_checkfreq.storage.tier import Tier

_log = logging.getLogger(__name__)

T = TypeVar("T")


class CheckFreqReader(StorageReader):
    """Reads checkpoints of `CheckFreqWriter` and of stock DCP, on any number of ranks.

    Only the rows that this rank needs are read, in few large reads by several threads. Every
    block is checked against its digest before its bytes reach a target tensor. Nothing that the
    checkpoint says is run as code.

    Args:
        path: folder of the checkpoint: path, ``file://`` URL, `Tier`, or what `find_latest_valid`
            returned.
        verify: check digests. Stock checkpoints have none.
        allow_pickle: let byte items run code when they are unpickled. Only for checkpoints whose
            writer you trust.
        allow_dtype_cast: convert tensors that were saved with another dtype; otherwise they are
            an error.
        threads: reads at once; more from a remote storage, which answers late.
        known: what ``.metadata`` says, from `format.metadata.load`, if the caller has read it.
        direct_io: None: past the page cache where the file system can; False: never.
        share_reads: what several ranks want (replicated tensors, values) is read by one of them,
            which sends it to the others over gloo. All ranks must load at the same time.
        agreement: of the ranks that share; default: one is made for each load.
        staging_dir: as the writer has it: shards that still lie on the local disk are read there.
        storage_options: for the file system of a URL; see `CheckFreqWriter`.

    Attributes:
        load_id: of the load, as stock readers have it; new after `reset`.
        bytes_read: what this rank read from storage in the last load, `.metadata` not counted.
        bytes_needed: what it would have had to read at least, by itself.
        bytes_received: what it got from other ranks instead.

    Not thread-safe: one load at a time.
    """

    def __init__(
        self,
        path: Location,
        *,
        verify: bool = True,
        allow_pickle: bool = False,
        allow_dtype_cast: bool = False,
        threads: int = 2,
        known: tuple[Metadata, Record | None] | None = None,
        direct_io: bool | None = None,
        share_reads: bool = False,
        agreement: Ranks | None = None,
        staging_dir: StagingDir | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        options.check(options.READER, locals())
        super().__init__()
        self._direct_io = direct_io
        self._share_reads = share_reads
        self._agreement = agreement
        self._staging_dir = staging_dir
        self._options = Options(storage_options or {})
        self._tier = self._opened(path)
        self._verify = verify
        self._allow_pickle = allow_pickle
        self._allow_dtype_cast = allow_dtype_cast
        self._threads = threads
        self._known = known
        self.watchdog: Watchdog | None = None  # hears what this rank is at
        self.reset()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new load, from ``checkpoint_id`` if given; all other options stay."""
        if checkpoint_id is not None:
            self._tier = self._opened(checkpoint_id)
            self._known = None
        self._metadata = Metadata({})
        self._record: Record | None = None
        self._problem: CheckFreqError | None = None  # why there is no metadata
        self.load_id = names.new_attempt()
        self.bytes_read = 0
        self.bytes_needed = 0
        self.bytes_received = 0

    def _opened(self, path: Location) -> Tier:
        tier = open_tier(path, direct_io=self._direct_io, storage_options=self._options.all())
        return tier if self._staging_dir is None else staged_folder(tier, self._staging_dir)

    @tells_errors(LoadFailed, "reading .metadata")
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read and check ``.metadata``.

        Raises:
            BrokenMetadata, NewerFormat: see `read_metadata`.
        """
        # DCP asks again with a rank when this failed, for checkpoints without a coordinator.
        rank = kwargs.get("rank")
        try:
            metadata, self._record = self._known or self._read_metadata(rank)
        except CheckFreqError as error:
            if rank is None or self._problem is None:
                self._problem = error
                raise
            # Here DCP would drop it for an AssertionError; `set_up_storage_reader` can raise it.
            if not isinstance(error.__cause__, FileNotFoundError):
                self._problem = error
            return Metadata({})
        self._problem = None
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _read_metadata(self, rank: int | None) -> tuple[Metadata, Record | None]:
        name = names.METADATA if rank is None else f"__{rank}{names.METADATA}"
        return read_metadata(self._tier, name)

    # DCP passes rank and use_collectives only to a parameter that is named `kwargs`.
    @tells_errors(LoadFailed, "planning")
    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take over the metadata that `read_metadata` returned.

        Raises:
            BrokenMetadata, NewerFormat: it had none to return, and DCP has asked it twice.
        """
        if self._problem is not None:
            raise self._problem
        if metadata.storage_data is None:
            raise BrokenMetadata(self._tier.location, "it names no items")
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    @tells_errors(LoadFailed, "reading")
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of the plan into the targets that the planner names.

        Raises:
            DtypeDiffers: nothing was loaded.
            UnsafePickle: a byte item needs code; tensors may be loaded already.
            BrokenShard: see there for what became of the targets.
        """
        try:
            return self._read_data(plan, planner)
        except BrokenShard as error:
            if isinstance(planner, WantedPlanner):
                raise error.before_the_state() from error
            raise

    def _read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._share_reads and self._agreement is None:
            self._agreement = Ranks()
            try:
                return self._read_data(plan, planner)
            finally:
                self._agreement.close()
                self._agreement = None
        reads = ItemReads(
            self._metadata,
            self._record,
            self._tier.location,
            verify=self._verify,
            allow_pickle=self._allow_pickle,
            allow_dtype_cast=self._allow_dtype_cast,
        )
        jobs = self._agreed_jobs(reads, plan, planner)
        self.bytes_needed += reads.bytes_needed
        on_gpus = [job.target.tensor for job in jobs if isinstance(job.target, TensorTarget)]
        finish_gpu_work(on_gpus)  # reading threads have streams of their own
        asking = Asking(self._watched_by(), self._failed)
        served = self._from_either(lambda tier: self._share(tier, jobs, asking), jobs)
        own = [job for job in jobs if job.want.ticket not in served]
        self._from_either(lambda tier: self._fetch(tier, jobs, own, asking), own)
        finish_gpu_work(on_gpus)
        for job in jobs:
            reads.hand_over(job, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _agreed_jobs(
        self, reads: ItemReads, plan: LoadPlan, planner: LoadPlanner
    ) -> list[ItemRead]:
        """Return the jobs of this rank; with shared reads, raise if another rank has an error."""

        def jobs() -> list[ItemRead]:
            with collector_held():
                return reads.planned(plan, planner)

        if self._sharing is None:
            return jobs()
        return self._sharing.together("planning reads", jobs, wrap=self._failed)

    def _failed(self, text: str) -> LoadFailed:
        return LoadFailed(self._tier.location, text)

    def _watched_by(self) -> Watchdog:
        """Return who knows whether reads come back; without other ranks nobody gives up."""
        sharing = self._sharing
        if self.watchdog is None and sharing is not None:
            return sharing.watchdog
        return self.watchdog or Watchdog(0, SystemClock())

    @property
    def _sharing(self) -> Ranks | None:
        agreement = self._agreement if self._share_reads else None
        return None if agreement is None or agreement.is_alone else agreement

    def _from_either(self, read: Callable[[Tier], T], jobs: list[ItemRead]) -> T:
        """Read; if local copies are broken, read the remote side instead."""
        if not isinstance(self._tier, StagedTier):
            return read(self._tier)
        try:
            return read(self._tier)
        except BrokenShard as error:
            _log.warning("%s: reading the remote side instead of a local copy", error)
        for job in jobs:
            job.target.start_over()
        return read(self._tier.remote)

    def _share(self, tier: Tier, jobs: list[ItemRead], asking: Asking) -> AbstractSet[int]:
        """Serve what other ranks want too; return the tickets of it."""
        if self._sharing is None:
            return frozenset()
        fetcher = self._fetcher(tier, asking)
        try:
            shared = share(
                self._sharing,
                [job.want for job in jobs],
                [job.target for job in jobs],
                [job.digests for job in jobs],
                [job.key for job in jobs],
                fetcher.fetch,
                asking,
                self._tier.location,
            )
        finally:
            if not asking.is_given_up:  # closing may hang as well
                fetcher.close()
        self.bytes_read += shared.bytes_read
        self.bytes_received += shared.bytes_received
        return shared.tickets

    def _fetch(self, tier: Tier, jobs: list[ItemRead], own: list[ItemRead], asking: Asking) -> None:
        def fetch() -> int:
            with contextlib.closing(self._fetcher(tier, asking)) as fetcher:
                return fetcher.fetch(
                    [job.want for job in own],
                    [job.target for job in jobs],
                    [job.digests for job in jobs],
                    [job.key for job in jobs],
                )

        if self.watchdog is None:
            self.bytes_read += fetch()
        else:
            self.bytes_read += asking.run(fetch, "reading", self._tier.location)

    def _fetcher(self, tier: Tier, asking: Asking) -> Fetcher:
        files = self._record.files if self._record else {}
        return Fetcher(tier, files, self._threads, moved=asking.moved)

    @property
    def checkpoint_id(self) -> str:
        """The folder this reader loads from."""
        return self._tier.location

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this reader could load from ``checkpoint_id``."""
        return can_open(checkpoint_id)
