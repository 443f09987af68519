"""Waiting for a storage that may never come back: as long as something moves, and no longer.

Nothing in Python ends a system call that hangs. So it is made in a thread that nobody has to wait
for, neither now nor when the process ends, and a caller gives up after a while.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from dcp_checkfreq.ranks.watchdog import Watchdog
from dcp_checkfreq.runtime.crew import Crew, Task

_log = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 0.5

Failed = Callable[[str], BaseException]  # makes an error of a text


def wait_for(task: Task[Any], watchdog: Watchdog, failed: Failed) -> None:
    """Wait for the end of a task, however long it takes, as long as the storage does something.

    Raises:
        BaseException: what ``failed`` makes of what the storage does not come back from. The task
            goes on if it ever does.
    """
    if task.is_nobodys:
        task.run()  # there are no threads any more: then it is done here, without a limit
    while not task.wait(_POLL_S):
        give_up_if_stuck(watchdog, failed)


def give_up_if_stuck(watchdog: Watchdog, failed: Failed) -> None:
    """Raise what ``failed`` makes of what the storage does not come back from, if there is that."""
    text = watchdog.stuck()
    if text is not None:
        raise failed(f"the storage does not come back: rank {watchdog.rank} {text}")


class Asking:
    """One piece of work that asks the storage for something, and may be given up.

    Args:
        watchdog: of this rank.
        failed: makes the error that is raised then.
    """

    def __init__(self, watchdog: Watchdog, failed: Failed) -> None:
        self._watchdog, self._failed = watchdog, failed
        self._given_up: BaseException | None = None

    @property
    def is_given_up(self) -> bool:
        """Whether it may go on behind everybody's back, and use what it was given."""
        return self._given_up is not None

    def moved(self) -> None:
        """Say that the storage has done something. On the thread of the work.

        Raises:
            BaseException: nobody waits for it any more: it must touch nothing.
        """
        if self._given_up is not None:
            raise self._given_up
        self._watchdog.moved()

    def run(self, work: Callable[[], T], phase: str, where: str) -> T:
        """Do it in another thread, but for the last moments of a process; return its result.

        Args:
            work: calls `moved`.
            phase: what is done, for `Watchdog.doing`.
            where: and where.
        """
        # The crew goes at once, as nobody refers to it, and its thread when that is through.
        return self.result_of(Crew(1, "checkfreq-storage").start(work), phase, where)

    def result_of(self, task: Task[T], phase: str, where: str) -> T:
        """Do the same for what somebody does already."""
        with self._watchdog.doing(phase, where, in_storage=True):
            try:
                wait_for(task, self._watchdog, self._giving_up)
            except BaseException:
                # After Ctrl-C, too: what it does may be at odds with what comes next.
                if self._given_up is None:
                    wait_for(task, self._watchdog, self._giving_up)
                raise
        return task.result()

    def _giving_up(self, text: str) -> BaseException:
        self._given_up = self._failed(text)
        return self._given_up
