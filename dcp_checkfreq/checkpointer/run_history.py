"""The steps of this run on storage: where it comes from, what it keeps, where it saves next."""

from __future__ import annotations

import functools
import logging
from collections import deque

from dcp_checkfreq.checkpointer.run import Run
from dcp_checkfreq.dcp.rank_save import OfRun
from dcp_checkfreq.dcp.writer import CheckFreqWriter
from dcp_checkfreq.errors import RecoveryFailed, SaveFailed, StepsExist, WriteFailed
from dcp_checkfreq.format import names
from dcp_checkfreq.format.index import Lineage
from dcp_checkfreq.ranks.patience import Asking
from dcp_checkfreq.recovery.choose import Choice
from dcp_checkfreq.recovery.clean import KnownSteps, delete_step
from dcp_checkfreq.recovery.kept import Kept, problem_of
from dcp_checkfreq.recovery.plan import leaves
from dcp_checkfreq.recovery.retention import Retention, select_expired
from dcp_checkfreq.recovery.root_id import readable_id_of_root
from dcp_checkfreq.recovery.root_watch import RootWatch
from dcp_checkfreq.recovery.scan import examine, scan
from dcp_checkfreq.staging.staged_tier import noted

_log = logging.getLogger(__name__)


class RunHistory:
    """What a run may write, replace and delete under its root.

    Args:
        run: whose steps they are.
        rule: what to keep.
    """

    def __init__(self, run: Run, rule: Retention) -> None:
        self._run, self._root, self._rule = run, run.root, rule
        self._lineage: Lineage | None = None  # known once it is clear what this run resumes from
        self._kept: dict[int, Kept] = {}  # on rank 0: what retention looks after
        # By step: the save that is cleaned up after, and the one that is in flight by then.
        self._writers: deque[tuple[int, CheckFreqWriter]] = deque(maxlen=2)
        self._watch = RootWatch(run.root)  # on rank 0

    def go_on_from(self, choice: Choice) -> None:
        """Take note of what was restored, or that the run starts from nothing."""
        self._kept = {
            step: Kept(record.name, record.identity) for step, record in choice.kept.items()
        }
        self._lineage = choice.lineage
        self._watch.begin(choice.root_id, choice.records)

    def writer(self, step: int) -> CheckFreqWriter:
        """Return a writer for this step. With no save in flight: it may ask the other ranks.

        Except in a run that has restored nothing, storage is not touched.

        Raises:
            StepsExist: the run has restored nothing, and the root holds another run's steps.
        """
        if self._lineage is None:
            self._run.ranks.on_rank_0(self._refuse_foreign_steps)
            self._lineage = Lineage(run_id=self._run.id)
        writer = CheckFreqWriter(
            self._root.child(names.step_folder(step)),
            threads=self._run.threads,
            allow_pickle=True,  # the planner of a `Checkpointer` has looked at every value
            clock=self._run.clock,
            _of_run=OfRun(
                lineage=self._lineage,
                uploads_later=True,
                may_replace=functools.partial(self._is_replaceable, step, self._lineage),
                check_root=functools.partial(self._check_root, self._lineage, step),
            ),
        )
        self._writers.append((step, writer))
        return writer

    def _check_root(self, lineage: Lineage, step: int) -> None:
        """Make sure that a save of ``step`` would be found again, and touches nothing else.

        Raises:
            SaveFailed: it would not, or it would.
        """
        self._watch.check(lineage, step)
        name = names.step_folder(step)
        if name not in self._watch.links:
            return
        where = f"{self._root.location}/{name}"
        if not self._is_replaceable(step, lineage):
            raise SaveFailed(
                where,
                "it is a link, and what it leads to is not this run's to change. Remove the link",
            )
        _log.warning("%s is a link: it is removed, what it leads to stays as it is", where)
        try:
            self._root.delete(name)
            self._root.sync()
        except OSError as error:
            raise WriteFailed(where, f"the link cannot be removed: {error}") from error

    def _refuse_foreign_steps(self) -> None:
        asking = Asking(
            self._run.ranks.watchdog, functools.partial(RecoveryFailed, self._root.location)
        )
        root = noted(self._root, asking.moved)
        records = asking.run(lambda: scan(root), "looking for steps", self._root.location)
        self._watch.begin(readable_id_of_root(self._root), records)
        whole = sorted(record.step for record in records if record.problem is None)
        if whole:
            raise StepsExist(
                self._root.location,
                f"it holds steps {whole} of another run. Call restore() before saving, with "
                "fresh_start=True if this run is to start from nothing",
            )

    def _is_replaceable(self, step: int, lineage: Lineage) -> bool:
        """Tell whether the checkpoint that is already there is damaged or was left behind.

        It reads from storage: not on the training thread.
        """
        name = names.step_folder(step)
        folder = self._root.child(name)
        try:
            record = examine(folder, name, step)
        except OSError as error:
            raise WriteFailed(folder.location, f"it cannot be looked at: {error}") from error
        return record.published and (leaves(lineage, record) or record.problem is not None)

    def apply_retention(self, step: int) -> None:
        """On rank 0: remove old checkpoints. Never raises: the new one is published."""
        try:
            self._kept[step] = self._as_published(step)
            expired = self._expired()
        except OSError as error:
            _log.warning("%s: old checkpoints stay for now: %s", self._root.location, error)
            return
        for old in expired:
            self._delete(old)

    def _as_published(self, step: int) -> Kept:
        name = names.step_folder(step)
        for saved, writer in reversed(self._writers):  # a restore may have led here once more
            published = writer.rank_save.published
            if saved == step and published is not None:
                self._watch.saved(published.lineage, step, published.identity)
                return Kept(name, published.identity, published.files)
        # Saved by an earlier process, and finished by this one.
        return Kept(name, examine(self._root.child(name), name, step).identity)

    def _expired(self) -> list[int]:
        """Return what may go, oldest first. What stays in its place was found whole just now."""
        while True:
            expired = select_expired(self._kept, self._rule)
            if not expired:
                return []
            newest = sorted(self._kept.keys() - set(expired))[-self._rule.keep_last :]
            problems = {step: problem_of(self._root, step, self._kept[step]) for step in newest}
            if not any(problems.values()):
                return expired
            for step, problem in problems.items():
                if problem is not None:
                    _log.warning(
                        "%s/%s does not count among those that are kept: %s",
                        *(self._root.location, self._kept[step].name, problem),
                    )
                    del self._kept[step]

    def _delete(self, step: int) -> None:
        """Delete a checkpoint if it is still the one that is known. One that resists stays."""
        name = self._kept[step].name
        known = KnownSteps(self._root, {kept.name: kept.identity for kept in self._kept.values()})
        try:
            if not delete_step(known, name):
                _log.warning(
                    "%s/%s was replaced by another run, or cannot be read: it stays",
                    *(self._root.location, name),
                )
        except OSError as error:
            _log.warning("%s/%s stays for now: %s", self._root.location, name, error)
            return
        del self._kept[step]
