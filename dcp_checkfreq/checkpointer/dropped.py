"""What is given back when a `Checkpointer` is closed, or dropped without that."""

from __future__ import annotations

import contextlib
import os
import weakref
from dataclasses import dataclass

from dcp_checkfreq.checkpointer.saver import Saver
from dcp_checkfreq.checkpointer.stopping import Stopping
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.recovery.lease import LeaseFile
from dcp_checkfreq.snapshot.optimizer_guard import Guard


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a `Checkpointer` has of the process, of other ranks and of the storage."""

    guard: Guard
    stopping: Stopping
    saver: Saver
    lease: LeaseFile
    ranks: Ranks

    def close(self) -> None:
        """Give it all back, when the save in flight has ended; all of it, whatever is raised."""
        with contextlib.ExitStack() as parts:  # the last one comes first
            parts.callback(self._release)
            parts.callback(self.stopping.close)
            parts.callback(self.guard.close)
            self.saver.close()

    def if_dropped(self, owner: object) -> weakref.finalize:  # type: ignore[type-arg]
        """Give it all back if ``owner`` is collected, as far as it is this process's to give.

        The save in flight goes on, and nothing waits for it but the end of the process. Call
        `detach` of what is returned when ``owner`` is closed.
        """
        finalizer = weakref.finalize(owner, self._give_up, os.getpid())
        finalizer.atexit = False  # before that it is closed
        return finalizer

    def _give_up(self, pid: int) -> None:
        if pid == os.getpid():
            self.guard.close()
            self.stopping.close()
            self.saver.retire(self._release)

    def _release(self) -> None:
        if self.ranks.rank == 0 and not self.saver.has_given_up:  # it would hang as well
            self.lease.release()
        self.ranks.close()
