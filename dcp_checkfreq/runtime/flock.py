"""Files held by flock, so that a hold ends with the process that has it, however it ends."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator

from dcp_checkfreq.runtime.clock import Clock

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02


class HeldFile:
    """An open file and the lock that this process has on it. Close it to release the lock.

    A lock belongs to the open file, which a forked child inherits: without care, a child would
    keep the locks of its parent alive after the parent's death. Children close these files.
    """

    def __init__(self, path: str, flags: int, mode: int = 0o666) -> None:
        """Open the file; it is not locked yet.

        Raises:
            OSError: it cannot be opened.
        """
        self.path = path
        with _forking:  # no fork between the call and the entry in the set
            self.fd = os.open(path, flags | os.O_CLOEXEC, mode)
            _held.add(self)

    def try_lock(self, *, shared: bool) -> bool:
        """Lock it, or change the lock that is there; False if another open file holds it."""
        try:
            fcntl.flock(self.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def lock_within(self, wait_s: float, clock: Clock, *, shared: bool) -> None:
        """Lock it, trying for so long: a holder that was stopped must not stop everybody else.

        Raises:
            TimeoutError: another process still has it.
        """
        until_s = clock.monotonic_s() + wait_s
        for pause_s in pauses():
            if self.try_lock(shared=shared):
                return
            if clock.monotonic_s() >= until_s:
                raise TimeoutError(f"{self.path} is locked for more than {wait_s:g} s")
            clock.sleep(pause_s)

    def is_at(self, path: str) -> bool:
        """Tell whether the path names this file, and not another one that took its place."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def size_bytes(self) -> int:
        """Return the size of the file now."""
        return os.fstat(self.fd).st_size

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the parent of this process."""
        return self.fd < 0

    def close(self) -> None:
        """Close it, and release the lock. Nothing happens the second time or in a child."""
        with _forking:
            if self in _held:
                _held.remove(self)
                os.close(self.fd)
                self.fd = -1


def pauses() -> Iterator[float]:
    """Yield how long to wait between tries, in seconds: short at first, without an end."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def flock_works(folder: str) -> bool:
    """Tell whether files in this folder can be locked at all; makes and removes a small file.

    Two open files of one process must be in each other's way, as flock promises. Where they are
    not (many mounts of Lustre, GPFS and NFS), a cache would evict what its own threads read, so
    this asks for more than a child process that fails to take the lock would.

    Raises:
        OSError: no file can be made there.
    """
    path = os.path.join(folder, f"probe.{os.getpid()}.{threading.get_ident()}")
    first = HeldFile(path, os.O_RDWR | os.O_CREAT)
    try:
        second = HeldFile(path, os.O_RDWR)
        try:
            return first.try_lock(shared=False) and not second.try_lock(shared=True)
        except OSError:
            return False  # not even offered
        finally:
            second.close()
    finally:
        os.unlink(path)
        first.close()


# Process-wide, as fork is: what a child must close, and what holds a fork back meanwhile.
_forking = threading.RLock()  # again: a signal handler may come here while its thread is here
_held: set[HeldFile] = set()


def _close_all_in_child() -> None:
    for file in _held:
        os.close(file.fd)  # leaves the parent's lock alone: only the last close lets go
        file.fd = -1
    _held.clear()
    _forking.release()


os.register_at_fork(
    before=_forking.acquire,
    after_in_parent=_forking.release,
    after_in_child=_close_all_in_child,
)
