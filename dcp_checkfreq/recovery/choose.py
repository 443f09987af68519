"""What a run resumes from: looks at a root, applies the rules of `plan`, changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dcp_checkfreq.errors import NoValidCheckpoint, StepNotFound
from dcp_checkfreq.format.index import Lineage
from dcp_checkfreq.recovery.plan import StepRecord, begin_history, line_of, rank
from dcp_checkfreq.recovery.root_id import readable_id_of_root
from dcp_checkfreq.recovery.scan import Depth, check_digests, newest_whole, scan_with
from dcp_checkfreq.storage.tier import Tier


@dataclass(frozen=True, slots=True)
class Choice:
    """A checkpoint to resume from, and what follows for the run that does."""

    record: StepRecord | None  # None: a fresh start
    lineage: Lineage  # of the history that begins here; its run id is of this restore alone
    passed_over: tuple[str, ...]  # newer steps, each with the reason
    kept: dict[int, StepRecord]  # whole steps of the history that continues
    records: Sequence[StepRecord]  # all that was found
    root_id: str | None  # of the root that was looked at


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A run that is about to begin a history."""

    run_id: str  # of the history
    others: frozenset[str] = frozenset()  # runs that may be at work in the root


def choose_nothing(root: Tier, new: Newcomer, also: Sequence[StepRecord] = ()) -> Choice:
    """Choose a fresh start; what is there becomes a history that was left behind."""
    return _begin(root, new, None, scan_with(root, also))


def choose_newest(
    root: Tier,
    new: Newcomer,
    depth: Depth,
    broken: Mapping[str, str],
    also: Sequence[StepRecord] = (),
) -> Choice:
    """Choose the newest whole checkpoint, or a fresh start if none was ever published.

    Args:
        root: of the run.
        new: the run.
        depth: see `find_latest_valid`.
        broken: folders that a load has found damaged, with the reason.
        also: see `scan_with`.

    Raises:
        NoValidCheckpoint: checkpoints were published, but none is whole.
    """
    _, ranking, records = newest_whole(root, depth, also)
    usable = [record for record in ranking.candidates if record.name not in broken]
    newest = usable[0] if usable else None
    reasons = [(passed.step, passed.name, passed.reason) for passed in ranking.rejected]
    reasons += [(r.step, r.name, broken[r.name]) for r in ranking.candidates if r.name in broken]
    passed_over = tuple(
        f"{name}: {reason}"
        for at, name, reason in sorted(reasons, reverse=True)
        if newest is None or at >= newest.step
    )
    if newest is None and (broken or any(record.published for record in records)):
        raise NoValidCheckpoint(
            root.location,
            f"none of its checkpoints is whole ({'; '.join(passed_over)}). Pass fresh_start=True "
            "to start from nothing",
        )
    return _begin(root, new, newest, records, passed_over, without=broken)


def choose_step(
    root: Tier, new: Newcomer, step: int, depth: Depth, also: Sequence[StepRecord] = ()
) -> Choice:
    """Choose this step, whatever else is there.

    Raises:
        StepNotFound: it is not there, or not whole.
    """
    records = scan_with(root, also)
    of_step = rank(record for record in records if record.step == step)
    problem: str | None = "it is not there"
    if of_step.candidates:
        chosen = of_step.candidates[0]
        problem = None
        if depth == "digest" and chosen not in also:
            problem = check_digests(root.child(chosen.name))
        if problem is None:
            return _begin(root, new, chosen, records)
    elif of_step.rejected:
        problem = of_step.rejected[0].reason
    others = sorted(record.step for record in records if record.problem is None)
    raise StepNotFound(root.location, f"step {step}: {problem}; whole steps are {others}")


def _begin(
    root: Tier,
    new: Newcomer,
    resumed: StepRecord | None,
    records: Sequence[StepRecord],
    passed_over: tuple[str, ...] = (),
    *,
    without: Collection[str] = (),
) -> Choice:
    lineage = begin_history(new.run_id, resumed, records, new.others)
    kept = {r.step: r for r in line_of(lineage, records) if r.name not in without}
    return Choice(resumed, lineage, passed_over, kept, records, readable_id_of_root(root))
