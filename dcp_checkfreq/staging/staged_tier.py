"""A fast local disk in front of a slow storage. What counts is what is on the remote side.

Shards are written and synced on the local disk, so that the memory they came from is free again;
then they are copied to the remote side as plain streams. Whatever else is asked is asked of the
remote side, but for reads of shards that still lie here.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import xxhash

from dcp_checkfreq.format import names
from dcp_checkfreq.runtime.crew import Crew
from dcp_checkfreq.staging.local_disk import StagingArea, note_of
from dcp_checkfreq.staging.mount_tier import MountTier
from dcp_checkfreq.storage.forwarding import NotedTier
from dcp_checkfreq.storage.local.huge_pages import BOUNCE_BYTES, huge_buffer
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.storage.tier import (
    SLOWEST_BYTES_PER_S,
    Entry,
    RangeReader,
    Reservation,
    StaleCredentials,
    Tier,
    abort_uploads,
    disk_of,
    read_small,
    reads_at_once,
)

StagingDir = str | os.PathLike[str] | Tier


class StagedTier:
    """A root, or the folder of one checkpoint in it, with its local disk. See `Tier`.

    Args:
        remote: where checkpoints are published.
        area: the local folder of the root.
        folder: name of the checkpoint's folder; None: this is the root.
    """

    def __init__(self, remote: Tier, area: StagingArea, folder: str | None = None) -> None:
        self.remote = remote
        self.area = area
        self._folder = folder

    def __repr__(self) -> str:
        return f"StagedTier({self.remote!r}, {self.area.local!r})"

    @property
    def location(self) -> str:
        """Where the remote side is."""
        return self.remote.location

    @property
    def reads_at_once(self) -> int:
        """How many reads at once the remote side is best asked for."""
        return reads_at_once(self.remote)

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder."""
        assert self._folder is not None, "this is the root"
        return self._folder

    @property
    def local(self) -> Tier:
        """The local folder of this checkpoint."""
        return self.area.folder(self.name)

    def child(self, name: str) -> Tier:
        """Return the tier of a folder inside this one; only checkpoints have a local side."""
        if self._folder is not None or name == names.RUN_FOLDER:
            return self.remote.child(name)
        return StagedTier(self.remote.child(name), self.area, name)

    # --- the local side ---

    def stage(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        """Write a shard to the local disk; like `Tier.write_shard`, but there."""
        self.local.write_shard(name, pieces, size_bytes)

    def commit_locally(self, record: bytes, on_slow_side: Iterable[str]) -> None:
        """Keep the commit record here, so that this save can be finished after a crash.

        Every shard that it names is durable on its node, or one of ``on_slow_side``, which are
        complete there.
        """
        self.local.make()
        for shard in on_slow_side:
            self._note(shard)
        scratch = names.scratch_metadata(names.new_attempt())
        self.local.replace(names.METADATA, record, scratch=scratch)

    def upload(
        self,
        shards: Sequence[str],
        *,
        threads: int,
        stop: threading.Event | None = None,
        moved: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        """Copy shards from the local disk to the remote side; on return they are durable there.

        Args:
            shards: their names.
            threads: shards that are copied at once.
            stop: ends it soon after it is set.
            moved: called now and then with the size of the shard that is being copied.

        Raises:
            OSError: of either side. What was being copied was removed from the remote side.
            InterruptedError: ``stop`` was set.
        """
        stop = stop or threading.Event()
        if not shards:
            return
        self.remote.make()
        if len(shards) == 1:
            self._copy(shards[0], stop, moved)
        else:

            def copy(shard: str) -> None:
                try:
                    self._copy(shard, stop, moved)
                except BaseException:
                    stop.set()
                    raise

            with Crew(threads - 1, "checkfreq-upload") as crew:  # and this thread
                crew.run_all([functools.partial(copy, shard) for shard in shards])
        self.remote.sync()
        for shard in shards:
            self._note(shard)

    def _copy(self, shard: str, stop: threading.Event, moved: Callable[[int], None]) -> None:
        reader = self.local.open(shard)

        def pieces() -> Iterator[memoryview]:
            for piece in _pieces_of(reader, stop):
                moved(reader.size_bytes)
                yield piece
            moved(reader.size_bytes)

        try:
            try:
                self.remote.write_shard(shard, pieces(), reader.size_bytes)
            except StaleCredentials:  # nothing is there, and the next call gets new ones
                self.remote.write_shard(shard, pieces(), reader.size_bytes)
            moved(reader.size_bytes)
        finally:
            reader.close()

    def _note(self, shard: str) -> None:
        note = note_of(shard)
        self.local.replace(note, b"", scratch=f"{note}.{names.new_attempt()}.tmp")

    def forget_notes(self, shards: Iterable[str]) -> None:
        """Say that shards are not on the remote side, or will not be for long."""
        for shard in shards:
            self.local.delete(note_of(shard))

    # --- the remote side ---

    def make(self) -> None:
        """Make the folder on the remote side."""
        self.remote.make()

    def list(self) -> list[Entry]:
        """Return what is on the remote side."""
        return self.remote.list()

    def size(self, name: str) -> int:
        """Return the size of a file on the remote side."""
        return self.remote.size(name)

    def read(self, name: str) -> bytes:
        """Return the content of a small file on the remote side."""
        return self.remote.read(name)

    def read_at_most(self, name: str, at_most_bytes: int) -> bytes:
        """Return the content of a small file on the remote side; see `read_small`."""
        return read_small(self.remote, name, at_most_bytes=at_most_bytes)

    def open(self, name: str) -> RangeReader:
        """Open a shard: the local copy if there is one, else that of the remote side.

        Names of shards are given once, so a copy of that name holds the same bytes.
        """
        if self._folder is not None and names.parse_shard(name):
            try:
                return self.local.open(name)
            except OSError:  # a cache that fails is no cache
                pass
        return self.remote.open(name)

    def write_shard(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        """Write a new file to the remote side, straight from memory."""
        self.remote.write_shard(name, pieces, size_bytes)

    def sync(self) -> None:
        """Make names durable on the remote side."""
        self.remote.sync()

    def create(self, name: str, data: bytes, *, scratch: str) -> None:
        """Create a file on the remote side."""
        self.remote.create(name, data, scratch=scratch)

    def replace(self, name: str, data: bytes, *, scratch: str) -> None:
        """Replace a file on the remote side."""
        self.remote.replace(name, data, scratch=scratch)

    def reserve(self, name: str, *, scratch: str) -> Reservation:
        """Reserve a name on the remote side."""
        return self.remote.reserve(name, scratch=scratch)

    def revoke(self, name: str, *, scratch: str) -> bool:
        """Revoke a reservation on the remote side."""
        return self.remote.revoke(name, scratch=scratch)

    def delete(self, name: str) -> None:
        """Remove a file from the remote side."""
        self.remote.delete(name)

    def remove(self) -> None:
        """Remove the folder from the remote side if it is empty."""
        self.remote.remove()

    def disk(self) -> int | None:
        """Return what `disk_of` says of the remote side."""
        return disk_of(self.remote)

    def abort_uploads(self, is_ours: Callable[[str], bool], *, before_s: float) -> Sequence[str]:
        """Abort what dead processes began to upload to the remote side."""
        return abort_uploads(self.remote, is_ours, before_s=before_s)


class Upload:
    """This rank's part of an upload, in a thread. Close it when done.

    Args:
        work: copies, and ends soon after the event that it is given is set. The other argument is
            what it calls now and then; see `StagedTier.upload`.
    """

    def __init__(self, work: Callable[[threading.Event, Callable[[int], None]], None]) -> None:
        self._stop = threading.Event()
        self._moves = self._moves_seen = 0
        self._largest_bytes = 0
        self._still_s = 0.0
        self._is_given_up = False
        self._crew = Crew(1, "checkfreq-uploading")
        self._running = self._crew.start(functools.partial(work, self._stop, self._moved))
        if self._running.is_nobodys:
            self._running.run()

    def wait(self, at_most_s: float) -> bool:
        """Return whether it has ended; then `problem` is known."""
        return self._running.wait(at_most_s)

    def _moved(self, size_bytes: int) -> None:
        self._moves += 1
        self._largest_bytes = max(self._largest_bytes, size_bytes)

    def still_for(self, seconds_s: float) -> float:
        """Return for how long nothing has moved, ``seconds_s`` after the last call.

        The time in which one call may have a whole shard to bring there is not counted.
        """
        self._still_s = self._still_s + seconds_s if self._moves == self._moves_seen else 0.0
        self._moves_seen = self._moves
        return max(0.0, self._still_s - self._largest_bytes / SLOWEST_BYTES_PER_S)

    def problem(self) -> BaseException | None:
        """Return why it failed; None: the shards are durable on the remote side."""
        return self._running.problem()

    def give_up(self) -> None:
        """Let nobody wait for it. If the storage ever comes back, it ends."""
        self._stop.set()
        self._is_given_up = True

    def close(self) -> None:
        """Stop it if it is under way, and wait for its end. May be called twice."""
        self._stop.set()
        if not self._is_given_up:
            self._crew.close()


def _pieces_of(reader: RangeReader, stop: threading.Event) -> Iterator[memoryview]:
    """Yield a file piece by piece, each in memory of its own: the tier may keep some for a while.

    How many are alive at once is the tier's affair; it says so in its own bounds.
    """
    for start in range(0, reader.size_bytes, BOUNCE_BYTES):
        if stop.is_set():
            raise InterruptedError(errno.EINTR, "the upload was stopped")
        size_bytes = min(BOUNCE_BYTES, reader.size_bytes - start)
        piece = huge_buffer(size_bytes)
        reader.read_into(start, piece)
        yield piece


def staged_root(
    root: Tier, staging_dir: StagingDir, *, limit_bytes: int | None = None
) -> StagedTier:
    """Return a root with its local disk; touches nothing.

    Args:
        root: where checkpoints are published.
        staging_dir: folder on a local disk, which other roots may use as well.
        limit_bytes: see `StagingArea`.
    """
    if isinstance(root, StagedTier):
        return root
    return StagedTier(_as_volume(root), _area_of(root.location, staging_dir, limit_bytes))


def staged_folder(
    folder: Tier, staging_dir: StagingDir, *, limit_bytes: int | None = None
) -> StagedTier:
    """Return the folder of a checkpoint with its local disk, as a child of `staged_root` is."""
    if isinstance(folder, StagedTier):
        return folder
    root, _, name = folder.location.rstrip("/").rpartition("/")
    return StagedTier(_as_volume(folder), _area_of(root, staging_dir, limit_bytes), name)


def _area_of(location: str, staging_dir: StagingDir, limit_bytes: int | None) -> StagingArea:
    if limit_bytes is not None and limit_bytes < 1:
        raise ValueError(f"staging_bytes must be at least 1, got {limit_bytes}")
    disk = staging_dir if isinstance(staging_dir, Tier) else LocalTier(staging_dir)
    return StagingArea(disk.child(_key_of(location)), limit_bytes=limit_bytes)


def _as_volume(tier: Tier) -> Tier:
    """Return a mounted folder as one that may be able to do little more than take streams."""
    return MountTier(tier.location) if type(tier) is LocalTier else tier


def _key_of(location: str) -> str:
    """Return the folder name of a root in a staging folder: readable, and unlike all others."""
    location = location.rstrip("/")
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", location.rpartition("/")[2])[:40].strip(".-")
    return f"{readable or 'root'}-{xxhash.xxh3_64(location.encode()).hexdigest()}"


def noted(root: Tier, moved: Callable[[], None]) -> Tier:
    """Return a root that says when a call has come back; of a staged one, those to the remote side.

    Args:
        root: carries the calls out.
        moved: see `NotedTier`.
    """
    if isinstance(root, StagedTier):
        return StagedTier(NotedTier(root.remote, moved), root.area)
    return NotedTier(root, moved)
