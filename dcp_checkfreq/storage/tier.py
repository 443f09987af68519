"""What a storage must be able to do, and what each call promises.

A tier is one folder. Names are plain file names inside it (no separators); `child` goes down.
All promises are those that a crash or power loss cannot take back, unless said otherwise.

A missing name raises `FileNotFoundError`, a taken one `FileExistsError`; anything else that goes
wrong is the storage's own `OSError`. Tiers hold no locks and no cached listings: every call asks
the storage. All calls may be made from several threads at once.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class StaleCredentials(PermissionError):
    """The credentials ran out in the middle of a write, which left nothing.

    New ones will be asked for at the next call: a caller that has the content should try again.
    """


class OddFile(OSError):
    """Not a file that can be what its name says: a fifo or device, or one of an absurd size.

    Nothing was read. Unlike with other errors there is no point in asking again.
    """


# At least so fast is a call that has a whole file to bring somewhere: fsync, or close on a mount.
SLOWEST_BYTES_PER_S = 10e6

LARGEST_SMALL_FILE_BYTES = 4 << 30  # `.metadata` of ten million tensors


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a folder. What it says of a link is true of what the link leads to."""

    name: str
    is_folder: bool
    size_bytes: int  # 0 for folders and special files
    modified_s: float  # seconds since the epoch by the storage's clock; never decides validity
    is_link: bool = False  # to read through, never to delete through: its target is someone else's
    is_special: bool = False  # a fifo, socket or device: never opened


