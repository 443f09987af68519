"""What a mount can do besides taking files: tried out once per mount and process, logged once.

FUSE mounts of object stores, cloud volumes and some network file systems refuse one or another of
the calls that a durable, exclusive commit is made of. A refusal is an answer: nothing was done, and
there is another way, which promises less.

`LocalTier` asks `abilities_of` for its folder before it writes. What `create` and `replace` do:

- `link`: the commit is a hard link, which is exclusive.
- else `rename_exclusively`: a rename that refuses to replace (renameat2), as exclusive as a link.
- else `rename`: look, then rename. `replace` is always a rename where there is one.
- else nothing of the kind (`commits_whole` is False): the file is written under its own name,
  opened exclusively; a crash in the midst of that leaves it cut short, which its trailer shows.

A mount may still refuse later what it could do when it was tried (`is_refusal`): the next way of
the list is then as good. Only the content of a file that is closed can be counted on there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass

from dcp_checkfreq.format import names

_log = logging.getLogger(__name__)

# What mounts answer to a call that they do not offer: nothing was done. EIO, ENOSPC, ETIMEDOUT and
# their like are none of these: they say that something went wrong.
REFUSALS = frozenset(
    {
        errno.EPERM,
        errno.EACCES,
        errno.EINVAL,
        errno.EXDEV,
        errno.EMLINK,
        errno.ENOSYS,
        errno.ENOTTY,
        errno.ENOLCK,
        errno.EOPNOTSUPP,
        errno.ENOTSUP,
    }
)
# A folder that is open for reading may count as a file that cannot be synced.
REFUSALS_OF_FOLDERS = REFUSALS | {errno.EBADF, errno.EISDIR}

_FULL = {errno.ENOSPC, errno.EDQUOT}  # says nothing about the next time

_WAY_OUT = (
    ". With staging_dir= on a local disk checkpoints are whole and durable there first, and an "
    "upload that is cut off is finished at the next start (docs/staged.md)"
)

RENAME_NOREPLACE = 1
AT_FDCWD = -100
_PAGE_BYTES = 4096

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a mount can do. Each is True only if it was tried and worked."""

    fsync: bool = True  # of files
    fsync_folders: bool = True
    link: bool = True
    rename: bool = True  # also over a file that is there
    rename_exclusively: bool = True
    fallocate: bool = True  # by itself, and not by writing into every block
    direct_io: bool = True

    @property
    def commits_whole(self) -> bool:
        """Whether a file can appear under its name with all of its content at once."""
        return self.link or self.rename_exclusively or self.rename

    @property
    def commits_exclusively(self) -> bool:
        """Whether of two writers of one name exactly one wins, on all machines."""
        return self.link or self.rename_exclusively

    def lacks(self) -> str:
        """Return what of the promises cannot be kept, as a sentence; empty if all can."""
        lacking = []
        if not self.fsync:
            lacking.append(
                "without fsync a power loss or a crash of the server can take back a checkpoint "
                "that was reported as saved"
            )
        elif not self.fsync_folders:
            lacking.append(
                "without fsync of folders a power loss can take back the name of a checkpoint that "
                "was reported as saved, unless the mount keeps names by itself"
            )
        if not self.commits_exclusively:
            lacking.append(
                "without hard links and exclusive renames two runs that save the same step at the "
                "same moment are not distinguished"
            )
        if not self.commits_whole:
            lacking.append(
                "without renames a crash in the moment of the commit leaves a .metadata that is "
                "cut short, which is seen and passed over, and while a checkpoint is overwritten "
                "there is none for a moment"
            )
        return "; ".join(lacking)


def is_refusal(error: OSError) -> bool:
    """Tell whether the mount does not offer the call, so that nothing was done."""
    return error.errno in REFUSALS


_known: dict[int, Abilities] = {}  # by device: a mount does not learn while it is mounted


def abilities_of(folder: str, *, is_staged: bool = False) -> Abilities:
    """Return what the mount of an existing, writable folder can do; tried out the first time.

    That makes two small files, which are removed again: a process that is killed meanwhile leaves
    temporary commit records (`names.parse_scratch`), which the next cleaning removes. It takes
    about 16 calls, two of them syncs, so call it where writing is done: not in the training thread.

    Args:
        folder: where files will be written.
        is_staged: a local disk is in front of it, so that the warning need not lead there.

    Raises:
        OSError: no file can be made there now (read-only, full): nothing is known.
    """
    device = os.stat(folder).st_dev
    known = _known.get(device)
    if known is None:
        # No lock: a mount that does not answer must not hold up the others. Two threads may try
        # the same one at once; the first to end tells.
        found = try_out(folder)
        known = _known.setdefault(device, found)
        if known is found:
            _tell(folder, found, is_staged=is_staged)
    return known


