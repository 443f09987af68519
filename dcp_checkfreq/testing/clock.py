"""A clock that moves only when a test says so."""

from __future__ import annotations

import threading


class ManualClock:
    """A `Clock` set by hand. Both of its times start where the test puts them; thread-safe."""

    def __init__(self, *, wall_s: float = 1_700_000_000.0, monotonic_s: float = 0.0) -> None:
        self._lock = threading.Lock()
        self._wall_s = wall_s
        self._monotonic_s = monotonic_s

    def wall_s(self) -> float:
        """Return the seconds since the epoch that were last set."""
        with self._lock:
            return self._wall_s

    def monotonic_s(self) -> float:
        """Return the seconds advanced so far, counted from the given start."""
        with self._lock:
            return self._monotonic_s

    def advance(self, seconds_s: float) -> None:
        """Move both times forward together.

        Raises:
            ValueError: ``seconds_s`` is negative or not a number; no time was moved.
        """
        if not seconds_s >= 0:
            raise ValueError(f"monotonic time never goes back, got {seconds_s}")
        with self._lock:
            self._wall_s += seconds_s
            self._monotonic_s += seconds_s

    def sleep(self, seconds_s: float) -> None:
        """Let the time pass without waiting for it."""
        self.advance(seconds_s)

    def set_wall(self, wall_s: float) -> None:
        """Make the wall clock jump, forward or back, as when an operator or NTP sets it."""
        with self._lock:
            self._wall_s = wall_s
