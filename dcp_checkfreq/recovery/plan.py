"""What a scan means: which step to resume, which are rejected and why, which history goes on. Pure.

Order is by step number. Time plays no part: a copied checkpoint is as good as the original.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dcp_checkfreq.format.index import Record
from dcp_checkfreq.format.names import step_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What a scan found out about one step folder."""

    name: str  # of the folder
    step: int
    problem: str | None  # why it is not whole; None: whole
    published: bool = True  # whether there is a ``.metadata``, whatever is in it
    identity: str = ""  # of the ``.metadata``'s bytes (`format.digest.identity`); empty: none
    attempt: str = ""
    world_size: int = 0
    run_id: str = ""  # empty: stock DCP wrote it, or a writer without a Checkpointer
    abandons: Mapping[str, int] = field(default_factory=dict)  # see `format.index.Lineage`


def step_record(
    name: str,
    step: int,
    problem: str | None,
    record: Record | None,
    *,
    published: bool,
    identity: str = "",
) -> StepRecord:
    """Return what a folder's ``record`` says of it; None: it has none, or it cannot be read.

    A record that was made for another step is a problem, whatever else is right: its state is not
    that of the step that the folder's name tells.
    """
    if record is None:
        return StepRecord(
            name=name, step=step, problem=problem, published=published, identity=identity
        )
    if problem is None and record.step is not None and record.step != step:
        problem = f"it is step {record.step} in a folder of step {step}: copied or renamed"
    lineage = record.lineage
    return StepRecord(
        name=name,
        step=step,
        problem=problem,
        published=published,
        identity=identity,
        attempt=record.attempt,
        world_size=record.world_size,
        run_id=lineage.run_id if lineage else "",
        abandons=lineage.abandons if lineage else {},
    )


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
    found = sorted(records, key=lambda r: (-r.step, r.name != step_folder(r.step), r.name))
    left = _left_behind([record for record in found if record.problem is None])
    candidates: list[StepRecord] = []
    rejected: list[Rejected] = []
    taken: dict[int, str] = {}
    for record in found:
        reason = record.problem
        if reason is None and record.name in left:
            reason = f"an abandoned branch: {left[record.name]} went on from an earlier step"
        if reason is None and record.step in taken:
            reason = f"the same step as {taken[record.step]}"
        if reason is not None:
            rejected.append(Rejected(record.name, record.step, reason))
            continue
        taken[record.step] = record.name
        candidates.append(record)
    return Ranking(tuple(candidates), tuple(rejected))


def _left_behind(whole: Sequence[StepRecord]) -> dict[str, str]:
    """Return, by folder name, which living record left it. A record that was left has no say."""
    known: dict[str, str | None] = {}

    def who_left(record: StepRecord) -> str | None:
        if record.name not in known:
            known[record.name] = None  # later runs leave earlier ones; only damage makes a circle
            for other in whole:
                first = other.abandons.get(record.run_id) if record.run_id else None
                if first is not None and first <= record.step and who_left(other) is None:
                    known[record.name] = other.name
                    break
        return known[record.name]

    return {record.name: by for record in whole if (by := who_left(record)) is not None}


def abandoned_by(resumed: StepRecord | None, records: Sequence[StepRecord]) -> dict[str, int]:
    """Return the `abandons` of a run that goes on from ``resumed`` (None: from nothing).

    Every whole step behind that point, of any run, belongs to a history that is left behind, and
    so does all of a run that had itself left the step which is now resumed.
    """
    first = 0 if resumed is None else resumed.step + 1
    abandons = {} if resumed is None else dict(resumed.abandons)
    for record in records:
        if record.problem is not None:
            continue
        if record.step >= first or (resumed is not None and record.run_id == resumed.run_id):
            abandons[record.run_id] = min(first, abandons.get(record.run_id, first))
        left_from = record.abandons.get(resumed.run_id) if resumed is not None else None
        if resumed is not None and left_from is not None and left_from <= resumed.step:
            abandons[record.run_id] = 0
    abandons.pop("", None)
    return abandons
