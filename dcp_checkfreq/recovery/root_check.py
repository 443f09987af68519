"""Whether all ranks see one root, and whether it can be written to: reading needs no writing."""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection

from dcp_checkfreq.errors import BadLocation, RootDiffers
from dcp_checkfreq.format import names
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.runtime.clock import Clock
from dcp_checkfreq.storage.eventual import look_again
from dcp_checkfreq.storage.tier import Tier

_log = logging.getLogger(__name__)

_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def check_root(root: Tier, ranks: Ranks, run_id: str, clock: Clock) -> None:
    """Make sure that all ranks see what rank 0 writes: else nothing would ever be whole.

    A root that cannot be written to (read-only, full, without inodes) can still be restored from:
    that is said once, and the ranks compare what they find there instead.

    Raises:
        RootDiffers: some do not.
        BadLocation: there is nothing in the root, and nothing can be written to it.
    """
    folder = root.child(names.RUN_FOLDER)
    probe = f"probe-{run_id}"
    there = ranks.on_rank_0(
        lambda: _leave_probe(root, folder, probe), "looking whether all ranks see the root"
    )
    sees_it = _sees_probe(folder, probe, clock) if there is None else _sees(root, there, clock)
    blind = [rank for rank, sees in enumerate(ranks.all_gather(sees_it)) if not sees]
    if ranks.rank == 0 and there is None:
        try:
            folder.delete(probe)
        except OSError as error:
            _log.warning("%s/%s stays for now: %s", folder.location, probe, error)
    if blind:
        raise RootDiffers(
            root.location,
            f"ranks {blind} do not see what rank 0 {'writes' if there is None else 'sees'} there. "
            "Is it a disk of one node? All ranks need the same shared folder",
        )


def _leave_probe(root: Tier, folder: Tier, probe: str) -> frozenset[str] | None:
    """On rank 0: leave a file for the others to see. If that cannot be: return what is there."""
    try:
        folder.make()
        folder.replace(probe, b"", scratch=f"{probe}.tmp")
    except OSError as error:
        there = frozenset(entry.name for entry in root.list())
        if not there & _known(there):
            raise BadLocation(
                root.location, f"it holds no checkpoint, and cannot be written to: {error}"
            ) from error
        tell_unwritable(root, error)
        return there
    return None


def _known(entries: Collection[str]) -> frozenset[str]:
    """Return the names that this package may have given."""
    return frozenset(n for n in entries if n == names.RUN_FOLDER or names.parse_step(n) is not None)


def _sees_probe(folder: Tier, probe: str, clock: Clock) -> bool:
    try:
        look_again(folder, lambda: folder.size(probe), clock)
    except OSError:
        return False
    return True


def _sees(root: Tier, there: frozenset[str], clock: Clock) -> bool:
    """Tell whether this rank sees anything of what rank 0 sees: all of it may change meanwhile."""

    def look() -> None:
        if there.isdisjoint(entry.name for entry in root.list()):
            raise FileNotFoundError(errno.ENOENT, "nothing of it is here", root.location)

    try:
        look_again(root, look, clock)
    except OSError:
        return False
    return True


def tell_unwritable(root: Tier, error: OSError) -> None:
    """Say that a root can be read only, or not now: what is meant, and what has gone wrong."""
    if error.errno in _READ_ONLY:
        _log.info(
            "%s cannot be written to (%s): restore() works, there is no lease and no cleaning, and "
            "a save will fail",
            *(root.location, error),
        )
    else:
        _log.warning(
            "%s: nothing can be written there now (%s); restore() goes on without",
            *(root.location, error),
        )


def is_read_only(error: OSError) -> bool:
    """Tell whether writing is not allowed, rather than impossible at the moment."""
    return error.errno in _READ_ONLY
