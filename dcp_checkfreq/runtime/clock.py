"""The one place that reads the time, so that every rule can be tested with a hand-set clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What the package needs to know about time."""

    def wall_s(self) -> float:
        """Seconds since the epoch. May jump; only for leases and grace periods."""
        ...

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start. Never goes back; for durations."""
        ...

    def sleep(self, seconds_s: float) -> None:
        """Do nothing for so long."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def wall_s(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def monotonic_s(self) -> float:
        """Return seconds on a clock that never goes back."""
        return time.monotonic()

    def sleep(self, seconds_s: float) -> None:
        """Block this thread."""
        time.sleep(seconds_s)
