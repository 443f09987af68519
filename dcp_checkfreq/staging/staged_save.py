"""The local side of one save on one rank: staged, committed, uploaded, settled.

Where the save stands is not kept here: `commit.phases` has one table for both sides.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

from dcp_checkfreq.staging.staged_tier import StagedTier, Upload

_log = logging.getLogger(__name__)


class StagedSave:
    """What a writer asks of its local disk. Not thread-safe.

    Args:
        folder: of the checkpoint.
        attempt: of this rank.
        threads: shards that are copied at once.
    """

    def __init__(self, folder: StagedTier, attempt: str, *, threads: int) -> None:
        self._folder = folder
        self._area = folder.area
        self._attempt = attempt
        self._threads = threads
        self._shards: tuple[str, ...] = ()
        # DCP does not tell a writer that is dropped how its save has ended.
        weakref.finalize(self, folder.area.let_go, attempt).atexit = False

    def stage(
        self, rank: int, sizes: Mapping[str, int], write: Callable[[StagedTier], None]
    ) -> bool:
        """Write the shards to the local disk, durably; False, and nothing there, if it has failed.

        Args:
            rank: of this process.
            sizes: of the shards, in bytes.
            write: writes them by `StagedTier.stage`.
        """
        size_bytes = sum(sizes.values())
        try:
            self._area.local.make()
            why = self._area.make_room(self._folder.name, rank, size_bytes)
            if why is None:
                self._area.claim(self._attempt)
                self._folder.local.make()
                write(self._folder)
                self._folder.local.sync()
                self._shards = tuple(sizes)
                return True
        except OSError as error:
            why = str(error)
            self._discard(sizes)
        _log.warning(
            "%s: rank %d uploads straight from memory, its local disk at %s is of no use now: %s",
            *(self._folder.location, rank, self._folder.local.location, why),
        )
        return False

    def commit(self, record: bytes, on_slow_side: Iterable[str]) -> None:
        """On rank 0, when all ranks have staged: keep the commit record on the local disk.

        Without it the save goes on all the same; only a crash before its end cannot be mended.
        """
        try:
            self._area.claim(self._attempt)
            self._folder.commit_locally(record, on_slow_side)
        except OSError as error:
            _log.warning(
                "%s: a crash before the upload is complete will cost this save: %s",
                *(self._folder.local.location, error),
            )

    def upload(self, moved: Callable[[int], None]) -> None:
        """Copy the shards to the remote side and return when they are durable there.

        Args:
            moved: see `StagedTier.upload`.

        Raises:
            OSError: see `StagedTier.upload`.
        """
        self._folder.upload(self._shards, threads=self._threads, moved=moved)

    def start_upload(self) -> Upload:
        """Start to copy the shards to the remote side."""
        return Upload(
            lambda stop, moved: self._folder.upload(
                self._shards, threads=self._threads, stop=stop, moved=moved
            )
        )

    def abandon(self) -> None:
        """Act on the failure of a save that no start can finish: nothing of it stays here."""
        self._discard(self._shards)

    def leave(self, shards: Sequence[str]) -> None:
        """Act on the failure of a save that the next start can finish: all stays but the notes.

        ``shards`` are this rank's on the remote side, which the caller removes.
        """
        self._quietly(lambda: self._folder.forget_notes(shards))
        self.close()

    def settle(self) -> None:
        """Act on the publication of the save: it is all that stays on the local disk."""
        self._quietly(lambda: self._area.remove_older_than(self._folder.name))
        self.close()

    def close(self) -> None:
        """Let go of the attempt. May be called twice."""
        self._area.let_go(self._attempt)

    def _discard(self, shards: Iterable[str]) -> None:
        self._quietly(lambda: self._area.discard(self._folder.name, shards))
        self._area.let_go(self._attempt)

    def _quietly(self, clean: Callable[[], None]) -> None:
        try:
            clean()
        except OSError as error:
            _log.warning(
                "%s: files that are of no use any more stay for now: %s",
                *(self._area.local.location, error),
            )
