"""Times iterations on the GPU's clock, with and without saves between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from gpu_jobs import Trainer
from gpu_report import Facts
from gpu_site import Site

LONGEST_SAVE_S = 45.0
UNLOADED = 8  # iterations before each save that tell what one takes


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Saving:
    """How to save, seen from a training loop."""

    begin: Callable[[], None]
    done: Callable[[], bool]  # whether the one that was begun last is on storage
    after_step: Callable[[], None] = _nothing
    before_update: Callable[[], None] = _nothing


class Laps:
    """Runs iterations and tells what each took.

    A lap is from the end of one iteration to the end of the next on the training stream, so it has
    in it what a save does between them. The host is at most two iterations ahead, as in a loop that
    logs its loss.
    """

    def __init__(self, site: Site, job: Trainer) -> None:
        self.site, self.job = site, job

    def run(
        self,
        count: int,
        after_step: Callable[[], None] = _nothing,
        *,
        first: Callable[[], None] = _nothing,
        before_update: Callable[[], None] = _nothing,
        until: Callable[[], bool] | None = None,
        longest_s: float = LONGEST_SAVE_S,
    ) -> list[float]:
        """Run ``count`` iterations, then go on until ``until``; ``first`` is called before them.

        Raises:
            TimeoutError: ``until`` did not come in ``longest_s``.
        """
        site = self.site
        marks = [site.mark()]
        first()
        begun_s = time.monotonic()
        while len(marks) <= count or (until is not None and not until()):
            self.job.compute()
            before_update()
            self.job.optim.step()
            after_step()
            marks.append(site.mark())
            if site.on_gpu and len(marks) > 2:
                marks[-3].synchronize()
            if until is not None and time.monotonic() - begun_s > longest_s:
                raise TimeoutError(f"what was waited for did not come in {longest_s:.0f} s")
        return [site.between(one, other) for one, other in pairwise(marks)]


def stall_of(laps: Laps, saving: Saving, *, saves: int) -> Facts:
    """Return what a save adds to training: medians over saves, and everything measured."""
    base: list[float] = []
    loaded: list[list[float]] = []
    laps.run(2, saving.after_step)
    for _ in range(saves):
        base += laps.run(UNLOADED, saving.after_step)
        loaded.append(
            laps.run(
                1,
                saving.after_step,
                first=saving.begin,
                before_update=saving.before_update,
                until=saving.done,
            )
        )
    iteration_s = median(base)
    stalls = [sum(lap - iteration_s for lap in one) for one in loaded]
    return {
        "iteration_s": iteration_s,
        "stall_s": median(stalls),
        "first_iteration_s": median([one[0] - iteration_s for one in loaded]),
        "loaded_iterations": round(median([len(one) for one in loaded])),
        "stalls_s": stalls,
        "unloaded_s": base,
        "loaded_s": loaded,
    }