@runtime_checkable
class RangeReader(Protocol):
    """An open file. Close it when done; may be shared by threads."""

    size_bytes: int

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``[offset, offset + len(target))``.

        Raises:
            EOFError: the file ends before that range does; ``target`` is then undefined.
        """
        ...

    def close(self) -> None:
        """Give the file back. May be called twice."""
        ...


class ReservationRevoked(FileNotFoundError):
    """Someone has taken the right to commit away: what the record would name may be gone.

    Nothing was created.
    """


class Reservation(Protocol):
    """The right to commit one record, from the start of a save on; used by one thread at a time.

    It is kept on the storage, where other processes can see it and `Tier.revoke` it. Commit and
    revocation exclude each other: of the two, only the first has an effect.
    """

    def commit(self, data: bytes, *, over: bytes | None) -> None:
        """Make the reserved name exist with exactly ``data``: atomically and durably.

        Args:
            data: the record.
            over: what the name may hold until now, to be replaced by ``data``. None: nothing.

        Raises:
            FileExistsError: the name holds something else, which stays. Nothing was created, and
                the same record may be committed again.
            ReservationRevoked: nothing was created, and nothing can be any more.
            OSError: anything else leaves it open whether the record was created.
        """
        ...

    def cancel(self) -> None:
        """Give it up. No error if it was used, cancelled or revoked."""
        ...


class _HoldsScratch(Protocol):
    def commit_scratch(self, name: str, data: bytes, scratch: str, over: bytes | None) -> None:
        """Fill the file ``scratch``, which must be there, and make it ``name``."""
        ...

    def delete(self, name: str) -> None:
        """See `Tier.delete`."""
        ...


class ScratchReservation:
    """A reservation that is a file of its own: its removal is the revocation."""

    def __init__(self, tier: _HoldsScratch, name: str, scratch: str) -> None:
        self._tier, self._name, self._scratch = tier, name, scratch

    def commit(self, data: bytes, *, over: bytes | None) -> None:
        """Make the file the reserved name; see `Reservation.commit`."""
        self._tier.commit_scratch(self._name, data, self._scratch, over)

    def cancel(self) -> None:
        """Remove the file."""
        self._tier.delete(self._scratch)


@runtime_checkable
class Tier(Protocol):
    """One folder of a storage."""

    @property
    def location(self) -> str:
        """Where this is, as a person would write it."""
        ...

    def child(self, name: str) -> Tier:
        """Return the tier of the folder ``name`` inside this one. Touches nothing."""
        ...

    def make(self) -> None:
        """Make this folder and its parents exist, durably. No error if they do.

        Where folders are only parts of names (object stores) there is nothing to make, and a
        folder is listed from its first file to its last.
        """
        ...

    def list(self) -> list[Entry]:
        """Return what is in the folder, in no order; empty if the folder is missing."""
        ...

    def size(self, name: str) -> int:
        """Return the exact size of a file in bytes."""
        ...

    def read(self, name: str) -> bytes:
        """Return the whole content of a small file. See `read_small`, which has a bound.

        Raises:
            OddFile: it is no regular file, or too large to be read whole.
        """
        ...

    def open(self, name: str) -> RangeReader:
        """Open a file for ranged reads."""
        ...

    def write_shard(self, name: str, pieces: Iterable[memoryview], size_bytes: int) -> None:
        """Write a new file from ``pieces``, which add up to ``size_bytes``.

        ``pieces`` is consumed in order by one thread, and each piece must stay unchanged until
        the call returns. On return the content is durable; the name is, after `sync`.
        On any error (also one raised by ``pieces``) no file of that name is left.
        """
        ...

    def sync(self) -> None:
        """Make the names of all files written so far in this folder durable."""
        ...

    def create(self, name: str, data: bytes, *, scratch: str) -> None:
        """Make ``name`` exist with exactly ``data``: atomically, durably, and only if it is absent.

        ``scratch`` is a name that no one else uses, for tiers that need a temporary file.
        Of several callers exactly one wins. An `OSError` other than `FileExistsError` leaves
        it open whether the name was created.
        """
        ...

    def replace(self, name: str, data: bytes, *, scratch: str) -> None:
        """Like `create`, but an existing file is replaced: old content or new, never a mix."""
        ...

    def reserve(self, name: str, *, scratch: str) -> Reservation:
        """Return the right to `create` or `replace` ``name`` later.

        ``scratch`` is a name of its own. Until the reservation is used, cancelled or revoked, a
        file of that name shows that a save is under way here, and since when.
        """
        ...

    def revoke(self, name: str, *, scratch: str) -> bool:
        """Make sure that the reservation ``scratch`` of ``name`` commits nothing from now on.

        What it has committed before this returns can be read. No error if there is none.

        Returns:
            False: it is committing now, and cannot be stopped.
        """
        ...

    def delete(self, name: str) -> None:
        """Remove a file. No error if it is missing. Durable after `sync`."""
        ...

    def remove(self) -> None:
        """Remove this folder if it is empty; no error if it is missing or not empty."""
        ...


def abort_uploads(root: Tier, is_ours: Callable[[str], bool], *, before_s: float) -> list[str]:
    """Abort uploads under ``root`` that a dead process began before ``before_s``.

    Object stores keep, and charge for, the parts of such uploads, and list them nowhere else. Other
    tiers have none.

    Args:
        root: the folder.
        is_ours: tells by the path below it whether an upload may go.
        before_s: seconds since the epoch.

    Returns:
        the paths below ``root``.
    """
    abort = getattr(root, "abort_uploads", None)
    return [] if abort is None else list(abort(is_ours, before_s=before_s))


def disk_of(tier: Tier) -> int | None:
    """Return a number that differs between disks; None where the storage knows of none.

    Of a folder that is missing it is that of the one that would hold it.

    Raises:
        OSError: of the storage.
    """
    disk: Callable[[], int | None] | None = getattr(tier, "disk", None)
    return None if disk is None else disk()


def read_small(tier: Tier, name: str, *, at_most_bytes: int) -> bytes:
    """Return the whole content of a file, whose size is looked at before memory is taken.

    Raises:
        OddFile: it is larger, or no file that can be read.
        OSError: of the storage.
    """
    read = getattr(tier, "read_at_most", None)
    if read is not None:
        return bytes(read(name, at_most_bytes))
    check_size(tier.size(name), at_most_bytes, name)
    return tier.read(name)


def check_size(size_bytes: int, at_most_bytes: int, name: str) -> None:
    """Refuse a file that is larger than it can be.

    Raises:
        OddFile: it is.
    """
    if size_bytes > at_most_bytes:
        text = f"it has {size_bytes} bytes, more than {at_most_bytes} cannot be"
        raise OddFile(errno.EFBIG, text, name)


def reads_at_once(tier: Tier) -> int:
    """Return how many reads at once a tier is best asked for."""
    return int(getattr(tier, "reads_at_once", 2))
