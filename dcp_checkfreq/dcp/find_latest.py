"""`find_latest_valid`: what a restarted job asks first."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.recovery.plan import Rejected, StepRecord
from dcp_checkfreq.recovery.scan import Depth, check_digests, newest_whole
from dcp_checkfreq.runtime import options
from dcp_checkfreq.staging.local_disk import LocalFolder
from dcp_checkfreq.staging.resume_upload import look as look_at_node
from dcp_checkfreq.staging.staged_tier import StagedTier, StagingDir, staged_root
from dcp_checkfreq.staging.unfinished import find_unfinished
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.storage.open import Location, open_tier
from dcp_checkfreq.storage.tier import Tier

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """The newest whole checkpoint of a root; a path, so that readers take it as it is."""

    step: int
    name: str  # of the folder in the root
    path: str
    attempt: str  # empty for a checkpoint of stock DCP
    run_id: str  # empty if no Checkpointer wrote it
    world_size: int  # 0 if not recorded
    rejected: tuple[Rejected, ...]  # steps that were passed over, newest first

    def __fspath__(self) -> str:
        return self.path


def find_latest_valid(
    root: Location,
    *,
    depth: Depth = "size",
    no_dist: bool = False,
    staging_dir: StagingDir | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Found | None:
    """Return the newest checkpoint under ``root`` that is really whole, or None.

    Whole: ``.metadata`` is there, undamaged, and every file that it names has its exact size. With
    ``depth="digest"`` every payload is read and checked too. Steps are ordered by number; folders
    with other names are skipped; checkpoints of stock DCP count. Newer steps that are not whole
    are logged as warnings and listed in `Found.rejected`. Changes nothing on storage.

    With ``staging_dir``, as the job has it, saves count as well whose upload was interrupted, if
    every rank has all of their files on its node; `Found.path` is then the local folder.

    ``root`` may be an fsspec URL; ``storage_options`` are for its file system. What is returned
    does not hold them: give them to the reader too.

    With `torch.distributed` initialised this is a collective: rank 0 looks, all ranks return its
    answer or raise its error. Pass ``no_dist=True`` to look from this process alone.

    Raises:
        BadLocation: ``root`` is nothing that can be looked into.
    """
    if no_dist:
        options.check(options.FIND_LATEST_VALID, locals())
        tier, staged = _opened(root, staging_dir, storage_options)
        return _look(tier, staged, depth, [_own(staged)])
    agreement = Ranks()
    try:
        with agreement.region("looking for the newest checkpoint"):
            options.check(options.FIND_LATEST_VALID, locals())
            tier, staged = _opened(root, staging_dir, storage_options)
            if agreement.is_alone:
                return _look(tier, staged, depth, [_own(staged)])
            found, refusal = agreement.reduce_on_rank_0(
                _own(staged), functools.partial(_answer, tier, staged, depth)
            )
    finally:
        agreement.close()
    if refusal is not None:
        raise OSError(*refusal)
    return found


def _opened(
    root: Location, staging_dir: StagingDir | None, storage_options: Mapping[str, Any] | None
) -> tuple[Tier, StagedTier | None]:
    tier = open_tier(root, storage_options=storage_options)
    return tier, None if staging_dir is None else staged_root(tier, staging_dir)


def _own(staged: StagedTier | None) -> list[LocalFolder]:
    return [] if staged is None else look_at_node(staged)


def _answer(
    tier: Tier, staged: StagedTier | None, depth: Depth, nodes: list[list[LocalFolder]]
) -> tuple[Found | None, tuple[object, ...] | None]:
    """Return what all ranks hear: what was found, or what to make an `OSError` of."""
    try:
        return _look(tier, staged, depth, nodes), None
    except OSError as error:
        _log.warning("%s: cannot be looked into: %s", tier.location, error)
        return None, (error.errno, error.strerror) if error.errno is not None else (str(error),)


def _look(
    tier: Tier, staged: StagedTier | None, depth: Depth, nodes: list[list[LocalFolder]]
) -> Found | None:
    also = [] if staged is None else _usable(staged, nodes, depth)
    newest, ranking, _ = newest_whole(tier, depth, also)
    for passed in ranking.rejected:
        if newest is None or passed.step >= newest.step:
            _log.warning("%s: %s passed over: %s", tier.location, passed.name, passed.reason)
    if newest is None:
        _tell_nothing(tier)
        return None
    return Found(
        newest.step,
        newest.name,
        os.path.join(tier.location, newest.name)
        if staged is None or newest not in also
        else staged.area.folder(newest.name).location,
        newest.attempt,
        newest.run_id,
        newest.world_size,
        ranking.rejected,
    )


def _tell_nothing(tier: Tier) -> None:
    """Say that there is no checkpoint; louder if there is not even the folder: a typing error?"""
    # On object stores a folder is there when something is in it.
    if tier.list() or (isinstance(tier, LocalTier) and os.path.isdir(tier.location)):
        _log.info("%s: no whole checkpoint is there", tier.location)
    else:
        _log.warning("%s: nothing is there. Is the path right?", tier.location)


def _usable(staged: StagedTier, nodes: list[list[LocalFolder]], depth: Depth) -> list[StepRecord]:
    """Return what the local disks have and the remote side does not, and why it is no use.

    Digests are compared on this node, which has all files of what is usable.
    """
    records = []
    for one in find_unfinished(staged.remote, nodes, {}):
        problem = one.record.problem
        if problem is None and not one.is_local:
            problem = "not published, and its files are on several nodes: restore() finishes it"
        elif problem is None and depth == "digest":
            folder = staged.area.folder(one.record.name)
            problem = check_digests(folder, content=one.content)
        records.append(replace(one.record, problem=problem))
    return records
