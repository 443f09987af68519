"""Where the training loop can be held for a moment, so that all ranks act at the same step."""

from __future__ import annotations

import threading

from dcp_checkfreq.format import names


def next_step(last: int, given: int | None) -> int:
    """Return the number of the step that is done: ``given``, or one more than the ``last``.

    Raises:
        ValueError: it is before the last one, or has no name on storage.
    """
    done = last + 1 if given is None else given
    if done < last:
        raise ValueError(
            f"step {done} comes after step {last}: steps do not go back. Number the steps of the "
            "whole job, not of an epoch; to go back to a checkpoint, call restore(step=...)"
        )
    names.step_folder(done)  # refuses a number that is too large for a name
    return done


class Gate:
    """Between the training thread of this process and its other threads. Thread-safe.

    The other threads of all ranks can agree on a step without the training threads' help: each
    holds its gate, they tell each other which step passed last, and choose one that has passed
    nowhere. No rank can be beyond it, because none moves until it is released. What a rank waits
    for there does not depend on any training thread, so this cannot deadlock with collectives of
    the training.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holds = 0
        self._passed = 0

    def start_from(self, step: int) -> None:
        """Say which step was the last one, after a restore."""
        with self._changed:
            self._passed = step

    def pass_step(self, step: int) -> None:
        """On the training thread: wait while the gate is held, then let ``step`` pass."""
        with self._changed:
            while self._holds:
                self._changed.wait()
            self._passed = step

    def hold(self) -> int:
        """Let no step pass until `release`; return the last one that did. May be nested."""
        with self._changed:
            self._holds += 1
            return self._passed

    def release(self) -> None:
        """End one `hold`."""
        with self._changed:
            self._holds -= 1
            self._changed.notify_all()
