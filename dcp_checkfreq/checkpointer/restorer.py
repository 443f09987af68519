"""What a run resumes from, and how it gets into the live state."""

from __future__ import annotations

import errno
import functools
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_checkfreq.checkpointer.run import Run
from dcp_checkfreq.dcp.reader import CheckFreqReader
from dcp_checkfreq.dcp.wanted_planner import WantedPlanner
from dcp_checkfreq.errors import (
    BrokenMetadata,
    BrokenShard,
    LoadFailed,
    RankLost,
    RecoveryFailed,
    SaveFailed,
)
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.format.torch_private import dcp_load
from dcp_checkfreq.ranks.patience import Asking
from dcp_checkfreq.recovery.choose import (
    Choice,
    Newcomer,
    choose_newest,
    choose_nothing,
    choose_step,
)
from dcp_checkfreq.recovery.clean import clean_root
from dcp_checkfreq.recovery.files import content_of
from dcp_checkfreq.recovery.lease import RunLease
from dcp_checkfreq.recovery.root_check import is_read_only
from dcp_checkfreq.recovery.root_id import make_root_id
from dcp_checkfreq.recovery.scan import Depth
from dcp_checkfreq.runtime.told import Wrap
from dcp_checkfreq.staging.resume_upload import LocalCopies
from dcp_checkfreq.staging.staged_tier import StagedTier, noted
from dcp_checkfreq.staging.unfinished import Unfinished
from dcp_checkfreq.state.app_state import AppState
from dcp_checkfreq.state.differences import Differences
from dcp_checkfreq.state.restoration import Restoration, Selection, Unexpected
from dcp_checkfreq.storage.tier import Tier

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """What `Checkpointer.restore` put into the state."""

    step: int
    path: str
    world_size: int  # ranks that saved it; 0 if not recorded
    seconds: float  # from the call to the restored state, on this rank
    passed_over: tuple[str, ...]  # newer steps that were not whole, with the reason
    bytes_read: int = 0  # from the storage, by this rank
    bytes_received: int = 0  # from other ranks instead, if reads are shared
    differences: Mapping[str, Differences] = field(
        default_factory=dict
    )  # by part, with strict=False
    left_out: tuple[str, ...] = ()  # parts of the checkpoint that are not registered
    absent: tuple[str, ...] = ()  # optional parts that it does not have


