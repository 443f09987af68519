"""What is in a root, for people: its steps, what a restart would choose, and what is damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dcp_checkfreq.errors import BadLocation, NoValidCheckpoint
from dcp_checkfreq.format.names import METADATA, parse_step
from dcp_checkfreq.recovery.files import is_published
from dcp_checkfreq.recovery.plan import StepRecord, rank
from dcp_checkfreq.recovery.scan import check_digests, examine, newest_whole, scan
from dcp_checkfreq.storage.tier import Tier


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a root.

    Attributes:
        state: "newest" is what a restart takes; "whole", "left" behind by a later history,
            "unpublished" or "broken".
        why: it is not whole, or left behind; else empty.
        size_bytes: of its files, published or not.
        saved_s: when it was published, by the storage's clock, in seconds since the epoch.
        ranks: that wrote it; 0: not known.
        run_id: of the history that it belongs to; empty: none.
    """

    name: str
    step: int
    state: str
    why: str
    size_bytes: int
    saved_s: float | None
    ranks: int
    run_id: str


def steps_of(root: Tier) -> list[Step]:
    """Return the steps of a root, newest first. Reads no payload.

    Raises:
        BadLocation: there are none, and it is no root.
        OSError: of the storage.
    """
    records = {record.name: record for record in _scanned(root)}
    ranking = rank(records.values())
    why = {one.name: one.reason for one in ranking.rejected}
    newest = ranking.candidates[0].name if ranking.candidates else None
    found = [
        _step(root, record, why.get(record.name, ""), record.name == newest)
        for record in records.values()
    ]
    return sorted(found, key=lambda one: (-one.step, one.name))


def _scanned(root: Tier) -> list[StepRecord]:
    records = scan(root)
    if not records:
        _refuse(root)
    return records


def _refuse(root: Tier) -> None:
    """Say what is wrong with a root without steps."""
    if is_published(root):
        raise BadLocation(root.location, "this is a checkpoint, not a root: see `inspect`")
    if not root.list():
        raise BadLocation(root.location, "nothing is there")
    raise BadLocation(root.location, "no folder in it is named like a step (step_00000010)")


def _step(root: Tier, record: StepRecord, why: str, is_newest: bool) -> Step:
    entries = root.child(record.name).list()
    saved = [entry.modified_s for entry in entries if entry.name == METADATA]
    if is_newest:
        state = "newest"
    elif not why:
        state = "whole"
    elif not record.published:
        state = "unpublished"
    else:
        state = "broken" if record.problem is not None else "left"
    return Step(
        record.name,
        record.step,
        state,
        why,
        sum(entry.size_bytes for entry in entries if not entry.is_folder),
        saved[0] if saved else None,
        record.world_size,
        record.run_id,
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """What a restart would do: the checkpoint, None for a fresh start, and what it passes over."""

    name: str | None
    step: int | None
    path: str | None
    passed_over: tuple[tuple[str, str], ...]


def choice_of(root: Tier, *, digests: bool) -> Choice:
    """Return what a restart would choose, and why it passes over what is newer, or broken.

    Raises:
        BadLocation: there is no root.
        OSError: of the storage.
    """
    newest, ranking, records = newest_whole(root, "digest" if digests else "size")
    if not records:
        _refuse(root)
    passed = tuple((one.name, one.reason) for one in ranking.rejected)
    if newest is None:
        return Choice(None, None, None, passed)
    return Choice(newest.name, newest.step, root.child(newest.name).location, passed)


def latest(root: Tier, *, digests: bool) -> str:
    """Return the path of the newest whole checkpoint.

    Raises:
        NoValidCheckpoint: none is whole.
        BadLocation, OSError: as `choice_of`.
    """
    choice = choice_of(root, digests=digests)
    if choice.path is None:
        name, reason = choice.passed_over[0]
        raise NoValidCheckpoint(root.location, f"{name}: {reason}")
    return choice.path


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one checkpoint is as it was saved; ``problem`` names file, tensor and block."""

    name: str
    problem: str | None
    is_checked: bool  # by digests


def verdicts(
    place: Tier, *, digests: bool, threads: int, checked: Callable[[str, int], None]
) -> list[Verdict]:
    """Check one checkpoint, or all published ones of a root.

    Args:
        place: of the checkpoint or the root.
        digests: read all of it and compare; otherwise sizes of files only.
        threads: reads at once.
        checked: is told the name and the bytes that were right, from any thread.

    Raises:
        BadLocation: neither of them is there.
        OSError: of the storage.
    """
    if is_published(place):
        name = place.location.rstrip("/").rpartition("/")[2]
        step = parse_step(name)
        record = examine(place, name, 0 if step is None else step)
        return [_verdict(place, record, digests=digests, threads=threads, checked=checked)]
    return [
        _verdict(place.child(one.name), one, digests=digests, threads=threads, checked=checked)
        for one in sorted(_scanned(place), key=lambda one: one.step)
        if one.published
    ]


def _verdict(
    folder: Tier,
    record: StepRecord,
    *,
    digests: bool,
    threads: int,
    checked: Callable[[str, int], None],
) -> Verdict:
    problem = record.problem
    if problem is None and digests:
        problem = check_digests(
            folder, threads=threads, checked=lambda size: checked(record.name, size)
        )
    return Verdict(record.name, problem, digests and bool(record.attempt))
