"""A tier whose power can fail at every single step of a save.

It keeps two states of every folder and file: what the program sees, and what has been made
durable. A power loss drops what is only in the first, as much or as little of it as the test
asks for. The rules are weaker than those of any journaling file system on purpose:

- content is durable once its file was synced, and only then; before that a file may hold any
  part of it, or zeros in its place;
- a change of a name (new, linked, renamed, removed) is durable once its folder was synced, and
  only then; before that each change may have survived or not, in any combination;
- a single rename or link is never half done.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial
from typing import Literal

from dcp_checkfreq.runtime.clock import Clock, SystemClock
from dcp_checkfreq.storage.tier import Entry, ReservationRevoked, ScratchReservation
from dcp_checkfreq.testing.crash_disk import (
    Disk,
    File,
    Folder,
    Keep,
    Owners,
    PowerLoss,
    fill,
    settle,
)
from dcp_checkfreq.testing.memory_tier import MemoryReader, MemoryTier, check_name


class CrashTier:
    """A `Tier` in memory that loses power at a chosen step; thread-safe.

    ``start`` is what lies on the disk, durably, before the test begins; it is copied. Steps are
    the smallest changes of the storage, counted from 0 over the whole tree: one piece of
    content, one sync, one change of a name. At step ``crash_at`` a `PowerLoss` is raised, and
    from then on by every call of every tier of this tree. With ``crash_at=None`` the power
    holds until `after_power_loss`.

    With one writing thread the steps, and so the crash points, are the same on every run.
    """

    def __init__(
        self,
        start: MemoryTier | None = None,
        *,
        crash_at: int | None = None,
        crash_when: Literal["before", "after"] = "before",
        clock: Clock | None = None,
    ) -> None:
        self._disk = Disk(crash_at, crash_when, clock or SystemClock())
        self._path: tuple[str, ...] = ()
        if start is not None:
            fill(self._disk.root, start, self._disk.clock.wall_s())

    @property
    def location(self) -> str:
        """Return ``crash:`` and the path from the root."""
        return "crash:/" + "/".join(self._path)

    @property
    def steps(self) -> int:
        """How many mutating steps were carried out so far, over the whole tree."""
        with self._disk.lock:
            return len(self._disk.log)

    @property
    def log(self) -> tuple[str, ...]:
        """What those steps were, in order."""
        with self._disk.lock:
            return tuple(self._disk.log)

    @property
    def crashed(self) -> bool:
        """Whether the step ``crash_at`` was reached, and the power failed there."""
        with self._disk.lock:
            return self._disk.reached

    def child(self, name: str) -> CrashTier:
        """Return the tier of the folder ``name`` inside this one. Touches nothing."""
        check_name(name)
        child = CrashTier.__new__(CrashTier)
        child._disk, child._path = self._disk, (*self._path, name)
        return child

    def make(self) -> None:
        """Make each missing folder on the way and sync its parent: two steps for each.

        The parent of a folder that is there already is synced too, as the rank that made it may not
        have come to that yet.
        """
        with self._disk.lock:
            self._disk.check_power()
            for depth in range(1, len(self._path) + 1):
                parent = self._find(self._path[: depth - 1])
                name = self._path[depth - 1]
                where = "/" + "/".join(self._path[:depth])
                assert parent is not None, "the loop made it"
                owner = parent.seen.get(name)
                if isinstance(owner, File):
                    raise FileExistsError(f"{self.location}: {name!r} is a file")
                if owner is None:
                    self._disk.step(f"mkdir {where}", partial(parent.change, {name: Folder()}))
                self._disk.step(f"sync parent of {where}", parent.sync)

    def list(self) -> list[Entry]:
        """Return what is in the folder, in no order; empty if the folder is missing."""
        with self._disk.lock:
            self._disk.check_power()
            folder = self._find(self._path)
            return [
                Entry(name, is_folder=False, size_bytes=len(node.seen), modified_s=node.modified_s)
                if isinstance(node, File)
                else Entry(name, is_folder=True, size_bytes=0, modified_s=0.0)
                for name, node in (folder.seen if folder else {}).items()
            ]

    def size(self, name: str) -> int:
        """Return the exact size of a file in bytes."""
        return len(self.read(name))

    def read(self, name: str) -> bytes:
        """Return the whole content of a file, durable or not."""
        check_name(name)
        with self._disk.lock:
            self._disk.check_power()
            folder = self._find(self._path)
            node = folder.seen.get(name) if folder else None
            if node is None:
                raise FileNotFoundError(f"{self.location}: no file {name!r}")
            if isinstance(node, Folder):
                raise IsADirectoryError(f"{self.location}: {name!r} is a folder")
            return bytes(node.seen)

    def open(self, name: str) -> MemoryReader:
        """Open a file for ranged reads."""
        return MemoryReader(self.read(name))

    def write_shard(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        """Write a new file: its name, each piece and the sync of its content are one step each.

        Raises:
            FileExistsError: the name is taken; the old file stays.
            ValueError: the pieces do not add up to ``size_bytes``; the file was removed.
        """
        file = self._new_file(name)
        try:
            for piece in pieces:
                self._append(file, name, bytes(piece.cast("B")))
            if len(file.seen) != size_bytes:
                raise ValueError(f"{name}: {len(file.seen)} bytes given, {size_bytes} announced")
            self._sync_file(file, name)
        except BaseException as error:
            if not isinstance(error, PowerLoss):
                self._unlink(name)
            raise

    def sync(self) -> None:
        """Make all changes of names in this folder durable: one step.

        Raises:
            FileNotFoundError: the folder is missing.
        """
        with self._disk.lock:
            self._disk.check_power()
            self._disk.step(f"sync {self._shown('')}", self._folder().sync)

    def create(self, name: str, data: bytes, *, scratch: str) -> None:
        """Write and sync ``scratch``, link it to ``name``, unlink it, sync the folder."""
        check_name(name)
        file = self._write_scratch(scratch, data)
        try:
            with self._disk.lock:
                self._disk.check_power()
                self._must_be_free(name)
                folder = self._folder()
                self._disk.step(f"link {self._shown(name)}", lambda: folder.change({name: file}))
        except FileExistsError:
            self._unlink(scratch)
            raise
        self._unlink(scratch)
        self.sync()

    def replace(self, name: str, data: bytes, *, scratch: str) -> None:
        """Write and sync ``scratch``, rename it to ``name``, sync the folder."""
        check_name(name)
        file = self._write_scratch(scratch, data)
        with self._disk.lock:
            self._disk.check_power()
            folder = self._folder()
            self._disk.step(
                f"rename to {self._shown(name)}",
                lambda: folder.change({name: file, scratch: None}),
            )
        self.sync()

    def reserve(self, name: str, *, scratch: str) -> ScratchReservation:
        """Make an empty file ``scratch``: one step. Its removal is the revocation."""
        check_name(name)
        self._new_file(scratch)
        return ScratchReservation(self, name, scratch)

    def revoke(self, name: str, *, scratch: str) -> bool:
        """Remove ``scratch``: one step."""
        check_name(name)
        self._unlink(scratch)
        return True

    def commit_scratch(self, name: str, data: bytes, scratch: str, over: bytes | None) -> None:
        """Write and sync ``scratch``, link or rename it to ``name``, sync the folder."""
        with self._disk.lock:
            self._disk.check_power()
            folder = self._folder()
            file = folder.seen.get(scratch)
            if not isinstance(file, File):
                raise ReservationRevoked(f"{self.location}: {scratch!r} was taken away")
        file.seen.clear()
        file.durable_bytes = 0
        self._append(file, scratch, bytes(data))
        self._sync_file(file, scratch)
        with self._disk.lock:
            self._disk.check_power()
            held = folder.seen.get(name)
            if held is not None and not (isinstance(held, File) and bytes(held.seen) == over):
                raise FileExistsError(f"{self.location}: {name!r} is taken")
            if folder.seen.get(scratch) is not file:
                raise ReservationRevoked(f"{self.location}: {scratch!r} was taken away")
            owners: Owners = {name: file} if held is None else {name: file, scratch: None}
            verb = "link" if held is None else "rename to"
            self._disk.step(f"{verb} {self._shown(name)}", lambda: folder.change(owners))
        self._unlink(scratch)
        self.sync()

    def delete(self, name: str) -> None:
        """Remove a file: one step, or none if it is missing. Durable after `sync`."""
        check_name(name)
        self._unlink(name)

    def remove(self) -> None:
        """Remove this folder if it is empty: one step, durable after `sync` of its parent."""
        with self._disk.lock:
            self._disk.check_power()
            folder = self._find(self._path)
            parent = self._find(self._path[:-1])
            if self._path and folder is not None and parent is not None and not folder.seen:
                name = self._path[-1]
                self._disk.step(f"rmdir {self._shown('')}", lambda: parent.change({name: None}))

    def after_power_loss(self, *, keep: Keep) -> MemoryTier:
        """Return what this folder holds when the machine comes up again.

        The power fails now if it has not yet. ``keep`` says what becomes of all that was not
        durable: ``"none"`` of it survives, ``"all"`` of it does, or a number, which seeds a
        choice of its own for each change and each file. May be called again with another
        ``keep``: the same number gives the same result, if the steps were the same.
        """
        with self._disk.lock:
            if self._disk.dead is None:
                self._disk.dead = "after the last step"
            whole = MemoryTier(clock=self._disk.clock)
            chance = random.Random(keep) if isinstance(keep, int) else None
            settled: dict[File, bytes] = {}
            settle(self._disk.root, whole, keep, chance, settled)
        for name in self._path:
            whole = whole.child(name)
        return whole

    def _find(self, path: tuple[str, ...]) -> Folder | None:
        node: Folder = self._disk.root
        for name in path:
            below = node.seen.get(name)
            if not isinstance(below, Folder):
                return None
            node = below
        return node

    def _folder(self) -> Folder:
        folder = self._find(self._path)
        if folder is None:
            raise FileNotFoundError(f"{self.location}: no such folder")
        return folder

    def _shown(self, name: str) -> str:
        return "/" + "/".join((*self._path, name))

    def _must_be_free(self, name: str) -> None:
        check_name(name)
        if name in self._folder().seen:
            raise FileExistsError(f"{self.location}: {name!r} is taken")

    def _new_file(self, name: str) -> File:
        file = File(modified_s=self._disk.clock.wall_s())
        with self._disk.lock:
            self._disk.check_power()
            self._must_be_free(name)
            folder = self._folder()
            self._disk.step(f"new file {self._shown(name)}", lambda: folder.change({name: file}))
        return file

    def _append(self, file: File, name: str, content: bytes) -> None:
        self._disk.step(
            f"write {len(content)} bytes to {self._shown(name)}",
            lambda: file.seen.extend(content),
        )

    def _sync_file(self, file: File, name: str) -> None:
        self._disk.step(f"sync content of {self._shown(name)}", file.sync)

    def _write_scratch(self, scratch: str, data: bytes) -> File:
        file = self._new_file(scratch)
        self._append(file, scratch, bytes(data))
        self._sync_file(file, scratch)
        return file

    def _unlink(self, name: str) -> None:
        with self._disk.lock:
            self._disk.check_power()
            folder = self._find(self._path)
            if folder is not None and isinstance(folder.seen.get(name), File):
                self._disk.step(f"unlink {self._shown(name)}", lambda: folder.change({name: None}))
