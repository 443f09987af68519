"""The steps of this run on storage: where it comes from, what it keeps, where it saves next."""

from __future__ import annotations

import functools
import logging

from dcp_checkfreq.agreement import Agreement
from dcp_checkfreq.clock import Clock
from dcp_checkfreq.errors import StepsExist, WriteFailed
from dcp_checkfreq.format import names
from dcp_checkfreq.format.index import Lineage
from dcp_checkfreq.policy.retention import Retention, select_expired
from dcp_checkfreq.recovery.choose import Choice
from dcp_checkfreq.recovery.clean import delete_step
from dcp_checkfreq.recovery.plan import leaves
from dcp_checkfreq.recovery.scan import examine, scan
from dcp_checkfreq.storage.tier import Tier
from dcp_checkfreq.writer import CheckFreqWriter

_log = logging.getLogger(__name__)


class OwnSteps:
    """What a run may write, replace and delete under its root.

    Args:
        root: folder of the run.
        agree: of the ranks.
        run_id: of this run, for what it saves before it restores: each restore makes a new one.
        rule: what to keep.
        threads: shard files that a rank writes at once.
        clock: for what copies cost.
    """

    def __init__(
        self,
        root: Tier,
        agree: Agreement,
        run_id: str,
        rule: Retention,
        *,
        threads: int,
        clock: Clock,
    ) -> None:
        self._root = root
        self._agree = agree
        self._run_id = run_id
        self._rule = rule
        self._threads = threads
        self._clock = clock
        self._lineage: Lineage | None = None  # known once it is clear what this run goes on from
        self._kept: dict[int, str] = {}  # on rank 0: what retention looks after

    def go_on_from(self, choice: Choice) -> None:
        """Take note of what was restored, or that the run starts from nothing."""
        self._kept = choice.kept
        self._lineage = choice.lineage

    def writer(self, step: int) -> CheckFreqWriter:
        """Return a writer for this step. With no save in flight: it may ask the other ranks.

        Except in a run that has restored nothing, storage is not touched.

        Raises:
            StepsExist: the run has restored nothing, and the root holds another run's steps.
        """
        if self._lineage is None:
            self._agree.decide(self._refuse_foreign_steps)
            self._lineage = Lineage(run_id=self._run_id)
        return CheckFreqWriter(
            self._root.child(names.step_folder(step)),
            threads=self._threads,
            lineage=self._lineage,
            uploads_later=True,
            may_replace=functools.partial(self._is_replaceable, step, self._lineage),
            clock=self._clock,
        )

    def _refuse_foreign_steps(self) -> None:
        whole = sorted(record.step for record in scan(self._root) if record.problem is None)
        if whole:
            raise StepsExist(
                self._root.location,
                f"it holds steps {whole} of another run. Call restore() before saving, with "
                "fresh_start=True if this run is to start from nothing",
            )

    def _is_replaceable(self, step: int, lineage: Lineage) -> bool:
        """Tell whether the checkpoint that is in the way is damaged or was left behind.

        It reads from storage: not on the training thread.
        """
        name = names.step_folder(step)
        folder = self._root.child(name)
        try:
            record = examine(folder, name, step)
        except OSError as error:
            raise WriteFailed(folder.location, f"it cannot be looked at: {error}") from error
        return record.published and (leaves(lineage, record) or record.problem is not None)

    def published(self, step: int) -> None:
        """On rank 0: let old checkpoints go. Never raises: the new one is published."""
        self._kept[step] = names.step_folder(step)
        try:
            for expired in select_expired(self._kept, self._rule):
                delete_step(self._root, self._kept[expired])
                del self._kept[expired]
        except OSError as error:
            _log.warning("%s: old checkpoints stay for now: %s", self._root.location, error)
