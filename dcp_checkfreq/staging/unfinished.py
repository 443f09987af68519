"""Saves that are complete on the local disks of the nodes, but not published on the remote side.

A save is *whole* here if every shard that its local commit names lies on a node of this job with
its exact size, or is noted to be complete on the remote side and is there. Names of shards belong
to one attempt, so no two saves can be mixed; which rank is on which node plays no part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcp_checkfreq.errors import LoadFailed
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.format import names
from dcp_checkfreq.format.digest import identity
from dcp_checkfreq.format.index import Record
from dcp_checkfreq.recovery.plan import StepRecord, step_record
from dcp_checkfreq.staging.local_disk import LocalFolder
from dcp_checkfreq.storage.tier import Tier


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A save that could be finished, or, if its record tells a problem, could not."""

    record: StepRecord
    content: bytes  # of ``.metadata``; empty if there is a problem
    attempt: str  # of the rank that would have published it
    uploads: Mapping[str, int]  # which rank has to bring which shard to the remote side
    files: frozenset[str]  # all of its shards
    is_at_hand: bool  # every rank can read every shard, on its node or on the remote side
    is_local: bool  # every rank can read every shard on its node


def find_unfinished(
    remote: Tier, ranks: Sequence[Sequence[LocalFolder]], refused: Mapping[str, str]
) -> list[Unfinished]:
    """Return the saves that the local disks know of and the remote side does not.

    Args:
        remote: root on the remote side.
        ranks: what each rank sees on its node, in rank order.
        refused: saves that were found damaged, with the reason.

    Raises:
        OSError: the remote side failed.
    """
    by_name: dict[str, dict[int, LocalFolder]] = {}
    for rank, folders in enumerate(ranks):
        for folder in folders:
            by_name.setdefault(folder.name, {})[rank] = folder
    found = []
    for name, nodes in by_name.items():
        step = names.parse_step(name)
        content = next((node.record for node in nodes.values() if node.record is not None), None)
        if step is None or content is None:
            continue
        on_remote = {e.name: e.size_bytes for e in remote.child(name).list() if not e.is_folder}
        if names.METADATA not in on_remote:
            found.append(_examine(name, step, content, nodes, len(ranks), on_remote, refused))
    return found


def _examine(
    name: str,
    step: int,
    content: bytes,
    nodes: Mapping[int, LocalFolder],
    world_size: int,
    on_remote: Mapping[str, int],
    refused: Mapping[str, str],
) -> Unfinished:
    try:
        record = metadata_format.load(content, name)[1]
    except LoadFailed as error:
        return _hopeless(name, step, error.why)
    if record is None:
        return _hopeless(name, step, "its local record is not one of this package")
    known = step_record(
        name,
        step,
        refused.get(name),
        record,
        published=False,
        identity=identity(content),
    )
    if known.problem is not None and name not in refused:
        return _hopeless(name, step, known.problem, record)
    noted = frozenset().union(*(node.uploaded for node in nodes.values()))
    uploads: dict[str, int] = {}
    is_at_hand = is_local = True
    for file, size in sorted(record.files.items()):
        holders = [rank for rank, node in nodes.items() if node.files.get(file) == size]
        everywhere = len(holders) == world_size
        is_local = is_local and everywhere
        if file in noted and on_remote.get(file) == size:
            continue
        if not holders:
            return _hopeless(name, step, f"{file} is on no node of this job any more", record)
        is_at_hand = is_at_hand and everywhere
        uploads[file] = min(holders, key=lambda rank: (list(uploads.values()).count(rank), rank))
    return Unfinished(
        known,
        content,
        record.attempt,
        uploads,
        frozenset(record.files),
        is_at_hand,
        is_local,
    )


def _hopeless(name: str, step: int, why: str, record: Record | None = None) -> Unfinished:
    problem = f"not published, and its upload cannot be finished: {why}"
    known = step_record(name, step, problem, record, published=False)
    return Unfinished(known, b"", "", {}, frozenset(), is_at_hand=False, is_local=False)
