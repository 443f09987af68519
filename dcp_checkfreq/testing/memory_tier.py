"""A tier that keeps everything in memory, for tests that need no disk."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dcp_checkfreq.runtime.clock import Clock, SystemClock
from dcp_checkfreq.storage.tier import Entry, ReservationRevoked, ScratchReservation

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    modified_s: float


class _Tree:
    """All folders of one storage by their path from the root. Use only under ``lock``."""

    def __init__(self, clock: Clock) -> None:
        self.lock = threading.RLock()
        self.clock = clock
        self.folders: dict[Path, dict[str, _File]] = {(): {}}


class MemoryReader:
    """A `RangeReader` over bytes. Goes on reading what it opened, as an open file does."""

    def __init__(self, content: bytes) -> None:
        self._content = memoryview(content)
        self.size_bytes = len(content)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``[offset, offset + len(target))``.

        Raises:
            EOFError: the file ends before that range does; ``target`` is left as it was.
        """
        flat = target.cast("B")
        if offset < 0 or offset + len(flat) > self.size_bytes:
            raise EOFError(
                f"[{offset}, {offset + len(flat)}) is not inside a file of {self.size_bytes} bytes"
            )
        flat[:] = self._content[offset : offset + len(flat)]

    def close(self) -> None:
        """Do nothing: there is no descriptor to give back."""


