"""A run comes into a root: who else is at work there, and what dead attempts left is removed."""

from __future__ import annotations

import errno
import logging
import uuid
from collections.abc import Set as AbstractSet

from dcp_checkfreq.recovery.choose import Newcomer
from dcp_checkfreq.recovery.clean import clean_root
from dcp_checkfreq.recovery.lease import LeaseFile, RunLease
from dcp_checkfreq.recovery.root_check import is_read_only
from dcp_checkfreq.recovery.root_id import make_root_id
from dcp_checkfreq.storage.tier import Tier

_log = logging.getLogger(__name__)


def take_over(
    root: Tier, lease: LeaseFile, *, now_s: float, spared: AbstractSet[str]
) -> tuple[Newcomer, RunLease | None]:
    """Begin a history in a root: take the lease, and remove leftovers, unless another run is there.

    A storage that cannot be written to can still be read: what fails is logged.

    Args:
        root: of the run.
        lease: of the run; gets the id of the history.
        now_s: seconds since the epoch.
        spared: files that stay.

    Returns:
        Who begins a history, and another run that may be at work there.
    """
    run_id = uuid.uuid4().hex[:12]
    # It may be in the root without a step of its own yet: its first save must not be in the way.
    other = lease.begin(run_id)
    new = Newcomer(run_id, frozenset() if other is None else frozenset([other]))
    try:
        holder = lease.held_by_other()
    except OSError as error:
        _log.warning(
            "%s: the lease cannot be read, so nothing is cleaned up: %s", root.location, error
        )
        return new, None
    if holder is not None:
        _log.warning(
            "%s: run %s on %s (pid %d) may still be at work there; nothing is cleaned up",
            *(root.location, holder.run_id, holder.host, holder.pid),
        )
    elif _take_lease(root, lease):
        _clean(root, now_s, spared)
    return new, holder


def _clean(root: Tier, now_s: float, spared: AbstractSet[str]) -> None:
    try:
        clean_root(root, now_s=now_s, spared=spared)
    except OSError as error:
        _log.warning("%s: leftovers stay for now: %s", root.location, error)
    try:
        make_root_id(root)
    except OSError as error:
        _log.warning("%s: it has no id for now: %s", root.location, error)


def _take_lease(root: Tier, lease: LeaseFile) -> bool:
    """Return whether this run may clean up: on a full disk that has to come before the lease.

    Between the two another run may begin; its files are too young to be removed.
    """
    try:
        lease.renew()
    except OSError as error:
        if is_read_only(error):
            return False  # said when this run began
        _log.warning("%s: no lease was taken: %s", root.location, error)
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return True
