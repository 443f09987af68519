"""Measures the iterations of this rank: on the host's clock, or on the GPU's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from dcp_checkfreq.policy.observation import Iteration
from dcp_checkfreq.runtime.clock import Clock
from dcp_checkfreq.runtime.marks import Mark, MarkPair, marker, seconds_between, sum_of


@dataclass(slots=True)
class Lap:
    """The marks of one iteration, in order."""

    left: Mark  # from here on the loop was held up, until
    begun: Mark  # the iteration began; it was done when
    is_loaded: bool
    is_copying: bool
    ended: Mark = None  # `after_step` was called. If that waited for the save before:
    waited: list[MarkPair] = field(default_factory=list)
    # The loop was held up in between, by a save that was asked for; some of it only to wait.
    pauses: list[MarkPair] = field(default_factory=list)
    queued: list[MarkPair] = field(default_factory=list)
    waits: list[MarkPair] = field(default_factory=list)
    updates: list[MarkPair] = field(default_factory=list)

    def iteration(self) -> Iteration | None:
        """Return what it took; None if it, or the GPU, is not done."""
        if self.ended is None:
            return None
        seconds = seconds_between(self.begun, self.ended)
        held_up = seconds_between(self.left, self.begun)
        if seconds is None or held_up is None:
            return None
        pauses, waited = sum_of(self.pauses), sum_of(self.waited)
        return Iteration(
            seconds=seconds - pauses,
            blocked_s=held_up + pauses + waited,
            waited_s=sum_of(self.waits),
            update_s=sum_of(self.updates),
            loaded=self.is_loaded,
            copying=self.is_copying,
            queued_s=waited + sum_of(self.queued),
        )


class StepTimer:
    """What the iterations of this rank took, and what of it was waiting for saves.

    With CUDA moments are events on the training stream, which cost nothing to record and tell how
    long the GPU took. Used by the training thread, but for `resolve`.
    """

    def __init__(self, clock: Clock, *, gpu: torch.device | None) -> None:
        self.mark = marker(clock, gpu)
        # With a long interval the oldest are let go: thousands are enough for a median.
        self._laps: deque[Lap] = deque(maxlen=4096)
        self._entered: Mark = None
        self._accounted: Mark = None
        self._paused: Mark = None
        self._waiting: Mark = None
        self._waits: list[MarkPair] = []  # since the last save

    def enter(self) -> None:
        """Say that `after_step` was called: an iteration is done."""
        self._entered = self._accounted = self.mark()
        if self._laps:
            self._laps[-1].ended = self._entered

    def exit(self, *, is_loaded: bool, is_copying: bool) -> None:
        """Say that `after_step` returns, with a save under way, and its snapshot, or without."""
        now = self.mark()
        self._laps.append(Lap(self._accounted or now, now, is_loaded, is_copying))

    def add_save_wait(self) -> None:
        """Say that `after_step` has waited until now for the save before."""
        self._accounted = self.mark()
        if self._laps and self._laps[-1].ended is self._entered:
            self._laps[-1].waited = [(self._entered, self._accounted)]

    def pause(self) -> None:
        """Say that `save` was called: the iteration is held up until `resume`."""
        self._paused = self.mark()

    def start_wait(self) -> None:
        """Say that `save` has begun one, and only waits from now on."""
        self._waiting = self.mark()

    def resume(self, *, is_loaded: bool, is_copying: bool) -> None:
        """Say that `save` returns, see `exit`."""
        now = self.mark()
        if self._laps:
            lap = self._laps[-1]
            lap.pauses.append((self._paused, now))
            if self._waiting is not None:
                lap.queued.append((self._waiting, now))
            lap.is_loaded |= is_loaded
            lap.is_copying |= is_copying
        self._paused = self._waiting = None

    def add_wait(self, begun: Mark, ended: Mark) -> None:
        """Take note that an update waited for a snapshot."""
        self._waits.append((begun, ended))
        if self._laps:
            self._laps[-1].waits.append((begun, ended))

    def add_update(self, begun: Mark, ended: Mark) -> None:
        """Take note of an update (Tw)."""
        if self._laps:
            self._laps[-1].updates.append((begun, ended))

    def take(self) -> list[Lap]:
        """Return the iterations since the last call. Call it when a save is about to begin.

        What `after_step` has waited for until now counts for the last of them; what the save holds
        the loop up from now on counts for the first one after it.
        """
        if self._paused is None:
            self.add_save_wait()
        laps = list(self._laps)
        self._laps.clear()
        self._waits.clear()
        if self._paused is not None and laps:  # the iteration that is held up goes on afterwards
            running = laps.pop()
            running.queued.append((self._paused, self.mark()))
            self._laps.append(running)
        return laps

    def waited_s(self) -> float:
        """Return for how long updates have waited for the last snapshot, as far as is known."""
        return sum_of(self._waits)

    def resolve(self, laps: list[Lap]) -> list[Iteration]:
        """Return what iterations took, as far as the GPU is done with them. On any thread."""
        return [one for lap in laps if (one := lap.iteration()) is not None]
