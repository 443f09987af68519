"""Removes what dead attempts left, and expired checkpoints. Deletes only names that we gave."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from dcp_checkfreq.errors import LoadFailed
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.format import names
from dcp_checkfreq.storage.tier import Entry, Tier, abort_uploads

_log = logging.getLogger(__name__)

GRACE_S = 60.0  # files younger than this may belong to a save that the lease does not show yet


def leftovers(entries: Iterable[Entry], named: set[str], *, before_s: float) -> list[str]:
    """Return the files of dead attempts in a step folder. Pure.

    Args:
        entries: what is in the folder.
        named: files that the folder's ``.metadata`` names; empty if there is none.
        before_s: files modified at or after this are spared.
    """
    return [
        entry.name
        for entry in entries
        if not entry.is_folder
        and entry.name not in named
        and entry.modified_s < before_s
        and (names.parse_shard(entry.name) or names.parse_scratch(entry.name))
    ]


def clean_root(
    root: Tier,
    *,
    now_s: float,
    grace_s: float = GRACE_S,
    spared: AbstractSet[str] = frozenset(),
) -> list[str]:
    """Remove the leftovers in every step folder and return what was removed.

    Only for a run that holds the lease. A folder whose ``.metadata`` cannot be read is left alone,
    and so are files named in ``spared``. On object stores, uploads that were never finished go too.
    """
    removed = abort_uploads(root, _is_shard_of_a_step, before_s=now_s - grace_s)
    for entry in root.list():
        if names.parse_step(entry.name) is None or not entry.is_folder:
            continue
        folder = root.child(entry.name)
        named = named_files(folder)
        if named is None:
            continue
        doomed = leftovers(folder.list(), named | spared, before_s=now_s - grace_s)
        for name in doomed:
            folder.delete(name)
            removed.append(f"{entry.name}/{name}")
        if doomed and not named:
            folder.sync()
            folder.remove()
    if removed:
        _log.info("%s: removed %d files of dead attempts", root.location, len(removed))
    return removed


def _is_shard_of_a_step(path: str) -> bool:
    step, _, name = path.rpartition("/")
    return names.parse_step(step) is not None and names.parse_shard(name) is not None


def named_files(folder: Tier) -> set[str] | None:
    """Return the files that the folder's ``.metadata`` names; none if there is no ``.metadata``.

    None if it cannot be read: then nothing is known of the files, and none may go.
    """
    try:
        metadata, _ = metadata_format.load(metadata_format.content_of(folder), folder.location)
    except FileNotFoundError:
        return set()
    except LoadFailed:
        return None
    return {info.relative_path for info in (metadata.storage_data or {}).values()}


def delete_step(root: Tier, name: str) -> None:
    """Delete a checkpoint: first it stops being one, durably, then its files go.

    Files that ``.metadata`` does not name and that are not ours stay, and with them the folder.
    """
    folder = root.child(name)
    named = named_files(folder)
    if named is None:
        return
    folder.delete(names.METADATA)
    folder.sync()
    for entry in folder.list():
        ours = names.parse_shard(entry.name) or names.parse_scratch(entry.name)
        if entry.name in named or ours:
            folder.delete(entry.name)
    folder.remove()
