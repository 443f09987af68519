"""Takes back, on all ranks' behalf, what saves have left that DCP did not call to an end.

DCP tells a writer nothing of the failure of another rank. But a thread carries out one save at a
time: when the coordinator begins another one in it, or the thread has ended, the save before can be
published no more, and all of its files may go.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque

from dcp_checkfreq.commit.attempt import SaveAttempt
from dcp_checkfreq.format import names
from dcp_checkfreq.recovery.files import named_files
from dcp_checkfreq.staging.staged_tier import StagedTier
from dcp_checkfreq.storage.tier import Tier

_log = logging.getLogger(__name__)

# Of this process, with the threads that carry them out. What failed long ago is left to cleaning.
_begun: deque[tuple[SaveAttempt, threading.Thread]] = deque(maxlen=64)


def remember(attempt: SaveAttempt) -> None:
    """Take note of an attempt that this thread, on the coordinator, carries out from now on."""
    _begun.append((attempt, threading.current_thread()))


def sweep_up(folder: Tier) -> None:
    """Remove what saves have left that came to no end. Before a save, in its own thread.

    Only next to ``folder``, where that save goes: another storage may be the one that has failed.
    """
    root = _root_of(folder)
    for _ in range(len(_begun)):
        try:
            attempt, worker = _begun.popleft()
        except IndexError:  # another thread was faster
            return
        if attempt.may_be_published or attempt.reserved_by != os.getpid():
            continue  # the parent of a forked child looks after its own
        is_over = worker is threading.current_thread() or not worker.is_alive()
        if not is_over or _root_of(attempt.tier) != root:
            _begun.append((attempt, worker))
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
    if isinstance(folder, StagedTier):
        return  # what is on the remote side may be needed by a save that the local disks still hold
    attempt.abandon()
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
        folder.remove()  # else a disk that stays full gets one more folder with every save
    if doomed:
        _log.info("%s: removed %d files of a failed save", folder.location, len(doomed))
