"""The end of a save: the ranks meet, and all hear what it came to and what rank 0 decides.

Each holds its training loop at the gate for a moment, so that `Ended.at` is a step that no rank has
reached yet, and all of them act on it at the same one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from dcp_checkfreq.checkpointer.background_save import BackgroundWork, Ended, save_failed
from dcp_checkfreq.errors import RankLost
from dcp_checkfreq.policy.observation import summarise
from dcp_checkfreq.policy.save_timings import SaveTimings
from dcp_checkfreq.policy.tuner import Decision
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.ranks.meeting import is_agreed
from dcp_checkfreq.ranks.step_gate import Gate
from dcp_checkfreq.runtime.error_reports import ErrorReport, as_ours, report_of
from dcp_checkfreq.runtime.outcome import report

_log = logging.getLogger(__name__)

Decide = Callable[[list[SaveTimings]], Decision | None]


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank says when a save has ended on it."""

    failure: ErrorReport | None
    timings: SaveTimings | None  # None: not known


def meet(
    job: BackgroundWork, error: BaseException | None, ranks: Ranks, gate: Gate, decide: Decide
) -> None:
    """Tell the other ranks, hear what rank 0 decides, and from which step on it holds.

    Args:
        job: what has ended; this is filled in.
        error: how, on this rank.
        ranks: which all call this.
        gate: that the training thread passes.
        decide: see `Saver`.
    """
    if isinstance(error, RankLost):
        job.ended = Ended(job.timings, 0, error)
        return

    def own() -> _Said:
        failure = None
        if error is not None:
            doing, wrap = "saving", save_failed(job.step)
            failure = report_of(error, ranks.rank, doing, wrap, named=not is_agreed(error))
        try:
            if job.iterations is not None:
                job.timings = replace(job.timings, interval=summarise(job.iterations()))
            return _Said(failure, job.timings)
        except Exception as failed:  # noqa: BLE001  all ranks hear of it
            report(_log.exception, "step %d: what it cost is not known", job.step)
            own_errors.append(failed)
            doing = "telling what a save cost"
            return _Said(failure or report_of(failed, ranks.rank, doing), None)

    def rule(of_ranks: list[_Said]) -> tuple[ErrorReport | None, Decision | None]:
        failure = next((said.failure for said in of_ranks if said.failure is not None), None)
        timings = [said.timings for said in of_ranks if said.timings is not None]
        if job.iterations is None or len(timings) < len(of_ranks):
            return failure, None
        try:
            return failure, decide(timings)
        except Exception as failed:  # noqa: BLE001  all ranks hear of it
            # Told like a failed save, so that all ranks hear of it at the same step.
            report(_log.exception, "step %d: when to save next could not be decided", job.step)
            own_errors.append(failed)
            return failure or report_of(failed, 0, "deciding when to save next", named=False), None

    own_errors = [] if error is None else [error]
    # First wait for the slowest rank, and only then hold the training for a moment.
    failure, decision = ranks.combine("ending a save", own, rule)
    heard: BaseException | None = None
    if failure is not None:
        heard = own_errors[0] if own_errors else None
        if heard is None or not (ranks.is_alone or is_agreed(heard)):
            heard = failure.rebuilt()
            heard.__cause__ = own_errors[0] if own_errors else None
        heard = as_ours(heard, save_failed(job.step))
    passed = gate.hold()
    try:
        at = ranks.reduce_on_rank_0(passed, max) + 1
        # Before the gate opens: the very next step may be the one to act on it.
        job.ended = Ended(job.timings, at, heard, decision)
    finally:
        gate.release()
