"""What others do in a root while a run is at work there: a look before a save is kept.

A run that is forgotten goes on saving. If another one has gone back to an earlier step meanwhile,
or has made the root anew, nothing of what the first one saves would ever be restored; its next
save must say so.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dcp_checkfreq.errors import LeftBehind, LoadFailed, WriteFailed
from dcp_checkfreq.format import names
from dcp_checkfreq.format.digest import identity
from dcp_checkfreq.format.index import Lineage
from dcp_checkfreq.recovery.files import content_of
from dcp_checkfreq.recovery.plan import StepRecord, left_by, record_of
from dcp_checkfreq.recovery.root_id import id_of_root, make_root_id
from dcp_checkfreq.recovery.scan import examine
from dcp_checkfreq.storage.tier import Tier, disk_of

_log = logging.getLogger(__name__)

_LOOKS_AGAIN = 4  # known folders that one look lists anew: bounds what a look costs


@dataclass(frozen=True, slots=True)
class _Seen:
    """A step folder as it was when it was looked into last."""

    record: StepRecord
    looked: int = 0  # number of the look
    folder_modified_s: float | None = None  # None: as it will be found by the next look
    commit: tuple[int, float] | None = None  # size and time of ``.metadata``; never decide alone


class RootWatch:
    """Looks into a root on behalf of one run. On rank 0, by one thread at a time.

    Folders that are new are examined. Of those that are known, the ones that have changed by their
    time come first, then the ones whose last look is the longest ago, a few at each look: storages
    without times for folders tell of no change.
    """

    def __init__(self, root: Tier) -> None:
        self._root = root
        self._root_id: str | None = None
        self._disk: int | None = None  # that held the root when its id was there
        self._seen: dict[str, _Seen] = {}
        self._looks = 0
        self.links: frozenset[str] = frozenset()  # steps that were links at the last look

    def begin(self, root_id: str | None, records: Iterable[StepRecord]) -> None:
        """Start anew with what a scan has found just now. Touches nothing."""
        self._root_id = root_id
        with contextlib.suppress(OSError):
            self._disk = disk_of(self._root)
        self._seen = {record.name: _Seen(record) for record in records}

    def saved(self, history: Lineage | None, step: int, content_identity: str) -> None:
        """Take note of what this run itself has published: it need not be decoded."""
        if history is not None:
            record = record_of(history, step, content_identity)
            self._seen[record.name] = _Seen(record, self._looks)

    def check(self, history: Lineage, step: int) -> None:
        """Make sure that the next restore would take ``step`` of ``history`` for what it is.

        Raises:
            LeftBehind: it would not.
            WriteFailed: the root cannot be looked at.
        """
        where = f"{self._root.location}: step {step}"
        try:
            self._check_root_id(where)
            records = self._look()
        except OSError as error:
            raise WriteFailed(where, f"the root cannot be looked at: {error}") from error
        by = left_by(history, step, records)
        if by is not None:
            raise LeftBehind(where, _why(history, by))

    def _check_root_id(self, where: str) -> None:
        found = id_of_root(self._root)
        if found is None:
            if self._root_id is not None:
                self._check_disk(where)
                _log.warning(
                    "%s: %s/%s is gone and is made again. Was the root emptied?",
                    *(self._root.location, names.RUN_FOLDER, names.ROOT_ID),
                )
            found = make_root_id(self._root, self._root_id)
        self._root_id = self._root_id or found
        if found != self._root_id:
            raise LeftBehind(
                where,
                "the root was removed, or moved away, and another job has made a new one in its "
                f"place (its id is {found}, it was {self._root_id}). Nothing is saved among that "
                "job's steps: stop this job, or start it again with a root of its own",
            )
        self._disk = disk_of(self._root)  # of one that was mounted again it may be another number

    def _check_disk(self, where: str) -> None:
        """Refuse a root that is empty because what was mounted there is gone."""
        if self._disk not in (None, disk_of(self._root)):
            raise WriteFailed(
                where,
                f"{names.RUN_FOLDER}/{names.ROOT_ID} is gone, and the root lies on another disk "
                "than before. Is its mount gone? What is saved below a mount point cannot be "
                "found once it is mounted again. Mount it and saving goes on; start the job again "
                "if it is to go on here",
            )

    def _look(self) -> list[StepRecord]:
        self._looks += 1
        entries = self._root.list()
        folders = {
            entry.name: (step, entry.modified_s)
            for entry in entries
            if entry.is_folder and (step := names.parse_step(entry.name)) is not None
        }
        self.links = frozenset(entry.name for entry in entries if entry.is_link)
        self._seen = {
            name: seen
            if seen.folder_modified_s is not None
            else replace(seen, folder_modified_s=folders[name][1])
            for name, seen in self._seen.items()
            if name in folders
        }
        new = [name for name in folders if name not in self._seen]
        known = sorted(
            self._seen,
            key=lambda name: (
                self._seen[name].folder_modified_s == folders[name][1],
                self._seen[name].looked,
            ),
        )
        for name in [*new, *known[:_LOOKS_AGAIN]]:
            step, modified_s = folders[name]
            try:
                seen = self._look_into(name, step, self._seen.get(name))
            except OSError as error:  # a scan gives it no say either; it stays new
                _log.debug("%s/%s: not looked into: %s", self._root.location, name, error)
                continue
            self._seen[name] = replace(seen, looked=self._looks, folder_modified_s=modified_s)
        return [seen.record for seen in self._seen.values()]

    def _look_into(self, name: str, step: int, seen: _Seen | None) -> _Seen:
        """Return what is in a folder. ``.metadata`` is only decoded if it is another one."""
        folder = self._root.child(name)
        if seen is None:
            return _Seen(examine(folder, name, step))
        commit = next(
            ((e.size_bytes, e.modified_s) for e in folder.list() if e.name == names.METADATA), None
        )
        if commit is not None:
            if commit == seen.commit:
                return seen
            try:
                if identity(content_of(folder)) == seen.record.identity:
                    return replace(seen, commit=commit)
            except (FileNotFoundError, LoadFailed):
                commit = None
        return _Seen(examine(folder, name, step), commit=commit)


def _why(history: Lineage, by: StepRecord) -> str:
    fresh = by.parent_step is None
    began = "started afresh" if fresh else f"went on from step {by.parent_step}"
    return (
        f"another run ({by.run_id}) {began} in this root and has saved {by.name} since, so the "
        f"next restore would pass over what this run ({history.run_id}) saves. If the other run is "
        "the right one, stop this one. If this one is, stop the other, and start this job again "
        "with restore(step=...) of its last step"
    )
