"""Creates the commit record on a tier, and finds out what happened when the answer is lost."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping

from dcp_checkfreq.commit.standing import standing
from dcp_checkfreq.errors import PublishUnknown, SaveFailed
from dcp_checkfreq.format.names import METADATA, scratch_metadata
from dcp_checkfreq.runtime.clock import Clock
from dcp_checkfreq.storage.eventual import look_again
from dcp_checkfreq.storage.local.abilities import REFUSALS
from dcp_checkfreq.storage.tier import Reservation, Tier

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

_LOOKS = 5  # at a checkpoint that may be replaced, while others replace it as well


def reserve(tier: Tier, attempt: str) -> Reservation:
    """Make the folder, and on it the right to commit. Before any rank writes into it.

    Raises:
        OSError: the storage failed; at most an empty folder was made.
    """
    scratch = scratch_metadata(attempt)
    tier.make()
    try:
        return tier.reserve(METADATA, scratch=scratch)
    except FileNotFoundError:
        tier.make()  # cleaning has removed the folder, which was empty still
        return tier.reserve(METADATA, scratch=scratch)


def publish(
    tier: Tier,
    record: bytes,
    *,
    reservation: Reservation,
    files: Mapping[str, int],
    may_replace: Callable[[], bool] | None,
    clock: Clock,
) -> bytes | None:
    """Make ``record`` the commit record of the folder. On return the checkpoint is durable.

    Args:
        tier: the folder.
        record: content of ``.metadata``.
        reservation: that was made before any of ``files`` was written.
        files: that ``record`` names, with their sizes in bytes.
        may_replace: asked if a checkpoint is there; None: it may not be replaced.
        clock: for the wait for files that show up late.

    Returns:
        the record that was replaced; None if there was none.

    Raises:
        CheckpointExists: another checkpoint is there, and may not be replaced.
        SaveFailed: a file is gone, or the storage refused; nothing was created.
        PublishUnknown: no clear answer, also not on a second look. Delete nothing.
    """
    try:
        _check_files(tier, files, clock)
    except OSError as error:
        raise _not_looked_at(tier, error) from error
    for _ in range(_LOOKS):
        over = _replaceable(tier, may_replace)
        try:
            reservation.commit(record, over=over)
        except FileExistsError:
            if may_replace is None:
                break
            continue  # another one was published since we looked: may that be replaced, too?
        except OSError as error:
            _settle(tier, record, error)
        except BaseException as interrupt:
            # It may have struck after the record was created. Every rank must hear that, not only
            # this one, because every rank deletes its files after a failure that is certain.
            raise PublishUnknown(tier.location, f"interrupted by {interrupt!r}") from interrupt
        return over
    raise standing(tier)


def _replaceable(tier: Tier, may_replace: Callable[[], bool] | None) -> bytes | None:
    """Return the record that is there, if it may be replaced; None if there is none."""
    if may_replace is None:
        return None  # the commit itself finds out
    try:
        over = tier.read(METADATA)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _not_looked_at(tier, error) from error
    if not may_replace():
        raise standing(tier)
    return over


def _not_looked_at(tier: Tier, error: OSError) -> SaveFailed:
    why = f"what is there could not be looked at before the commit: {error}"
    return SaveFailed(tier.location, why)


def _check_files(tier: Tier, files: Mapping[str, int], clock: Clock) -> None:
    """Make sure that all that the record will name is there.

    A look and no lock: what cleaning takes away after it, `Reservation.commit` notices.
    """
    sizes = {entry.name: entry.size_bytes for entry in tier.list() if not entry.is_folder}
    for name, wanted in files.items():
        try:
            size = sizes.get(name)
            if size is None:  # another rank's, which a listing may show late
                size = look_again(tier, lambda name=name: tier.size(name), clock)  # type: ignore[misc]
        except FileNotFoundError:
            raise SaveFailed(
                tier.location, f"{name}, which this save had written, is gone. {_WHO}"
            ) from None
        if size != wanted:
            raise SaveFailed(
                tier.location,
                f"{name} has {size} bytes, this save had written {wanted}. {_WHO}",
            )


_WHO = "Another process has changed this folder; earlier checkpoints were not touched by this save"


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
    if error.errno == errno.ENOENT or isinstance(error, FileNotFoundError):
        raise SaveFailed(
            tier.location,
            "another process has cleaned up here while this save was under way, so that its "
            f"files may be gone ({error})",
        ) from error
    if error.errno in _REFUSED:
        raise SaveFailed(
            tier.location, f"the commit record could not be written: {error}"
        ) from error
    raise PublishUnknown(tier.location, str(error)) from error
