"""Of all iterators that a loader has made, only the newest may hand out batches."""

from __future__ import annotations


class Turns:
    """Numbers the iterators of one loader.

    Args:
        what: names the loader in errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._now = 0

    def begin(self) -> int:
        """Make all iterators stale that there are; return the number of the next one."""
        self._now += 1
        return self._now

    def check(self, turn: int) -> None:
        """Raise RuntimeError if the iterator of this number is stale."""
        if turn != self._now:
            raise RuntimeError(
                f"{self._what}: this iterator is stale: since it was made it failed, a state was "
                "loaded, or a newer iterator was made. Take a new one"
            )