class Restorer:
    """Chooses on rank 0, and loads on all ranks.

    Args:
        run: that restores.
        state: to fill.
        share_reads: see `CheckFreqReader`.
        allow_pickle: unpickle values that run code.
    """

    def __init__(self, run: Run, state: AppState, *, share_reads: bool, allow_pickle: bool) -> None:
        self._root, self._ranks, self._lease, self._clock = (
            run.root,
            run.ranks,
            run.lease,
            run.clock,
        )
        self._threads = run.threads
        self._state = state
        self._copies: LocalCopies | None = None  # what is on the local disks, if they are used
        if isinstance(run.root, StagedTier):
            self._copies = LocalCopies(run.root, run.ranks, threads=run.threads)
            self._copies.belong_to_root()
        self._share_reads = share_reads
        self._allow_pickle = allow_pickle
        self._beside: RunLease | None = None  # another run that may be at work there; on rank 0
        self.bytes_read = self.bytes_received = 0  # of the last load

    def run(
        self,
        step: int | None,
        depth: Depth,
        *,
        fresh_start: bool,
        selection: Selection = Selection(),  # noqa: B008  it is frozen
    ) -> tuple[Choice, Restored | None, Unfinished | None]:
        """Restore, and return what was chosen, and what of it is still to be uploaded.

        See `Checkpointer.restore`.
        """
        started_s = self._clock.monotonic_s()
        broken: dict[str, str] = {}  # on the storage
        refused: dict[str, str] = {}  # on the local disks
        others: set[str] = set()  # runs that may be at work there; on rank 0
        while True:
            unfinished = [] if self._copies is None else self._copies.unfinished(refused)
            choice = self._ranks.on_rank_0(
                functools.partial(
                    self._choose_soon, step, depth, fresh_start, broken, unfinished, others
                ),
                "choosing a checkpoint",
            )
            record = choice.record
            if record is None:
                self._tell_fresh(choice, as_asked=fresh_start)
                self._tidy(unfinished, {})
                return choice, None, None
            local = next((one for one in unfinished if one.record == record), None)
            if local is not None:
                problem = self._make_readable(local)
                if problem is not None:
                    _log.warning("%s on the local disks: %s", record.name, problem)
                    refused[record.name] = problem
                    continue
                if not local.is_at_hand:
                    local = None  # it is published now
            try:
                files, done = self._load(record.name, record.step, local, selection)
            except (BrokenShard, BrokenMetadata) as damage:  # on all ranks
                if local is not None and isinstance(damage, BrokenShard):
                    _log.warning("%s; its upload is not finished", damage)
                    refused[record.name] = damage.why
                    continue
                if step is not None:
                    raise
                _log.warning("%s; trying the next older checkpoint", damage)
                broken[record.name] = damage.why
                continue
            self._tidy(unfinished, {record.name: files})
            seconds = self._clock.monotonic_s() - started_s
            path = os.path.join(self._root.location, record.name)
            if self._ranks.rank == 0:
                _log.info("restored step %d from %s in %.2f s", record.step, path, seconds)
            passed_over = choice.passed_over
            restored = Restored(
                record.step,
                path,
                record.world_size,
                seconds,
                passed_over,
                self.bytes_read,
                self.bytes_received,
                {name: one for name, one in done.differences.items() if one},
                tuple(done.left_out),
                tuple(done.absent),
            )
            return choice, restored, local

    def finish(self, unfinished: Unfinished) -> Callable[[], None]:
        """Return what uploads and publishes what was restored from the local disks.

        All ranks call what is returned, in the background; it raises `SaveFailed`, and then what
        was restored stays on the local disks.
        """
        assert self._copies is not None
        return functools.partial(self._copies.finish, unfinished, self._lease.renew_quietly)

    def _tell_fresh(self, choice: Choice, *, as_asked: bool) -> None:
        if self._ranks.rank != 0:
            return
        steps = sorted(record.step for record in choice.records if record.published)
        if as_asked:
            left = f"steps {steps} are left behind" if steps else "no checkpoint is there"
            _log.info("%s: a fresh start, as asked; %s", self._root.location, left)
        elif self._beside is not None:
            _log.warning(
                "%s: no checkpoint is there: a fresh start, although run %s on %s (pid %d) may "
                "still be at work there. Of two runs in one root only one history counts: stop one",
                *(self._root.location, self._beside.run_id, self._beside.host, self._beside.pid),
            )
        else:
            _log.info("%s: no checkpoint is there: a fresh start", self._root.location)

    def _make_readable(self, one: Unfinished) -> str | None:
        """Check what only the local disks have, and upload it now if a rank cannot read it there.

        Returns:
            None, or on all ranks why it is of no use.
        """
        assert self._copies is not None
        problem = self._copies.verify(one)
        if problem is not None or one.is_at_hand:
            return problem
        if self._ranks.rank == 0:
            _log.info(
                "%s is on the local disks of several nodes: its upload is finished before it is "
                "read",
                one.record.name,
            )
        try:
            self._copies.finish(one, self._lease.renew_quietly)
        except RankLost:
            raise
        except SaveFailed as error:
            return f"its upload could not be finished: {error}"
        return None

    def _tidy(self, unfinished: Sequence[Unfinished], spare: dict[str, frozenset[str]]) -> None:
        """Remove leftovers from this node's disk. What could be finished stays for now."""
        if self._copies is None:
            return
        good = {one.record.name: one.files for one in unfinished if one.record.problem is None}
        self._copies.tidy(spare | good)

    def _choose_soon(self, *given: Any) -> Choice:
        """Return what `_choose` does, or give up: on a storage that does not come back."""
        asking = Asking(
            self._ranks.watchdog, functools.partial(RecoveryFailed, self._root.location)
        )
        root = noted(self._root, asking.moved)
        return asking.run(
            functools.partial(self._choose, root, *given),
            "choosing a checkpoint",
            self._root.location,
        )

    def _choose(
        self,
        root: Tier,
        step: int | None,
        depth: Depth,
        fresh_start: bool,
        broken: dict[str, str],
        unfinished: Sequence[Unfinished],
        others: set[str],
    ) -> Choice:
        """On rank 0: clean up, look, and decide what to go on from."""
        also = [one.record for one in unfinished]
        new = self._newcomer(others)
        self._clean_up(root, frozenset[str]().union(*(one.files for one in unfinished)))
        if fresh_start:
            return choose_nothing(root, new, also)
        if step is not None:
            return choose_step(root, new, step, depth, also)
        choice = choose_newest(root, new, depth, broken, also)
        for text in choice.passed_over:
            _log.warning("%s: passed over %s", self._root.location, text)
        return choice

    def _newcomer(self, others: set[str]) -> Newcomer:
        """Return who begins a history here: each restore is one. The lease tells of the others.

        It may be in the root without a step of its own yet: its first save must not be in the way.
        """
        run_id = uuid.uuid4().hex[:12]
        other = self._lease.begin(run_id)
        if other is not None:
            others.add(other)
        return Newcomer(run_id, frozenset(others))

    def _clean_up(self, root: Tier, spared: frozenset[str]) -> None:
        """Take the lease and remove leftovers. A storage that cannot be written to can be read."""
        self._beside = None
        try:
            holder = self._beside = self._lease.held_by_other()
            if holder is not None:
                _log.warning(
                    "%s: run %s on %s (pid %d) may still be at work there; nothing is cleaned up",
                    *(self._root.location, holder.run_id, holder.host, holder.pid),
                )
                return
        except OSError as error:
            _log.warning(
                "%s: the lease cannot be read, so nothing is cleaned up: %s",
                *(self._root.location, error),
            )
            return
        if not self._take_lease():
            return
        try:
            clean_root(root, now_s=self._clock.wall_s(), spared=spared)
        except OSError as error:
            _log.warning("%s: leftovers stay for now: %s", self._root.location, error)
        try:
            make_root_id(root)
        except OSError as error:
            _log.warning("%s: it has no id for now: %s", self._root.location, error)

    def _take_lease(self) -> bool:
        """Return whether this run may clean up: on a full disk that has to come before the lease.

        Between the two another run may begin; its files are too young to be removed.
        """
        try:
            self._lease.renew()
        except OSError as error:
            if is_read_only(error):
                return False  # said when this run began
            _log.warning("%s: no lease was taken: %s", self._root.location, error)
            return error.errno in (errno.ENOSPC, errno.EDQUOT)
        return True

    def _load(
        self, name: str, step: int, local: Unfinished | None, selection: Selection
    ) -> tuple[frozenset[str], Restoration]:
        """Load a checkpoint into the state; return its files, as far as they are known."""
        folder = self._root.child(name)

        def content() -> bytes:
            if local is not None:
                return local.content
            try:
                return content_of(folder)
            except FileNotFoundError:  # another run's retention, say
                why = "its .metadata was removed since it was found"
                raise BrokenMetadata(folder.location, why) from None

        # Read once for all ranks: on shared file systems others might not see it yet.
        asking = Asking(self._ranks.watchdog, functools.partial(LoadFailed, self._root.location))
        known = self._ranks.on_rank_0(
            lambda: metadata_format.load(
                asking.run(content, "reading .metadata", folder.location), folder.location
            ),
            "reading .metadata",
        )
        wrap = functools.partial(LoadFailed, folder.location)
        with self._ranks.region("making room for what is loaded", wrap=wrap):
            reader = CheckFreqReader(
                folder,
                threads=self._threads,
                known=known,
                share_reads=self._share_reads,
                agreement=self._ranks,
            )
            reader.watchdog = self._ranks.watchdog
            restoration = self._state.restoration(known[0], folder.location, selection)
        self._settle(restoration, wrap)
        with self._ranks.dcp("loading", folder.location, wrap=wrap):
            dcp_load(
                {"wanted": None},  # the planner knows what is; DCP refuses an empty one
                storage_reader=reader,
                planner=WantedPlanner(restoration.wanted, allow_pickle=self._allow_pickle),
                process_group=self._ranks.group,
                no_dist=self._ranks.is_alone,
            )
        self.bytes_read, self.bytes_received = reader.bytes_read, reader.bytes_received
        self._put_back(restoration, step, wrap)
        return frozenset(known[1].files if known[1] is not None else ()), restoration

    def _settle(self, restoration: Restoration, wrap: Wrap) -> None:
        """Find out what of the checkpoint no rank has a place for."""
        found = self._ranks.combine(
            "comparing parts", restoration.unexpected, Unexpected.of_all, wrap=wrap
        )
        with self._ranks.region("comparing parts", wrap=wrap):
            restoration.settle(found)

    def _put_back(self, restoration: Restoration, step: int, wrap: Wrap) -> None:
        """Put what was loaded into the live state, on all ranks, or leave all as it was."""
        with self._ranks.region("comparing what was loaded", wrap=wrap):
            restoration.check()
        self._settle(restoration, wrap)
        # The outer one, so that another rank's error puts back this one's parts, too.
        with (
            restoration.undone_if_it_fails(),
            self._ranks.region("putting back what was loaded", wrap=wrap),
        ):
            restoration.put_where_it_may_fail(step)
        with self._ranks.region("putting back what was loaded", wrap=wrap):
            restoration.put_the_rest()
        if self._ranks.rank == 0:
            restoration.tell()
