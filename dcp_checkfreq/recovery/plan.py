"""What a scan means: which step to resume, which are rejected and why, whose history continues.

Pure. Order is by step number. Time plays no part: a copied checkpoint is as good as the original.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dcp_checkfreq.format.index import Lineage, Record
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
    parent_step: int | None = None  # what the run went on from
    abandons: Mapping[str, int] = field(default_factory=dict)  # see `format.index.Lineage`
    abandons_folders: Mapping[str, str] = field(default_factory=dict)


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
        parent_step=lineage.parent_step if lineage else None,
        abandons=lineage.abandons if lineage else {},
        abandons_folders=lineage.abandons_folders if lineage else {},
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
    left = _left_behind(_whole(found))
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


def leaves(history: StepRecord | Lineage, record: StepRecord) -> bool:
    """Tell whether ``history`` went on without ``record``, which was there before it began.

    What names the history's own run came after it and cannot have been left by it. So a record
    never leaves itself, whatever is written in it.
    """
    if not record.run_id:
        return record.identity != "" and (
            history.abandons_folders.get(record.name) == record.identity
        )
    first = history.abandons.get(record.run_id)
    return first is not None and first <= record.step and history.run_id not in record.abandons


def _left_behind(whole: Sequence[StepRecord]) -> dict[str, str]:
    """Return, by folder name, which living record left it. A record that was left has no say.

    Later histories leave earlier ones. Only damage makes a circle; what is in one stays.
    """
    histories = [*{_history(record): record for record in whole}.values()]
    number_of = {_history(record): number for number, record in enumerate(histories)}
    own = {record.name: number_of[_history(record)] for record in whole}
    leavers = {
        record.name: [n for n, history in enumerate(histories) if leaves(history, record)]
        for record in whole
    }
    left: dict[str, int] = {}
    living: dict[int, str] = {}  # histories that have a say, with a record of theirs that lives
    undecided = [record.name for record in whole]
    while undecided:
        still = []
        with_hope = {own[name] for name in undecided}
        for name in undecided:
            by = next((number for number in leavers[name] if number in living), None)
            if by is not None:
                left[name] = by
            elif with_hope.isdisjoint(leavers[name]):
                living.setdefault(own[name], name)
            else:
                still.append(name)
        if len(still) == len(undecided):
            break
        undecided = still
    return {name: living[by] for name, by in left.items()}


def _history(record: StepRecord) -> object:
    """Return what is equal for records that leave the same things behind."""
    if not record.run_id:
        return record.name
    return (
        record.run_id,
        frozenset(record.abandons.items()),
        frozenset(record.abandons_folders.items()),
    )


def begin_history(
    run_id: str,
    resumed: StepRecord | None,
    records: Sequence[StepRecord],
    others: Iterable[str] = (),
) -> Lineage:
    """Return the lineage of a new history.

    Args:
        run_id: of the history.
        resumed: what it resumes from; None: from nothing.
        records: all that a scan has found.
        others: runs that are at work, or were, and may have saved nothing yet.
    """
    first = 0 if resumed is None else resumed.step + 1
    abandons = abandoned_by(resumed, records)
    seen = {record.run_id for record in records}
    for other in others:  # of a run of which nothing is there, nothing is part of this history
        from_step = first if other in seen else 0
        abandons[other] = min(from_step, abandons.get(other, from_step))
    history = Lineage(
        run_id=run_id,
        parent_step=None if resumed is None else resumed.step,
        abandons=abandons,
        abandons_folders=abandoned_folders(resumed, records),
    )
    return _remembering(history, resumed, records)


def _remembering(
    history: Lineage, resumed: StepRecord | None, records: Sequence[StepRecord]
) -> Lineage:
    """Return ``history`` so that what is left behind now stays so when those who left it are gone.

    A record hands down what it has left, a step without a run id has nothing to hand down: all
    that is alive is asked, not only what is resumed.
    """
    if resumed is None:
        return history  # leaves everything
    # Who has left what is resumed has no say from now on, nor is anything of theirs alive.
    whole = [record for record in _whole(records) if not leaves(record, resumed)]
    left = _left_behind(whole)
    abandons, folders = dict(history.abandons), dict(history.abandons_folders)

    def leave(run_id: str, first: int) -> None:
        if run_id != resumed.run_id:
            abandons[run_id] = min(first, abandons.get(run_id, first))

    for record in whole:
        if record.name in left and record.run_id:
            leave(record.run_id, record.step)
        elif record.name in left:
            folders[record.name] = record.identity
        elif record.run_id:  # at most part of the past, up to here
            leave(record.run_id, resumed.step + 1)
            for run_id, first in record.abandons.items():
                leave(run_id, first)
            folders = {**record.abandons_folders, **folders}
    return replace(history, abandons=abandons, abandons_folders=folders)


def abandoned_by(resumed: StepRecord | None, records: Sequence[StepRecord]) -> dict[str, int]:
    """Return the `abandons` of a history that resumes from ``resumed`` (None: from nothing).

    Every step behind that point, of any run, belongs to a history that is left behind, whole or
    not: what cannot be read today may be read tomorrow. So does all of a run that had itself left
    the step which is now resumed.
    """
    first = 0 if resumed is None else resumed.step + 1
    abandons = {} if resumed is None else dict(resumed.abandons)
    for record in records:
        if record.run_id and record.step >= first:
            abandons[record.run_id] = min(first, abandons.get(record.run_id, first))
        if record.run_id and resumed is not None and leaves(record, resumed):
            abandons[record.run_id] = 0
    if resumed is not None and resumed.run_id:
        abandons[resumed.run_id] = first  # and no earlier: nothing leaves what it resumes from
    return abandons


def abandoned_folders(resumed: StepRecord | None, records: Sequence[StepRecord]) -> dict[str, str]:
    """Return the `abandons_folders` of such a history: the same for steps without a run id."""
    first = 0 if resumed is None else resumed.step + 1
    left = {} if resumed is None else dict(resumed.abandons_folders)
    left |= {
        record.name: record.identity
        for record in records
        if not record.run_id and record.identity and record.step >= first
    }
    return left


def line_of(history: Lineage, records: Sequence[StepRecord]) -> tuple[StepRecord, ...]:
    """Return what will be the past of ``history`` once it has saved: whole steps, newest first."""
    first = 0 if history.parent_step is None else history.parent_step + 1
    left = _left_behind([*_whole(records), _coming(history, first)])
    return rank(record for record in records if record.name not in left).candidates


def left_by(history: Lineage, step: int, records: Sequence[StepRecord]) -> StepRecord | None:
    """Return which record would make a scan reject ``step`` of ``history``; None: none does."""
    coming = _coming(history, step)
    by = _left_behind([*_whole(records), coming]).get(coming.name)
    return next((record for record in records if record.name == by), None)


def _whole(records: Sequence[StepRecord]) -> list[StepRecord]:
    return [record for record in records if record.problem is None]


def _coming(history: Lineage, step: int) -> StepRecord:
    """Return what ``history`` will have saved, besides all that is there."""
    return replace(record_of(history, step, ""), name="")  # of no folder


def record_of(history: Lineage, step: int, identity: str) -> StepRecord:
    """Return what a scan finds of a step that ``history`` has saved."""
    return StepRecord(
        name=step_folder(step),
        step=step,
        problem=None,
        identity=identity,
        run_id=history.run_id,
        parent_step=history.parent_step,
        abandons=history.abandons,
        abandons_folders=history.abandons_folders,
    )
