"""What the local disks of all ranks hold of a root, agreed over the ranks, and how it is used."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from dcp_checkfreq.commit.attempt import new_attempt
from dcp_checkfreq.commit.publish import publish
from dcp_checkfreq.errors import BadLocation, WriteFailed
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.format import names
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.recovery.root_check import is_read_only
from dcp_checkfreq.recovery.root_id import id_of_root, make_root_id
from dcp_checkfreq.recovery.scan import check_digests
from dcp_checkfreq.runtime.clock import Clock, SystemClock
from dcp_checkfreq.staging.local_disk import LocalFolder
from dcp_checkfreq.staging.staged_tier import StagedTier, Upload
from dcp_checkfreq.staging.unfinished import Unfinished, find_unfinished
from dcp_checkfreq.staging.upload import upload_and_publish

_log = logging.getLogger(__name__)

_UNKNOWN = "unknown"  # id of a root that has none


class LocalCopies:
    """The local disks of a job. All ranks call its methods, in the same order.

    Args:
        root: of the run, with this node's disk.
        ranks: of this job.
        threads: shards that a rank copies or reads at once.
        clock: for the wait for files that show up late.
    """

    def __init__(
        self, root: StagedTier, ranks: Ranks, *, threads: int, clock: Clock | None = None
    ) -> None:
        self._root = root
        self._ranks = ranks
        self._threads = threads
        self._clock = clock or SystemClock()

    def belong_to_root(self) -> None:
        """Make sure that what lies on the local disks is of this root, and not of one before.

        A root that was emptied and is used anew must not resume from what its predecessor had left.

        Raises:
            BadLocation: a local disk cannot be used, on all ranks.
        """
        root_id = self._ranks.on_rank_0(self._root_id)
        problem = None
        try:
            self._root.area.belong_to(root_id)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # As in a save, a full disk is passed by. What lies there counts for nothing.
                _log.warning("%s is not used: %s", self._root.area.local.location, error)
            else:
                problem = f"rank {self._ranks.rank} cannot use it: {error}"
        problems = [text for text in self._ranks.all_gather(problem) if text is not None]
        if problems:
            raise BadLocation(self._root.area.local.location, problems[0])

    def _root_id(self) -> str:
        try:
            return make_root_id(self._root.remote)
        except OSError as error:
            level = logging.INFO if is_read_only(error) else logging.WARNING
            _log.log(level, "%s: it has no id for now: %s", self._root.location, error)
            return _UNKNOWN

    def unfinished(self, refused: Mapping[str, str]) -> list[Unfinished]:
        """Return the saves that are on local disks and not published; the same on all ranks.

        Args:
            refused: names of those that turned out damaged, with the reason.
        """
        return self._ranks.reduce_on_rank_0(
            look(self._root), lambda ranks: find_unfinished(self._root.remote, ranks, refused)
        )

    def verify(self, one: Unfinished) -> str | None:
        """Compare the digests of all that is to be uploaded; return what is wrong, on all ranks."""
        own = self._own(one)
        problem = None
        if own:
            problem = check_digests(
                self._root.area.folder(one.record.name),
                threads=self._threads,
                content=one.content,
                only=own,
            )
        return next((text for text in self._ranks.all_gather(problem) if text is not None), None)

    def finish(self, one: Unfinished, each_round: Callable[[], None]) -> None:
        """Upload what is missing on the remote side, and publish.

        Args:
            one: of `unfinished`, found good by `verify`.
            each_round: see `upload_and_publish`.

        Raises:
            SaveFailed, PublishUnknown: on all ranks; the next start may try again.
        """
        name, own = one.record.name, sorted(self._own(one))
        folder = StagedTier(self._root.remote.child(name), self._root.area, name)
        commit = new_attempt(folder.remote)
        record = metadata_format.load(one.content, folder.location)[1]
        assert record is not None, "it was found by its record"

        def reserve() -> None:
            try:
                commit.reserve()
            except OSError as error:
                raise WriteFailed(folder.location, f"rank 0: {error}") from error

        def publish_all() -> None:
            commit.uploaded()
            commit.commit(
                lambda reservation: publish(
                    folder.remote,
                    one.content,
                    reservation=reservation,
                    files=record.files,
                    may_replace=None,
                    clock=self._clock,
                )
            )

        attempts = {parsed[2] for file in own if (parsed := names.parse_shard(file)) is not None}

        def copy(stop: threading.Event, moved: Callable[[int], None]) -> None:
            for attempt in attempts:
                self._root.area.claim(attempt)
            for file in own:
                folder.remote.delete(file)  # cut short by the crash, whatever its size says
            folder.upload(own, threads=self._threads, stop=stop, moved=moved)

        # Before the first file is there: from then on cleaning and this exclude each other.
        self._ranks.on_rank_0(reserve)
        try:
            commit.begin()
            commit.staged()  # by an earlier process
            commit.all_staged()
            upload_and_publish(
                self._ranks, Upload(copy), folder.location, publish_all, each_round=each_round
            )
        finally:
            commit.abandon()  # unless it is published: the local copies stay for the next start
            for attempt in attempts:
                self._root.area.let_go(attempt)
        self._tidily(lambda: self._root.area.remove_older_than(name))

    def tidy(self, spare: Mapping[str, AbstractSet[str]]) -> None:
        """Remove from this node what attempts that are over have left, but for ``spare``.

        Args:
            spare: shards that stay, by the name of their checkpoint. On this rank only.
        """
        self._tidily(lambda: self._root.area.clear(spare))

    def _tidily(self, clean: Callable[[], None]) -> None:
        try:
            clean()
        except OSError as error:
            _log.warning("%s: leftovers stay: %s", self._root.area.local.location, error)

    def _own(self, one: Unfinished) -> frozenset[str]:
        return frozenset(file for file, rank in one.uploads.items() if rank == self._ranks.rank)


def look(root: StagedTier) -> list[LocalFolder]:
    """Return what this node holds of this very root. A disk that fails holds nothing."""
    try:
        root_id = id_of_root(root.remote)
        if root_id is not None and root.area.root_id() == root_id:
            return root.area.look()
    except OSError as error:
        _log.warning("%s: not looked into: %s", root.area.local.location, error)
    return []
