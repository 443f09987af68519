"""The last save after an error of the training loop: of the last complete step, if it is intact."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from statistics import median

from dcp_checkfreq.checkpointer.last_step import LastStep
from dcp_checkfreq.checkpointer.registered import Registered
from dcp_checkfreq.checkpointer.run import Run
from dcp_checkfreq.checkpointer.save_loop import SaveLoop
from dcp_checkfreq.errors import SaveFailed, SnapshotFailed
from dcp_checkfreq.runtime.error_reports import text_of
from dcp_checkfreq.runtime.outcome import report

_log = logging.getLogger(__name__)

_JUDGED = 20  # marks, of which half may be slow
_MOST_SHARE = 0.005  # of a step: what following its state may take


class LastWords:
    """Saves the last complete step when the loop ends by an error, or says why not.

    Args:
        run: whose ranks, if there are several, do not agree on it yet: then nothing is saved.
        last: complete step.
        loop: saves.
        parts: what is saved.
    """

    def __init__(self, run: Run, last: LastStep, loop: SaveLoop, parts: Registered) -> None:
        self._is_alone, self._clock = run.ranks.is_alone, run.clock
        self._last, self._loop, self._parts = last, loop, parts
        self._saves = -1
        self._is_dear = False
        self._marks_s: list[tuple[float, float]] = []  # begin and end of the last ones
        self._pid = os.getpid()

    def mark(self, step: int) -> None:
        """Say that ``step`` is complete, unless marks take too much of the steps' time."""
        if not self._is_alone or self._is_dear:
            return
        begun_s = self._clock.monotonic_s()
        self._last.mark(step, anew=self._saves != self._loop.begun)
        self._saves = self._loop.begun
        self._marks_s.append((begun_s, self._clock.monotonic_s()))
        if len(self._marks_s) == _JUDGED:
            self._is_dear = _are_dear(self._marks_s)
            self._marks_s.clear()

    def speak(
        self,
        error: BaseException,
        step: int,
        why_no_time: Callable[[float], str | None],
    ) -> None:
        """Act on an error of the loop, and raise none: that one must come out.

        Who interrupts or ends the program wants out: that begins no save.

        Args:
            error: that ends the loop.
            step: that was begun last, as far as it is known.
            why_no_time: returns why a save that takes so many seconds would not end in time.
        """
        if not isinstance(error, Exception) or self._pid != os.getpid() or not step:
            return
        why: str | None = None
        try:
            self._loop.finish_in_flight(must_raise=True)
        except Exception as failed:  # noqa: BLE001  it is said, and the other one comes out
            why = text_of(failed)
            report(_log.error, "while leaving because of another error: %s", why)
            why = f"the save in flight has failed: {why}"
        published = self._loop.last_step
        if published == step:
            report(_log.warning, "after %s: step %d is saved already", type(error).__name__, step)
            return
        why = why or self._why_not(error, step) or why_no_time(self._loop.last_took_s())
        if why is None:
            try:
                self._loop.save_last(step, lambda: self._last.capture(self._parts.capture()))
            except Exception as failed:  # noqa: BLE001  the same
                why = text_of(failed)
        if why is None:
            report(_log.warning, "after %s: step %d was saved", type(error).__name__, step)
        else:
            report(
                _log.error,
                "after %s: step %d is not saved: %s. The last published step is %s",
                *(type(error).__name__, step, why, published),
            )

    def _why_not(self, error: Exception, step: int) -> str | None:
        if not self._is_alone:
            return "several ranks do not agree on a save after an error yet"
        if isinstance(error, (SaveFailed, SnapshotFailed)):
            return "saving is what has failed"
        if self._is_dear:
            return f"following the state would take more than {_MOST_SHARE:.1%} of each step"
        if self._last.step != step:
            return "the step has not ended"
        return self._last.why_not_intact()


def _are_dear(marks_s: list[tuple[float, float]]) -> bool:
    """Tell whether the median mark takes too much of the median step; a mark: begin and end."""
    took_s = median(end_s - begun_s for begun_s, end_s in marks_s)
    step_s = median(later[0] - one[0] for one, later in itertools.pairwise(marks_s))
    return took_s > _MOST_SHARE * step_s
