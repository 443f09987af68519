"""Takes back, on all ranks' behalf, what saves have left that DCP did not call to an end.

DCP tells a writer nothing of the failure of another rank. But once its coordinator is given up or
begins another save, the one before can be published no more, and all of its files may go.
"""

from __future__ import annotations

import logging
import os
from collections import deque

from dcp_checkfreq.format import names
from dcp_checkfreq.publish.attempt import SaveAttempt
from dcp_checkfreq.recovery.files import named_files
from dcp_checkfreq.storage.staged import StagedTier
from dcp_checkfreq.storage.tier import Tier

_log = logging.getLogger(__name__)

# Appended to by finalizers, in any thread. What was given up long ago is left to cleaning.
_given_up: deque[SaveAttempt] = deque(maxlen=64)


def give_up(current: list[SaveAttempt]) -> None:
    """Take note of attempts that their writer carries out no more. Touches no storage."""
    for attempt in current:
        # What is dropped in a forked child may be under way in its parent.
        if attempt.reserved_by == os.getpid() and not attempt.may_be_published:
            _given_up.append(attempt)


def sweep_up(folder: Tier) -> None:
    """Remove what attempts have left that were given up. Before a save, in its own thread.

    Only beside ``folder``, where that save goes: another storage may be the one that has failed.
    """
    root = _root_of(folder)
    for _ in range(len(_given_up)):
        try:
            attempt = _given_up.popleft()
        except IndexError:  # another thread was faster
            return
        if _root_of(attempt.tier) != root:
            _given_up.append(attempt)
            continue
        try:
            _take_back(attempt)
        except OSError as error:
            _log.warning(
                "%s: what a failed save has left stays until the next restore: %s",
                *(attempt.tier.location, error),
            )


def _root_of(folder: Tier) -> str:
    return folder.location.rstrip("/").rpartition("/")[0]


def _take_back(attempt: SaveAttempt) -> None:
    folder = attempt.tier
    attempt.abandon()
    if isinstance(folder, StagedTier):
        return  # what is on the slow side may be needed by a save that the local disks still hold
    entries = [entry for entry in folder.list() if not entry.is_folder]
    if any(names.parse_scratch(entry.name) for entry in entries):
        return  # another save is under way here, and its files look the same
    named = named_files(folder)
    if named is None:
        return
    doomed = [e.name for e in entries if names.parse_shard(e.name) and e.name not in named]
    for name in doomed:
        folder.delete(name)
    if len(doomed) == len(entries):
        folder.remove()
    if doomed:
        _log.info("%s: removed %d files of a failed save", folder.location, len(doomed))
