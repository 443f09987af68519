"""The disk of a `CrashTier`: what the program sees, and what of it is durable.

See `crash_tier` for the rules.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from dcp_checkfreq.runtime.clock import Clock
from dcp_checkfreq.testing.memory_tier import MemoryTier

Keep: TypeAlias = Literal["none", "all"] | int


class PowerLoss(BaseException):
    """The power failed. Not an `Exception`: a dead machine runs no error handler."""

    def __init__(self, doing: str) -> None:
        super().__init__(doing)
        self.doing = doing

    def __str__(self) -> str:
        return f"power loss at: {self.doing}"


@dataclass(eq=False, slots=True)
class File:
    """Content, of which the first part is durable."""

    seen: bytearray = field(default_factory=bytearray)
    durable_bytes: int = 0  # content only grows, so the durable part is a prefix
    modified_s: float = 0.0

    def sync(self) -> None:
        """Make all of it durable."""
        self.durable_bytes = len(self.seen)


@dataclass(frozen=True, slots=True)
class _Change:
    """One atomic change of a folder's names: new owners by name, None for a removed name."""

    owners: Owners


@dataclass(eq=False, slots=True)
class Folder:
    """Names, as the program sees them and as they are durable."""

    seen: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[_Change] = field(default_factory=list)

    def change(self, owners: Owners) -> None:
        """Give names to other owners; durable after `sync`."""
        _apply(self.seen, owners)
        self.pending.append(_Change(owners))

    def sync(self) -> None:
        """Make all names durable."""
        self.durable = dict(self.seen)
        self.pending.clear()


Owners: TypeAlias = "dict[str, File | Folder | None]"


def _apply(names: dict[str, File | Folder], owners: Owners) -> None:
    for name, owner in owners.items():
        if owner is None:
            names.pop(name, None)
        else:
            names[name] = owner


class Disk:
    """What all tiers of one tree share. Folders and files are touched only under ``lock``."""

    def __init__(
        self, crash_at: int | None, crash_when: Literal["before", "after"], clock: Clock
    ) -> None:
        self.lock = threading.RLock()
        self.root = Folder()
        self.crash_at, self.crash_when = crash_at, crash_when
        self.clock = clock
        self.log: list[str] = []
        self.reached = False
        self.dead: str | None = None  # what was under way when the power failed

    def check_power(self) -> None:
        """Raise `PowerLoss` if the power has failed."""
        if self.dead is not None:
            raise PowerLoss(self.dead)

    def step(self, doing: str, change: Callable[[], None]) -> None:
        """Carry out one mutating step, or lose the power just before or after it."""
        with self.lock:
            self.check_power()
            here = len(self.log) == self.crash_at
            self.reached = self.reached or here
            if here and self.crash_when == "before":
                self.dead = f"step {len(self.log)}, before {doing}"
                raise PowerLoss(self.dead)
            change()
            self.log.append(doing)
            if here:
                self.dead = f"step {self.crash_at}, after {doing}"
                raise PowerLoss(self.dead)


def fill(folder: Folder, start: MemoryTier, now_s: float) -> None:
    """Put what is in ``start`` into the folder, durably."""
    for entry in start.list():
        node: File | Folder
        if entry.is_folder:
            node = Folder()
            fill(node, start.child(entry.name), now_s)
        else:
            content = bytearray(start.read(entry.name))
            node = File(content, durable_bytes=len(content), modified_s=now_s)
        folder.seen[entry.name] = folder.durable[entry.name] = node


def settle(
    folder: Folder,
    tier: MemoryTier,
    keep: Keep,
    chance: random.Random | None,
    settled: dict[File, bytes],
) -> None:
    """Write into ``tier`` what is left of ``folder``. A file linked twice is settled once."""
    names = dict(folder.durable)
    for change in folder.pending:
        if keep == "all" or (chance is not None and chance.random() < 0.5):
            _apply(names, change.owners)
    tier.make()
    for name, node in names.items():
        if isinstance(node, Folder):
            settle(node, tier.child(name), keep, chance, settled)
            continue
        if node not in settled:
            settled[node] = _content_left(node, keep, chance)
        tier.poke(name, settled[node])


def _content_left(file: File, keep: Keep, chance: random.Random | None) -> bytes:
    if keep == "all" or file.durable_bytes == len(file.seen):
        return bytes(file.seen)
    durable = bytes(file.seen[: file.durable_bytes])
    if chance is None:
        return durable
    unsynced_bytes = len(file.seen) - file.durable_bytes
    kept_bytes = chance.choice([0, unsynced_bytes, chance.randint(0, unsynced_bytes)])
    kept = bytes(file.seen[file.durable_bytes : file.durable_bytes + kept_bytes])
    # The length may reach the disk before the content does: then the rest reads as zeros.
    zeros_bytes = chance.choice([0, unsynced_bytes - kept_bytes])
    return durable + kept + bytes(zeros_bytes)
