"""The local disk in front of a slow storage: what lies there, whose it is, and what may go.

::

    <staging_dir>/<name and digest of the root>/
        root-id                         which root this is the front of
        .<attempt>.lock                 held by flock while that attempt is under way
        step_00000100/
            __0_0_<attempt>.distcp      shards, under the names that they have on the remote side
            __0_0_<attempt>.distcp.up   this shard is complete and durable on the remote side
            .metadata                   the local commit, on the node of rank 0 only

All ranks of a node share the folder. An attempt whose lock nobody holds is over: it was finished,
or its process is dead. Its files are then a cache of the remote side, or what is left of a save
that can still be finished, or leftovers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from dcp_checkfreq.format import names
from dcp_checkfreq.recovery.root_id import read_root_id
from dcp_checkfreq.runtime.clock import Clock, SystemClock
from dcp_checkfreq.runtime.flock import HeldFile
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.storage.tier import (
    LARGEST_SMALL_FILE_BYTES,
    Entry,
    OddFile,
    Tier,
    read_small,
)

_log = logging.getLogger(__name__)

_NOTE = ".up"
# Left free for everybody else on the node's disk.
_RESERVE_SHARE, _RESERVE_AT_MOST_BYTES = 0.05, 10 << 30
_LOCK_WITHIN_S = 2.0
_SCRATCH = re.compile(r".+\.([0-9a-f]{12})\.tmp", re.ASCII)
_LOCK = re.compile(r"\.([0-9a-f]{12})\.lock", re.ASCII)

_TRIES = 9  # ranks of one node say at once which root its disk is the front of


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """What one node holds of one checkpoint, of attempts that are over."""

    name: str
    record: bytes | None  # the local commit, if it is on this node and nobody is at work here
    files: Mapping[str, int]  # shards with their sizes in bytes
    uploaded: frozenset[str]  # shards that are complete on the remote side, here or not
    is_busy: bool = False  # a process is at work here


def note_of(shard: str) -> str:
    """Return the name of the note that a shard is complete on the remote side."""
    return shard + _NOTE


def _shard_of_note(name: str) -> str | None:
    shard = name.removesuffix(_NOTE)
    return shard if shard != name and names.parse_shard(shard) else None


class StagingArea:
    """The local folder of one root, as one process uses it. Thread-safe as far as `Tier` is.

    Args:
        local: the folder of this root on the local disk.
        limit_bytes: what one rank may keep in it. None: as long as 5 % of the disk stay free (at
            most 10 GiB).
    """

    def __init__(
        self, local: Tier, *, limit_bytes: int | None = None, clock: Clock | None = None
    ) -> None:
        self.local = local
        self._limit_bytes = limit_bytes
        self._clock = clock or SystemClock()
        self._claimed: dict[str, HeldFile | None] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return _area, (self.local, self._limit_bytes)  # locks stay in the process that has them

    def folder(self, name: str) -> Tier:
        """Return the local folder of a checkpoint."""
        return self.local.child(name)

    # --- whose is it ---

    def claim(self, attempt: str) -> None:
        """Say that this process is at work on an attempt, until `let_go` or its death.

        Raises:
            OSError: another process is, the disk has no locks, or it fails.
        """
        if attempt in self._claimed:
            return
        if not isinstance(self.local, LocalTier):
            self._claimed[attempt] = None
            return
        path = self._lock_path(attempt)
        while True:
            held = HeldFile(path, os.O_RDWR | os.O_CREAT)
            try:
                # A process that only looks whether it is held has it for a moment.
                held.lock_within(_LOCK_WITHIN_S, self._clock, shared=False)
                if held.is_at(path):  # nobody has removed it meanwhile
                    self._claimed[attempt] = held
                    return
            finally:
                if self._claimed.get(attempt) is not held:
                    held.close()

    def let_go(self, attempt: str) -> None:
        """Say that an attempt is over. No error if it was never claimed."""
        held = self._claimed.pop(attempt, None)
        if held is not None and not held.closed:  # else it is that of this process's parent
            with contextlib.suppress(OSError):
                os.unlink(held.path)
            held.close()

    def _is_over(self, attempt: str) -> bool:
        if attempt in self._claimed:
            return False
        if not isinstance(self.local, LocalTier):
            return True
        try:
            held = HeldFile(self._lock_path(attempt), os.O_RDWR)
        except FileNotFoundError:
            return True
        try:
            return held.try_lock(shared=True)
        finally:
            held.close()

    def _lock_path(self, attempt: str) -> str:
        return os.path.join(self.local.location, f".{attempt}.lock")

    # --- what lies there ---

    def look(self) -> list[LocalFolder]:
        """Return what is there of attempts that are over, by folder."""
        return [
            found
            for entry in self.local.list()
            if entry.is_folder
            and ((found := self.look_into(entry.name)).files or found.uploaded or found.record)
        ]

    def look_into(self, name: str) -> LocalFolder:
        """Return what is there of one checkpoint; nothing if there is no such folder."""
        folder = self.folder(name)
        over: dict[str, bool] = {}
        files: dict[str, int] = {}
        uploaded: set[str] = set()
        entries = folder.list()
        for entry in entries:
            shard = _shard_of_note(entry.name)
            parsed = names.parse_shard(shard or entry.name)
            if parsed is None:
                continue
            if parsed[2] not in over:
                over[parsed[2]] = self._is_over(parsed[2])
            if not over[parsed[2]]:
                continue
            if shard is not None:
                uploaded.add(shard)
            else:
                files[entry.name] = entry.size_bytes
        record = None
        is_busy = not all(over.values())
        if not is_busy and any(entry.name == names.METADATA for entry in entries):
            with contextlib.suppress(FileNotFoundError, OddFile, IsADirectoryError):
                record = read_small(folder, names.METADATA, at_most_bytes=LARGEST_SMALL_FILE_BYTES)
        return LocalFolder(name, record, files, frozenset(uploaded), is_busy)

    # --- what may go ---

    def make_room(self, name: str, rank: int, size_bytes: int) -> str | None:
        """Make room for the files of a new save; return why there is none, or None: there is.

        What is left in the same folder of attempts that are over goes. Of the other folders the
        one of the highest step stays, unless its room is needed and all of it that is this rank's
        is on the remote side.
        """
        self._clear_one(name, frozenset(), whole=False)
        others = sorted(
            (entry for entry in self.local.list() if entry.is_folder and entry.name != name),
            key=_newest_last,
        )
        self.clear({}, only={entry.name for entry in others[:-1]})
        why = self._why_no_room(rank, size_bytes)
        if why is None or not others:
            return why
        kept = self.look_into(others[-1].name)
        own = {file for file in kept.files if _rank_of(file) == rank}
        if own and own <= kept.uploaded:
            self._delete(self.folder(kept.name), own)
        return self._why_no_room(rank, size_bytes)

    def _why_no_room(self, rank: int, size_bytes: int) -> str | None:
        if self._limit_bytes is not None:
            used_bytes = sum(
                inner.size_bytes
                for entry in self.local.list()
                if entry.is_folder
                for inner in self.folder(entry.name).list()
                if _rank_of(inner.name) == rank
            )
            if used_bytes + size_bytes <= self._limit_bytes:
                return None
            return (
                f"no room for {size_bytes} bytes: "
                f"{used_bytes} of the {self._limit_bytes} of staging_bytes are in use"
            )
        if not isinstance(self.local, LocalTier):
            return None
        disk = os.statvfs(self.local.location)
        reserve_bytes = min(
            int(disk.f_blocks * disk.f_frsize * _RESERVE_SHARE), _RESERVE_AT_MOST_BYTES
        )
        free_bytes = disk.f_bavail * disk.f_frsize
        if size_bytes + reserve_bytes <= free_bytes:
            return None
        return (
            f"no room for {size_bytes} bytes: {free_bytes} are free, "
            f"of which {reserve_bytes} stay free for others"
        )

    def clear(
        self, spare: Mapping[str, AbstractSet[str]], *, only: Collection[str] | None = None
    ) -> None:
        """Remove what is there of attempts that are over: a record first, then shards and notes.

        Args:
            spare: by folder the shards that stay; a folder that is named keeps its record.
            only: look at these folders; None: at all of them.
        """
        for entry in self.local.list():
            if not entry.is_folder or (only is not None and entry.name not in only):
                continue
            spared = entry.name in spare
            self._clear_one(
                entry.name, spare.get(entry.name, frozenset()), record=not spared, whole=True
            )
        if only is None:
            self._clear_locks()

    def _clear_one(
        self, name: str, kept: AbstractSet[str], *, record: bool = True, whole: bool
    ) -> None:
        found = self.look_into(name)
        folder = self.folder(name)
        if found.record is not None and record:
            folder.delete(names.METADATA)
            folder.sync()
        self._delete(folder, (found.files.keys() | found.uploaded) - kept)
        if not whole:  # another rank of this node may be about to write into it
            return
        if not found.is_busy:
            for entry in folder.list():
                if _SCRATCH.fullmatch(entry.name):
                    folder.delete(entry.name)
        folder.remove()

    def _clear_locks(self) -> None:
        """Remove the lock files of attempts that are over."""
        if not isinstance(self.local, LocalTier):
            return
        for entry in self.local.list():
            if _SCRATCH.fullmatch(entry.name):
                self.local.delete(entry.name)
            parsed = _LOCK.fullmatch(entry.name)
            if parsed is None or parsed[1] in self._claimed:
                continue
            with contextlib.suppress(FileNotFoundError):
                held = HeldFile(self._lock_path(parsed[1]), os.O_RDWR)
                try:
                    if held.try_lock(shared=False):
                        os.unlink(held.path)
                finally:
                    held.close()

    def _delete(self, folder: Tier, shards: Iterable[str]) -> None:
        for shard in shards:
            folder.delete(shard)
            folder.delete(note_of(shard))

    def remove_older_than(self, name: str) -> None:
        """Act on the publication of a checkpoint: older local ones go, and its local record."""
        folder = self.folder(name)
        folder.delete(names.METADATA)
        self.clear({}, only={entry.name for entry in self.local.list() if entry.name != name})
        self._clear_locks()

    def discard(self, name: str, shards: Iterable[str]) -> None:
        """Remove files of an attempt of this process."""
        folder = self.folder(name)
        self._delete(folder, shards)
        folder.remove()

    # --- which root ---

    def belong_to(self, root_id: str) -> None:
        """Say which root this is the front of; what was there for another one goes."""
        for tries_left in reversed(range(_TRIES)):
            if self.root_id() == root_id:
                return
            self.clear({})
            self.local.make()
            scratch = f"{names.ROOT_ID}.{names.new_attempt()}.tmp"
            try:
                self.local.replace(names.ROOT_ID, root_id.encode(), scratch=scratch)
            except FileNotFoundError:  # another rank of this node has cleared it away
                if not tries_left:
                    raise

    def root_id(self) -> str | None:
        """Return which root this is the front of, if that was ever said."""
        return read_root_id(self.local)


def _area(local: Tier, limit_bytes: int | None) -> StagingArea:
    return StagingArea(local, limit_bytes=limit_bytes)


def _newest_last(entry: Entry) -> tuple[int, float]:
    step = names.parse_step(entry.name)
    return (-1 if step is None else step), entry.modified_s


def _rank_of(name: str) -> int | None:
    parsed = names.parse_shard(name)
    return None if parsed is None else parsed[0]
