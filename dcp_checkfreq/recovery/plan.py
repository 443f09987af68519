"""What a scan means: which step to resume, which are rejected and why, which history goes on. Pure.

Order is by step number. Time plays no part: a copied checkpoint is as good as the original.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What a scan found out about one step folder."""

    name: str  # of the folder
    step: int
    problem: str | None  # why it is not whole; None: whole
    published: bool = True  # whether there is a ``.metadata``, whatever is in it
    attempt: str = ""
    world_size: int = 0
    run_id: str = ""  # empty: stock DCP wrote it, or a writer without a Checkpointer
    abandons: Mapping[str, int] = field(default_factory=dict)  # see `format.index.Lineage`


@dataclass(frozen=True, slots=True)
class Rejected:
    """A step folder that was passed over."""

    name: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ranking:
    """Whole checkpoints of the living history, newest first, and all others with the reason."""

    candidates: tuple[StepRecord, ...]
    rejected: tuple[Rejected, ...]


def rank(records: Iterable[StepRecord]) -> Ranking:
    """Order what a scan found.

    Whole steps come newest first; of several spellings of one step the usual one counts. A step
    that a later history left behind (`abandons`) is rejected, and so is everything not whole.
    """
    found = sorted(records, key=lambda record: (-record.step, -len(record.name), record.name))
    whole = [record for record in found if record.problem is None]
    first_abandoned: dict[str, tuple[int, str]] = {}
    for record in whole:
        for run_id, step in record.abandons.items():
            known = first_abandoned.get(run_id)
            if known is None or step < known[0]:
                first_abandoned[run_id] = (step, record.name)
    candidates: list[StepRecord] = []
    rejected: list[Rejected] = []
    taken: dict[int, str] = {}
    for record in found:
        reason = record.problem
        left = first_abandoned.get(record.run_id) if record.run_id else None
        if reason is None and left is not None and record.step >= left[0]:
            reason = f"an abandoned branch: {left[1]} went on from an earlier step"
        if reason is None and record.step in taken:
            reason = f"the same step as {taken[record.step]}"
        if reason is not None:
            rejected.append(Rejected(record.name, record.step, reason))
            continue
        taken[record.step] = record.name
        candidates.append(record)
    return Ranking(tuple(candidates), tuple(rejected))


def abandoned_by(resumed: StepRecord | None, records: Sequence[StepRecord]) -> dict[str, int]:
    """Return the `abandons` of a run that goes on from ``resumed`` (None: from nothing).

    Every whole step behind that point, of any run, belongs to a history that is left behind.
    """
    first = 0 if resumed is None else resumed.step + 1
    abandons = {} if resumed is None else dict(resumed.abandons)
    runs = {record.run_id for record in records if record.problem is None and record.step >= first}
    if resumed is not None:
        runs.add(resumed.run_id)
    for run_id in runs - {""}:
        abandons[run_id] = min(first, abandons.get(run_id, first))
    return abandons