def doubt(folder: str) -> None:
    """Have the mount of a folder tried out again: it has refused what it was known to do.

    Another one may be mounted in its place by now, and devices get the numbers of those before.
    """
    with contextlib.suppress(OSError):
        _known.pop(os.stat(folder).st_dev, None)


def forget() -> None:
    """Try every mount anew: for tests, and after something else is mounted in the same place."""
    _known.clear()


def _tell(folder: str, can: Abilities, *, is_staged: bool) -> None:
    lacks = can.lacks()
    mount = _mount_of(folder)
    if not lacks:
        _log.debug("%s: %s", mount, can)
        return
    _log.warning(
        "%s: this mount cannot do all that a checkpoint's promises need: %s. Everything else "
        "holds%s",
        mount,
        lacks,
        "" if is_staged else _WAY_OUT,
    )


def _mount_of(folder: str) -> str:
    path = os.path.realpath(folder)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def try_out(folder: str) -> Abilities:
    """Try everything in a folder and leave nothing behind. See `abilities_of`."""
    first = os.path.join(folder, names.scratch_metadata(names.new_attempt()))
    second = os.path.join(folder, names.scratch_metadata(names.new_attempt()))
    try:
        fd = os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fallocate = _does(lambda: _fallocate(fd, _PAGE_BYTES), may_fail=True)
            os.write(fd, b"checkfreq")
            fsync = _does(lambda: os.fsync(fd))
        finally:
            os.close(fd)
        direct_io = _does(lambda: _write_and_read_directly(first), may_fail=True)
        link = _does(lambda: os.link(first, second))
        if link:
            os.unlink(second)
        # The kernel itself answers that a name is taken, so a free one has to be tried as well.
        exclusively = _does(lambda: rename_exclusively(first, second))
        rename = exclusively or _does(lambda: os.rename(first, second))
        if rename:
            os.close(os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            exclusively = exclusively and _refuses_to_replace(first, second)
            try:
                rename = _does(lambda: os.rename(first, second))
            except FileExistsError:
                rename = False
            except FileNotFoundError:
                exclusively = False  # it has replaced although it must not
    finally:
        for path in filter(os.path.lexists, (first, second)):
            os.unlink(path)
    return Abilities(
        fsync=fsync,
        fsync_folders=_does(lambda: _sync_folder(folder)),
        link=link,
        rename=rename,
        rename_exclusively=exclusively,
        fallocate=fallocate,
        direct_io=direct_io,
    )


def _does(call: Callable[[], object], *, may_fail: bool = False) -> bool:
    """Tell whether a call works; errors that are no refusals are raised, unless it ``may_fail``."""
    try:
        call()
    except OSError as error:
        if error.errno in _FULL or not (may_fail or error.errno in REFUSALS_OF_FOLDERS):
            raise
        return False
    return True


def _fallocate(fd: int, size_bytes: int) -> None:
    """Fallocate proper: that of the C library writes into every block where there is none."""
    if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _write_and_read_directly(path: str) -> None:
    with mmap.mmap(-1, _PAGE_BYTES) as page:
        for flags, move in ((os.O_WRONLY, os.pwritev), (os.O_RDONLY, os.preadv)):
            fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
            try:
                if move(fd, [page], 0) != _PAGE_BYTES:
                    raise OSError(errno.EINVAL, "moved less than a page", path)
            finally:
                os.close(fd)


def _refuses_to_replace(source: str, target: str) -> bool:
    try:
        rename_exclusively(source, target)
    except FileExistsError:
        return True
    except OSError as error:
        if not is_refusal(error):
            raise
    return False


def rename_exclusively(source: str, target: str) -> None:
    """Rename if ``target`` is free (renameat2).

    Raises:
        FileExistsError: it is not.
        OSError: see `is_refusal`; also where the C library does not know the call.
    """
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), target)
    outcome = libc.renameat2(
        AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), RENAME_NOREPLACE
    )
    if outcome:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)  # of the type that belongs to the code


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
