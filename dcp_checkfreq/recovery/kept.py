"""Checkpoints that a run keeps, and whether they are still there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dcp_checkfreq.format.names import METADATA
from dcp_checkfreq.recovery.scan import examine
from dcp_checkfreq.storage.tier import Tier


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint that retention looks after, as it was when this run published or found it."""

    name: str  # of its folder
    identity: str  # see `format.digest.identity`
    files: Mapping[str, int] | None = None  # with their sizes in bytes; None: see its ``.metadata``


def problem_of(root: Tier, step: int, kept: Kept) -> str | None:
    """Return why a checkpoint is not whole, or not the one that is known; None if it is.

    One listing for what this run has published itself; ``.metadata`` is read for others.

    Raises:
        OSError: the storage failed.
    """
    folder = root.child(kept.name)
    if kept.files is None:
        record = examine(folder, kept.name, step)
        if record.identity != kept.identity:
            return "it is another checkpoint by now, or none"
        return record.problem
    sizes = {entry.name: entry.size_bytes for entry in folder.list() if not entry.is_folder}
    if METADATA not in sizes:
        return "its .metadata is gone"
    for name, size in kept.files.items():
        if sizes.get(name) != size:
            return f"{name} is gone" if name not in sizes else f"{name} has {sizes[name]} bytes"
    return None
