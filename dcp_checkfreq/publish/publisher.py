"""Creates the commit record on a tier, and finds out what happened when the answer is lost."""

from __future__ import annotations

import errno

from dcp_checkfreq.errors import CheckpointExists, PublishUnknown, SaveFailed
from dcp_checkfreq.format.names import METADATA, scratch_metadata
from dcp_checkfreq.storage.abilities import REFUSALS
from dcp_checkfreq.storage.tier import Tier

# Errors after which the storage is sure that it created nothing.
_REFUSED = REFUSALS | {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.EFBIG,
}


def publish(tier: Tier, record: bytes, *, attempt: str, overwrite: bool) -> None:
    """Make ``record`` the commit record of the folder. On return the checkpoint is durable.

    Raises:
        CheckpointExists: another checkpoint is there, and ``overwrite`` is False.
        SaveFailed: the storage refused; nothing was created.
        PublishUnknown: no clear answer, also not on a second look. Delete nothing.
    """
    commit = tier.replace if overwrite else tier.create
    try:
        commit(METADATA, record, scratch=scratch_metadata(attempt))
    except FileExistsError as error:
        raise CheckpointExists(tier.location) from error
    except OSError as error:
        _settle(tier, record, error)
    except BaseException as interrupt:
        # It may have struck after the record was created. Every rank must hear that, not only
        # this one, because every rank deletes its files after a failure that is certain.
        raise PublishUnknown(tier.location, f"interrupted by {interrupt!r}") from interrupt


def _settle(tier: Tier, record: bytes, error: OSError) -> None:
    """After an unclear answer: return if ``record`` is there and durable, raise otherwise."""
    try:
        # After an I/O error a second sync may succeed although the first one lost the data.
        if error.errno != errno.EIO and tier.read(METADATA) == record:
            tier.sync()
            return
    except FileNotFoundError:
        pass
    except OSError as second:
        raise PublishUnknown(tier.location, f"{error}, then {second}") from error
    if error.errno in _REFUSED:
        raise SaveFailed(
            tier.location, f"the commit record could not be written: {error}"
        ) from error
    raise PublishUnknown(tier.location, str(error)) from error