class MemoryTier:
    """A `Tier` in memory. Tiers made by `child` share one tree; thread-safe.

    Nothing survives the process, so durability is that of a storage whose power never fails;
    `CrashTier` is the one that loses things.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._tree = _Tree(clock or SystemClock())
        self._path: Path = ()

    @classmethod
    def holding(cls, files: Mapping[str, bytes], *, clock: Clock | None = None) -> MemoryTier:
        """Return a tier that holds ``files``: content by path, such as ``"step_1/.metadata"``.

        A path that ends in ``/`` makes an empty folder.
        """
        tier = cls(clock=clock)
        for path, content in files.items():
            tier.poke(path, content)
        return tier

    @property
    def location(self) -> str:
        """Return ``memory:`` and the path from the root."""
        return "memory:/" + "/".join(self._path)

    def child(self, name: str) -> MemoryTier:
        """Return the tier of the folder ``name`` inside this one. Touches nothing."""
        check_name(name)
        child = MemoryTier.__new__(MemoryTier)
        child._tree, child._path = self._tree, (*self._path, name)
        return child

    def make(self) -> None:
        """Make this folder and its parents exist.

        Raises:
            FileExistsError: a file has the name of one of them.
        """
        with self._tree.lock:
            for depth in range(1, len(self._path) + 1):
                parent, name = self._path[: depth - 1], self._path[depth - 1]
                if name in self._tree.folders[parent]:
                    raise FileExistsError(f"{self.location}: {name!r} is a file")
                self._tree.folders.setdefault((*parent, name), {})

    def list(self) -> list[Entry]:
        """Return what is in the folder, in no order; empty if the folder is missing."""
        with self._tree.lock:
            entries = [
                Entry(
                    name, is_folder=False, size_bytes=len(file.content), modified_s=file.modified_s
                )
                for name, file in self._tree.folders.get(self._path, {}).items()
            ]
            entries += [
                Entry(path[-1], is_folder=True, size_bytes=0, modified_s=0.0)
                for path in self._tree.folders
                if path and path[:-1] == self._path
            ]
            return entries

    def size(self, name: str) -> int:
        """Return the exact size of a file in bytes."""
        return len(self._content(name))

    def read(self, name: str) -> bytes:
        """Return the whole content of a file."""
        return self._content(name)

    def open(self, name: str) -> MemoryReader:
        """Open a file for ranged reads."""
        return MemoryReader(self._content(name))

    def write_shard(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        """Write a new file; it appears whole, once ``pieces`` has ended.

        Raises:
            FileExistsError: the name is taken; the old file stays.
            ValueError: the pieces do not add up to ``size_bytes``; no file was made.
        """
        with self._tree.lock:
            self._must_be_free(name)
        content = bytearray()
        for piece in pieces:
            content += piece.cast("B")
        if len(content) != size_bytes:
            raise ValueError(f"{name}: {len(content)} bytes were given, {size_bytes} announced")
        self._add(name, bytes(content))

    def sync(self) -> None:
        """Check that the folder exists; memory has no more to do.

        Raises:
            FileNotFoundError: the folder is missing.
        """
        with self._tree.lock:
            self._folder()

    def create(self, name: str, data: bytes, *, scratch: str) -> None:
        """Make ``name`` exist with ``data``, only if it is absent; of several callers one wins."""
        check_name(scratch)
        self._add(name, bytes(data))

    def replace(self, name: str, data: bytes, *, scratch: str) -> None:
        """Make ``name`` hold ``data``, whether it exists or not."""
        check_name(scratch)
        check_name(name)
        with self._tree.lock:
            self._must_not_be_a_folder(name)
            self._folder()[name] = _File(bytes(data), self._tree.clock.wall_s())

    def reserve(self, name: str, *, scratch: str) -> ScratchReservation:
        """Make an empty file ``scratch``. Its removal is the revocation."""
        check_name(name)
        self._add(scratch, b"")
        return ScratchReservation(self, name, scratch)

    def revoke(self, name: str, *, scratch: str) -> bool:
        """Remove ``scratch``."""
        check_name(name)
        self.delete(scratch)
        return True

    def commit_scratch(self, name: str, data: bytes, scratch: str, over: bytes | None) -> None:
        """See `Reservation.commit`: all of it in one moment."""
        with self._tree.lock:
            if scratch not in self._tree.folders.get(self._path, {}):
                raise ReservationRevoked(f"{self.location}: {scratch!r} was taken away")
            held = self._folder().get(name)
            if held is not None and held.content != over:
                raise FileExistsError(f"{self.location}: {name!r} is taken")
            self._must_not_be_a_folder(name)
            self._folder().pop(scratch)
            self._folder()[name] = _File(bytes(data), self._tree.clock.wall_s())

    def delete(self, name: str) -> None:
        """Remove a file. No error if it is missing."""
        check_name(name)
        with self._tree.lock:
            self._tree.folders.get(self._path, {}).pop(name, None)

    def remove(self) -> None:
        """Remove this folder if it is empty; no error if it is missing or not empty."""
        with self._tree.lock:
            if self._path and not self.list():
                self._tree.folders.pop(self._path, None)

    def files(self) -> dict[str, bytes]:
        """Return the content of every file from this folder down, by relative path.

        This is the back door of tests: it does not go through any other call.
        """
        depth = len(self._path)
        with self._tree.lock:
            return {
                "/".join((*path[depth:], name)): file.content
                for path, folder in self._tree.folders.items()
                if path[:depth] == self._path
                for name, file in folder.items()
            }

    def folders(self) -> set[str]:
        """Return every folder below this one, by relative path."""
        depth = len(self._path)
        with self._tree.lock:
            return {
                "/".join(path[depth:])
                for path in self._tree.folders
                if path[:depth] == self._path and len(path) > depth
            }

    def poke(self, path: str, content: bytes) -> None:
        """Put ``content`` at a relative path behind everyone's back, to plant or damage a file.

        Folders on the way are made. A path that ends in ``/`` makes the folder only.
        """
        *folders, name = path.split("/")
        tier = self
        for folder in folders:
            tier = tier.child(folder)
        tier.make()
        if name:
            tier.replace(name, content, scratch=name + ".scratch")

    def _folder(self) -> dict[str, _File]:
        folder = self._tree.folders.get(self._path)
        if folder is None:
            raise FileNotFoundError(f"{self.location}: no such folder")
        return folder

    def _content(self, name: str) -> bytes:
        check_name(name)
        with self._tree.lock:
            file = self._tree.folders.get(self._path, {}).get(name)
            if file is None:
                self._must_not_be_a_folder(name)
                raise FileNotFoundError(f"{self.location}: no file {name!r}")
            return file.content

    def _add(self, name: str, content: bytes) -> None:
        with self._tree.lock:
            self._must_be_free(name)
            self._folder()[name] = _File(content, self._tree.clock.wall_s())

    def _must_be_free(self, name: str) -> None:
        check_name(name)
        if name in self._folder() or (*self._path, name) in self._tree.folders:
            raise FileExistsError(f"{self.location}: {name!r} is taken")

    def _must_not_be_a_folder(self, name: str) -> None:
        if (*self._path, name) in self._tree.folders:
            raise IsADirectoryError(f"{self.location}: {name!r} is a folder")


def check_name(name: str) -> None:
    """Refuse what is not a plain file name, so that no test passes by luck on a path.

    Raises:
        ValueError: ``name`` is empty, a dot name, or has a separator in it.
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"not a plain file name: {name!r}")
