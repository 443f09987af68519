"""The end of a save: the ranks meet, and all hear what it came to and what rank 0 decides.

Each holds its training loop at the gate for a moment, so that `Ended.at` is a step that no rank has
reached yet, and all of them act on it at the same one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dcp_checkfreq.checkpointer.background_save import BackgroundWork, save_failed
from dcp_checkfreq.errors import RankLost
from dcp_checkfreq.policy.save_record import Ended
from dcp_checkfreq.policy.tuner import Decision
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.ranks.meeting import is_agreed
from dcp_checkfreq.ranks.step_gate import Gate
from dcp_checkfreq.runtime.outcome import report
from dcp_checkfreq.runtime.told import Told, as_ours, tell

_log = logging.getLogger(__name__)

Decide = Callable[[int, list[Any]], Decision | None]


@dataclass(frozen=True, slots=True)
class _Said:
    """What a rank says when a save has ended on it."""

    told: Told | None
    facts: Any
    knows: bool  # whether there are facts


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
        job.ended = Ended(job.step, 0, error, None)
        return

    def own() -> _Said:
        told = None
        if error is not None:
            doing, wrap = "saving", save_failed(job.step)
            told = tell(error, ranks.rank, doing, wrap, named=not is_agreed(error))
        try:
            return _Said(told, job.facts and job.facts(), knows=True)
        except Exception as failed:  # noqa: BLE001  all ranks hear of it
            report(_log.exception, "step %d: what it cost is not known", job.step)
            own_errors.append(failed)
            doing = "telling what a save cost"
            return _Said(told or tell(failed, ranks.rank, doing), None, knows=False)

    def rule(of_ranks: list[_Said]) -> tuple[Told | None, Decision | None]:
        told = next((said.told for said in of_ranks if said.told is not None), None)
        if job.facts is None or not all(said.knows for said in of_ranks):
            return told, None
        try:
            return told, decide(job.step, [said.facts for said in of_ranks])
        except Exception as failed:  # noqa: BLE001  all ranks hear of it
            # Told like a failed save, so that all ranks hear of it at the same step.
            report(_log.exception, "step %d: when to save next could not be decided", job.step)
            own_errors.append(failed)
            return told or tell(failed, 0, "deciding when to save next", named=False), None

    own_errors = [] if error is None else [error]
    # First wait for the slowest rank, and only then hold the training for a moment.
    told, decision = ranks.combine("ending a save", own, rule)
    heard: BaseException | None = None
    if told is not None:
        heard = own_errors[0] if own_errors else None
        if heard is None or not (ranks.is_alone or is_agreed(heard)):
            heard = told.rebuilt()
            heard.__cause__ = own_errors[0] if own_errors else None
        heard = as_ours(heard, save_failed(job.step))
    passed = gate.hold()
    try:
        at = ranks.reduce_on_rank_0(passed, max) + 1
        # Before the gate opens: the very next step may be the one to act on it.
        job.ended = Ended(job.step, at, heard, decision)
    finally:
        gate.release()
