"""Removes what dead attempts left, and expired checkpoints. Deletes only names that we gave."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from dcp_checkfreq.format import names
from dcp_checkfreq.format.digest import identity
from dcp_checkfreq.recovery.files import is_published, named_files, named_in
from dcp_checkfreq.storage.tier import Entry, Tier, abort_uploads

_log = logging.getLogger(__name__)

YOUNG_S = 60.0  # files younger than this may belong to a save that the lease does not show yet
# A process that is stopped for longer than this in the middle of its commit counts as dead.
_STUCK_S = 86_400.0


def leftovers(entries: Iterable[Entry], named: AbstractSet[str], *, before_s: float) -> list[str]:
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
    young_s: float = YOUNG_S,
    spared: AbstractSet[str] = frozenset(),
) -> list[str]:
    """Remove the leftovers in every step folder and return what was removed.

    Only for a run that holds the lease. A folder whose ``.metadata`` cannot be read is left alone,
    and so are files named in ``spared``, links, and folders in which a save has begun lately. A
    folder that resists stops nothing. On object stores, unfinished uploads go too.
    """
    before_s = now_s - young_s
    removed = abort_uploads(root, _is_shard_of_a_step, before_s=before_s)
    for entry in root.list():
        if not entry.is_folder or entry.is_link:
            continue
        try:
            if names.parse_step(entry.name) is not None:
                gone = _clean_step(root.child(entry.name), before_s, spared)
            elif entry.name == names.RUN_FOLDER:
                gone = _clean_run_folder(root.child(entry.name), before_s)
            else:
                continue
        except OSError as error:
            _log.warning("%s/%s: leftovers stay: %s", root.location, entry.name, error)
            continue
        removed += [f"{entry.name}/{name}" for name in gone]
    if removed:
        _log.info("%s: removed %d files of dead attempts", root.location, len(removed))
    return removed


def _clean_step(folder: Tier, before_s: float, spared: AbstractSet[str]) -> list[str]:
    named = named_files(folder)
    if named is None:
        return []
    entries = folder.list()
    doomed = leftovers(entries, named | spared, before_s=before_s)
    if not doomed or not _revoke_all(folder, entries, before_s):
        return []
    folder.sync()
    # What has committed until now is in .metadata; nothing can any more.
    named = named_files(folder)
    if named is None:
        return []
    gone = []
    for name in doomed:
        if name in named:
            continue
        if not named and is_published(folder):
            # A restarted job has finished the upload of a staged save, whose shards have the names
            # that they had: this process was stopped meanwhile.
            break
        folder.delete(name)
        gone.append(name)
    if not named:
        folder.sync()
        folder.remove()
    return gone


def _revoke_all(folder: Tier, entries: Iterable[Entry], before_s: float) -> bool:
    """Take the right to commit away from all saves in a folder; False if one may be alive.

    Its shards have other names than its right to commit, so it is all of them or none.
    """
    saves = [entry for entry in entries if names.parse_scratch(entry.name)]
    if any(save.modified_s >= before_s for save in saves):
        return False
    for save in saves:
        revoked = folder.revoke(names.METADATA, scratch=save.name)
        if not revoked and save.modified_s >= before_s - _STUCK_S:
            return False
    return True


def _clean_run_folder(folder: Tier, before_s: float) -> list[str]:
    doomed = [
        entry.name
        for entry in folder.list()
        if not entry.is_folder
        and entry.modified_s < before_s
        and names.is_scratch_of_run(entry.name)
    ]
    for name in doomed:
        folder.delete(name)
    return doomed


def _is_shard_of_a_step(path: str) -> bool:
    step, _, name = path.rpartition("/")
    return names.parse_step(step) is not None and names.parse_shard(name) is not None


@dataclass(frozen=True, slots=True)
class KnownSteps:
    """Checkpoints of a root as a run knows them: others may have taken their names since."""

    root: Tier
    identities: Mapping[str, str]  # by folder name: see `format.digest.identity`


def delete_step(steps: KnownSteps, name: str) -> bool:
    """Delete a checkpoint: first it stops being one, durably, then its files go.

    Only if it is still the one that is known, which is looked up right before. What is gone
    already counts as deleted. Of a link only the link goes. Files that ``.metadata`` does not name
    stay, and with them the folder: another save may be under way there.

    Returns:
        False, and nothing was deleted, if another checkpoint is there, or none that can be read.

    Raises:
        OSError: the storage failed; what is left is no checkpoint any more, or a whole one.
    """
    entry = next((entry for entry in steps.root.list() if entry.name == name), None)
    if entry is not None and entry.is_link:
        steps.root.delete(name)
        steps.root.sync()
        return True
    folder = steps.root.child(name)
    try:
        content = folder.read(names.METADATA)
        named = named_in(content, folder.location)
        if named is None or identity(content) != steps.identities[name]:
            return False
        folder.delete(names.METADATA)
        folder.sync()
    except FileNotFoundError:
        return True
    for file in sorted(named):
        folder.delete(file)
    folder.remove()
    return True
