"""Reads the step folders of a root into records, without changing anything."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import Any, Literal

from dcp_checkfreq.errors import LoadFailed
from dcp_checkfreq.format import names, sealed
from dcp_checkfreq.format.digest import identity
from dcp_checkfreq.format.forms import PLAIN
from dcp_checkfreq.format.index import Record, digest_starts
from dcp_checkfreq.recovery.files import content_of
from dcp_checkfreq.recovery.plan import Ranking, Rejected, StepRecord, rank, step_record
from dcp_checkfreq.shards.fetch import Fetcher, listed
from dcp_checkfreq.shards.read_plan import Want
from dcp_checkfreq.storage.tier import Entry, Tier

Depth = Literal["size", "digest"]

_ROUNDS = 10  # listings of one scan: bounds what a root costs that never stands still


class _Nowhere:
    """A target for bytes that are only checked."""

    def __init__(self, checked: Callable[[int], None]) -> None:
        self._checked = checked

    def take(self, want: Want, data: memoryview) -> None:
        """Count and drop the bytes; the fetcher has compared their digests."""
        self._checked(len(data))


def scan(root: Tier) -> list[StepRecord]:
    """Return one record per step folder of ``root``, in no order. Foreign names are skipped.

    Whole means here: ``.metadata`` is readable and every file that it names has its exact size
    (stock checkpoints: is long enough for what is in it). No payload is read.

    Another run may be at work there, and remove old steps while they are looked at. So where
    anything but whole steps was found the root is listed once more, and what is new is looked at,
    until nothing is new; if nothing is whole, until nothing has changed for two rounds.

    Raises:
        OSError: the storage failed, or never stood still, and no whole step was found.
    """
    records: dict[str, StepRecord] = {}
    unreadable: dict[str, OSError] = {}
    folders = _step_folders(root)
    unchanged = 0
    for _ in range(_ROUNDS):
        has_whole = _has_whole(records)
        for name, step in folders.items():
            if name in records and (has_whole or records[name].problem is None):
                continue
            unreadable.pop(name, None)
            try:
                records[name] = examine(root.child(name), name, step)
            except OSError as error:
                unreadable[name] = error
                problem = f"not readable: {error}"
                records[name] = StepRecord(name=name, step=step, problem=problem)
        if records and all(record.problem is None for record in records.values()):
            break  # the usual case: one listing is enough
        try:
            later = _step_folders(root)
        except OSError:
            if _has_whole(records):
                break
            raise
        records = {name: record for name, record in records.items() if name in later}
        unchanged = unchanged + 1 if later == folders else 0
        # What has become whole since it was looked at would be found by the second look.
        needed = 2 if records else 1
        if later.keys() <= records.keys() and (_has_whole(records) or unchanged >= needed):
            break
        folders = later
    else:
        if not _has_whole(records):
            raise OSError(
                errno.EBUSY,
                "its steps come and go faster than they can be looked at: another run saves there",
                root.location,
            )
    # A bad sector in one step must not hide the others, but a storage that answers nothing but
    # errors must not look like a root without checkpoints.
    failures = [error for name, error in unreadable.items() if name in records]
    if failures and not _has_whole(records):
        raise failures[0]
    return list(records.values())


def _step_folders(root: Tier) -> dict[str, int]:
    """Return the steps by the names of their folders."""
    return {
        entry.name: step
        for entry in root.list()
        if entry.is_folder and (step := names.parse_step(entry.name)) is not None
    }


def _has_whole(records: Mapping[str, StepRecord]) -> bool:
    return any(record.problem is None for record in records.values())


def scan_with(root: Tier, also: Sequence[StepRecord]) -> list[StepRecord]:
    """Return what `scan` finds, and ``also``, which lies elsewhere, in the place of its names."""
    elsewhere = {record.name for record in also}
    return [record for record in scan(root) if record.name not in elsewhere] + [*also]


def newest_whole(
    root: Tier, depth: Depth, also: Sequence[StepRecord] = ()
) -> tuple[StepRecord | None, Ranking, list[StepRecord]]:
    """Return the newest whole step, the ranking behind it, and all that was found.

    With ``depth="digest"`` every block of the candidate is read and compared; a candidate that
    fails is rejected and the next one tried. The ranking's `rejected` then includes it. The digests
    of ``also`` (see `scan_with`) are up to the caller.
    """
    tried: tuple[StepRecord, ...] = ()
    failed: list[Rejected] = []
    records = scan_with(root, also)
    ranking = rank(records)
    for _ in range(_ROUNDS):
        if depth == "size":
            return next(iter(ranking.candidates), None), ranking, records
        if ranking.candidates == tried:
            break  # what failed is still there: it is damaged, and was not removed meanwhile
        failed = []
        for number, candidate in enumerate(ranking.candidates):
            problem = None
            if candidate not in also:
                problem = check_digests(root.child(candidate.name))
            if problem is None:
                left = Ranking(ranking.candidates[number:], (*failed, *ranking.rejected))
                return candidate, left, records
            failed.append(Rejected(candidate.name, candidate.step, problem))
        tried = ranking.candidates
        records = scan_with(root, also)
        ranking = rank(records)
    return None, Ranking((), (*failed, *ranking.rejected)), records


def examine(folder: Tier, name: str, step: int) -> StepRecord:
    """Return the record of one step folder, as `scan` does. A missing folder is not published."""
    try:
        content = content_of(folder)
    except FileNotFoundError:
        reason = "not published: there is no .metadata"
        return StepRecord(name=name, step=step, problem=reason, published=False)
    except LoadFailed as error:
        return StepRecord(name=name, step=step, problem=error.why)
    record, problem = None, None
    try:
        metadata, record = sealed.load(content, folder.location, PLAIN)
        problem = _wrong_size(folder.list(), metadata, record)
    except LoadFailed as error:
        problem = error.why
    return step_record(name, step, problem, record, published=True, identity=identity(content))


def _wrong_size(entries: Sequence[Entry], metadata: Any, record: Record | None) -> str | None:
    files = [entry for entry in entries if not entry.is_folder and not entry.is_special]
    sizes = {entry.name: entry.size_bytes for entry in files}
    if record is not None:
        for file, size in record.files.items():
            if file not in sizes:
                return f"{file} is missing, {_held(file, metadata)}"
            if sizes[file] != size:
                return (
                    f"{file} has {sizes[file]} bytes, it was saved with {size}, "
                    f"{_held(file, metadata)}"
                )
        return None
    for index, info in (metadata.storage_data or {}).items():
        file, end = info.relative_path, info.offset + info.length
        if file not in sizes:
            return f"{file} is missing, {_held(file, metadata)}"
        if sizes[file] < end:
            return (
                f"{file} is cut short at {sizes[file]} bytes, {index.fqn!r} in it is at bytes "
                f"[{info.offset}, {end})"
            )
    return None


def _held(file: str, metadata: Any) -> str:
    """Say what is in a file, as a user knows it."""
    places = (metadata.storage_data or {}).items()
    return f"it holds {listed(repr(at.fqn) for at, info in places if info.relative_path == file)}"


def check_digests(
    folder: Tier,
    *,
    threads: int = 2,
    content: bytes | None = None,
    only: AbstractSet[str] | None = None,
    checked: Callable[[int], None] = lambda _size_bytes: None,
) -> str | None:
    """Read every payload of a checkpoint and compare its digests.

    Args:
        folder: of the checkpoint.
        threads: reads at once.
        content: of ``.metadata``, if it is not in the folder.
        only: look at these files only.
        checked: is told of bytes whose digests were right, from any thread.

    Returns:
        None if all match, else what is wrong. Stock checkpoints have no digests and always pass.
    """
    try:
        if content is None:
            content = content_of(folder)
        metadata, record = sealed.load(content, folder.location, PLAIN)
        if record is None:
            return None
        files = [info.relative_path for info in metadata.storage_data.values()]
        columns = record.columns
        starts = digest_starts(columns)
        wants = [
            Want(ticket, file, columns.payload_offset[ticket], 0, size, columns.block_bytes[ticket])
            for ticket, (file, size) in enumerate(zip(files, columns.payload_bytes, strict=True))
            if only is None or file in only
        ]
        digests = [columns.digests[start:stop] for start, stop in pairwise(starts)]
        fetcher = Fetcher(folder, record.files, threads)
        try:
            keys = [place.fqn for place in metadata.storage_data]
            fetcher.fetch(wants, [_Nowhere(checked)] * len(files), digests, keys)
        finally:
            fetcher.close()
    except FileNotFoundError:
        return "there is no .metadata"
    except LoadFailed as error:
        return error.why
    except OSError as error:
        return f"not readable: {error}"
    return None
