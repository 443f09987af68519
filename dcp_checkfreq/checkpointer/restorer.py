"""What a run resumes from, and how it gets into the live state."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from dcp_checkfreq.checkpointer.run import Run
from dcp_checkfreq.checkpointer.state_loader import Loaded, StateLoader
from dcp_checkfreq.errors import (
    BrokenMetadata,
    BrokenShard,
    RankLost,
    RecoveryFailed,
    SaveFailed,
)
from dcp_checkfreq.ranks.patience import Asking
from dcp_checkfreq.recovery.choose import (
    Choice,
    Newcomer,
    choose_newest,
    choose_nothing,
    choose_step,
)
from dcp_checkfreq.recovery.lease import RunLease
from dcp_checkfreq.recovery.plan import StepRecord
from dcp_checkfreq.recovery.scan import Depth
from dcp_checkfreq.recovery.take_over import take_over
from dcp_checkfreq.staging.resume_upload import LocalCopies
from dcp_checkfreq.staging.staged_tier import StagedTier, noted
from dcp_checkfreq.staging.unfinished import Unfinished
from dcp_checkfreq.state.app_state import AppState
from dcp_checkfreq.state.differences import Differences
from dcp_checkfreq.state.restoration import Selection
from dcp_checkfreq.storage.tier import Tier

_log = logging.getLogger(__name__)

T = TypeVar("T")


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


class _CopyIsUseless(Exception):
    """What the local disks have of a save cannot be restored. Not seen outside of here."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Restorer:
    """Cleans up and chooses on rank 0, and loads on all ranks.

    Args:
        run: that restores.
        state: to fill.
        share_reads: see `CheckFreqReader`.
        allow_pickle: unpickle values that run code.
    """

    def __init__(self, run: Run, state: AppState, *, share_reads: bool, allow_pickle: bool) -> None:
        self._root, self._ranks, self._lease = run.root, run.ranks, run.lease
        self._clock = run.clock
        self._loader = StateLoader(run, state, share_reads=share_reads, allow_pickle=allow_pickle)
        self._copies: LocalCopies | None = None  # what is on the local disks, if they are used
        self._other_run: RunLease | None = None  # that may be at work there; on rank 0
        if isinstance(run.root, StagedTier):
            self._copies = LocalCopies(run.root, run.ranks, threads=run.threads)
            self._copies.belong_to_root()

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
        broken: dict[str, str] = {}  # on the storage, by name
        refused: dict[str, str] = {}  # on the local disks
        unfinished = self._unfinished(refused)
        new = self._take_over(unfinished)
        while True:
            choice = self._choose(new, step, depth, fresh_start, broken, unfinished)
            record = choice.record
            if record is None:
                self._tell_fresh(choice, as_asked=fresh_start)
                self._tidy(unfinished, {})
                return choice, None, None
            try:
                loaded, local = self._try(record, unfinished, selection)
            except _CopyIsUseless as copy:  # on all ranks
                refused[record.name] = copy.why
            except (BrokenShard, BrokenMetadata) as damage:  # on all ranks
                if step is not None:
                    raise
                _log.warning("%s; trying the next older checkpoint", damage)
                broken[record.name] = damage.why
            else:
                self._tidy(unfinished, {record.name: loaded.files})
                return choice, self._restored(choice, record, loaded, started_s), local
            unfinished = self._unfinished(refused)

    def _take_over(self, unfinished: Sequence[Unfinished]) -> Newcomer:
        """Clean up, on rank 0; return who begins a history here: each restore is one."""
        spared = frozenset[str]().union(*(one.files for one in unfinished))

        def clean(root: Tier) -> Newcomer:
            new, self._other_run = take_over(
                root, self._lease, now_s=self._clock.wall_s(), spared=spared
            )
            return new

        return self._on_storage(clean)

    def _choose(
        self,
        new: Newcomer,
        step: int | None,
        depth: Depth,
        fresh_start: bool,
        broken: Mapping[str, str],
        unfinished: Sequence[Unfinished],
    ) -> Choice:
        """Look, on rank 0, and decide what to resume from."""
        also = [one.record for one in unfinished]

        def choose(root: Tier) -> Choice:
            if fresh_start:
                return choose_nothing(root, new, also)
            if step is not None:
                return choose_step(root, new, step, depth, also)
            choice = choose_newest(root, new, depth, broken, also)
            for text in choice.passed_over:
                _log.warning("%s: passed over %s", self._root.location, text)
            return choice

        return self._on_storage(choose)

    def _on_storage(self, work: Callable[[Tier], T]) -> T:
        """Call ``work`` with the root on rank 0, or give up: on a storage that does not come back.

        Returns:
            What it returned, on all ranks.
        """
        doing, where = "choosing a checkpoint", self._root.location

        def patiently() -> T:
            asking = Asking(self._ranks.watchdog, functools.partial(RecoveryFailed, where))
            root = noted(self._root, asking.moved)
            return asking.run(lambda: work(root), doing, where)

        return self._ranks.on_rank_0(patiently, doing)

    def _try(
        self, record: StepRecord, unfinished: Sequence[Unfinished], selection: Selection
    ) -> tuple[Loaded, Unfinished | None]:
        """Load a checkpoint into the state; return also what of it is still to be uploaded.

        Raises:
            _CopyIsUseless: it is on the local disks only, and damaged there.
            BrokenShard: it is damaged.
            BrokenMetadata: it is damaged.
        """
        local = next((one for one in unfinished if one.record == record), None)
        if local is not None:
            self._make_readable(local)
            if not local.is_at_hand:
                local = None  # it is published now
        content = None if local is None else local.content
        try:
            return self._loader.load(record.name, record.step, content, selection), local
        except BrokenShard as damage:
            if local is None:
                raise
            _log.warning("%s; its upload is not finished", damage)
            raise _CopyIsUseless(damage.why) from damage

    def _restored(
        self, choice: Choice, record: StepRecord, loaded: Loaded, started_s: float
    ) -> Restored:
        seconds = self._clock.monotonic_s() - started_s
        path = os.path.join(self._root.location, record.name)
        if self._ranks.rank == 0:
            _log.info("restored step %d from %s in %.2f s", record.step, path, seconds)
        done = loaded.restoration
        return Restored(
            record.step,
            path,
            record.world_size,
            seconds,
            choice.passed_over,
            loaded.bytes_read,
            loaded.bytes_received,
            {name: one for name, one in done.differences.items() if one},
            tuple(done.left_out),
            tuple(done.absent),
        )

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
        other = self._other_run
        steps = sorted(record.step for record in choice.records if record.published)
        if as_asked:
            left = f"steps {steps} are left behind" if steps else "no checkpoint is there"
            _log.info("%s: a fresh start, as asked; %s", self._root.location, left)
        elif other is not None:
            _log.warning(
                "%s: no checkpoint is there: a fresh start, although run %s on %s (pid %d) may "
                "still be at work there. Of two runs in one root only one history counts: stop one",
                *(self._root.location, other.run_id, other.host, other.pid),
            )
        else:
            _log.info("%s: no checkpoint is there: a fresh start", self._root.location)

    def _unfinished(self, refused: Mapping[str, str]) -> Sequence[Unfinished]:
        return [] if self._copies is None else self._copies.unfinished(refused)

    def _make_readable(self, one: Unfinished) -> None:
        """Check what only the local disks have, and upload it now if a rank cannot read it there.

        Raises:
            _CopyIsUseless: it is of no use; on all ranks.
        """
        assert self._copies is not None
        problem = self._copies.verify(one)
        if problem is None and not one.is_at_hand:
            if self._ranks.rank == 0:
                _log.info(
                    "%s is on the local disks of several nodes: its upload is finished before it "
                    "is read",
                    one.record.name,
                )
            try:
                self._copies.finish(one, self._lease.renew_quietly)
            except RankLost:
                raise
            except SaveFailed as error:
                problem = f"its upload could not be finished: {error}"
        if problem is not None:
            _log.warning("%s on the local disks: %s", one.record.name, problem)
            raise _CopyIsUseless(problem)

    def _tidy(self, unfinished: Sequence[Unfinished], spare: dict[str, frozenset[str]]) -> None:
        """Remove leftovers from this node's disk. What could be finished stays for now."""
        if self._copies is None:
            return
        good = {one.record.name: one.files for one in unfinished if one.record.problem is None}
        self._copies.tidy(spare | good)
