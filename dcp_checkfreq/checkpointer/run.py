"""A run: the folder that it saves into, its ranks, and by what it is known there."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dcp_checkfreq.dcp.name_lengths import check_root_lengths
from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.recovery.lease import LeaseFile
from dcp_checkfreq.recovery.root_check import check_root
from dcp_checkfreq.runtime.clock import Clock
from dcp_checkfreq.runtime.process_end import open_at
from dcp_checkfreq.staging.staged_tier import StagingDir, noted, staged_root
from dcp_checkfreq.storage.open import Location, open_tier
from dcp_checkfreq.storage.tier import Tier

_log = logging.getLogger(__name__)

Snapshots = Literal["auto", "cpu", "gpu", "blocking"]


@dataclass(frozen=True, slots=True)
class Run:
    """What all that a `Checkpointer` is made of shares.

    Attributes:
        root: folder of the run; says when a call has come back.
        place: what tells that folder from all others in this process.
        id: of this run, until it restores: each restore begins a history of its own.
        ranks: of this job.
        lease: of this run on the root.
        clock: where time comes from.
        threads: shard files that a rank writes or reads at once.
    """

    root: Tier
    place: str
    id: str
    ranks: Ranks
    lease: LeaseFile
    clock: Clock
    threads: int


def open_run(
    root: Location,
    ranks: Ranks,
    clock: Clock,
    *,
    threads: int,
    storage_options: Mapping[str, Any] | None,
    staging_dir: StagingDir | None,
    staging_bytes: int | None,
) -> Run:
    """Open the folder of a run, with a local disk in front of it if there is one. See `Run`.

    All ranks call it.

    Raises:
        RootDiffers: the ranks do not see the same folder.
    """
    tier = open_tier(root, storage_options=storage_options)
    if staging_dir is not None:
        tier = staged_root(tier, staging_dir, limit_bytes=staging_bytes)
    check_root_lengths(tier)
    place = _place_of(tier)  # where others of this process are named
    tier = noted(tier, ranks.watchdog.moved)
    run_id = ranks.on_rank_0(lambda: uuid.uuid4().hex[:12])
    check_root(tier, ranks, run_id, clock)
    return Run(tier, place, run_id, ranks, LeaseFile(tier, run_id, clock), clock, threads)


def _place_of(root: Tier) -> str:
    """Return what tells the folder of a run from all others in this process; warn of those in it.

    What is at work there is a `Checkpointer`, as far as `close_at_exit` knows of this place.
    """
    is_ours = type(root).__module__.startswith("dcp_checkfreq.storage")
    place = root.location if is_ours else f"{root.location}#{id(root)}"
    for other in open_at(place):
        _log.warning(
            "%s: another Checkpointer of this process saves there and is not closed; it is at step "
            "%d. Close it first: each refuses to replace what the other has saved",
            *(root.location, other.step),
        )
    return place


def mode_of(snapshot: Snapshots) -> Mode | None:
    """Return how snapshots are copied, by the option of that name; None: as the costs say.

    Raises:
        ValueError: there is no such device.
    """
    if snapshot == "auto":
        return None
    if snapshot == "gpu" and not torch.cuda.is_available():
        raise ValueError("snapshot='gpu' needs a CUDA device")
    return Mode(snapshot)
