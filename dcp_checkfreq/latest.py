"""`find_latest_valid`: what a restarted job asks first."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from dcp_checkfreq.agreement import Agreement
from dcp_checkfreq.recovery.plan import Rejected
from dcp_checkfreq.recovery.scan import Depth, newest_whole
from dcp_checkfreq.storage.open import Location, open_tier

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
    root: Location, *, depth: Depth = "size", no_dist: bool = False
) -> Found | None:
    """Return the newest checkpoint under ``root`` that is really whole, or None.

    Whole: ``.metadata`` is there, undamaged, and every file that it names has its exact size. With
    ``depth="digest"`` every payload is read and checked too. Steps are ordered by number; folders
    with other names are skipped; checkpoints of stock DCP count. Newer steps that are not whole
    are logged as warnings and listed in `Found.rejected`. Changes nothing on storage.

    With `torch.distributed` initialised this is a collective: rank 0 looks, all ranks return its
    answer or raise its error. Pass ``no_dist=True`` to look from this process alone.

    Raises:
        BadLocation: ``root`` is nothing that can be looked into.
    """
    if depth not in ("size", "digest"):
        raise ValueError(f"depth must be 'size' or 'digest', got {depth!r}")
    tier = open_tier(root)

    def look() -> Found | None:
        newest, ranking, _ = newest_whole(tier, depth)
        for passed in ranking.rejected:
            if newest is None or passed.step >= newest.step:
                _log.warning("%s: %s passed over: %s", tier.location, passed.name, passed.reason)
        if newest is None:
            return None
        return Found(
            newest.step,
            newest.name,
            os.path.join(tier.location, newest.name),
            newest.attempt,
            newest.run_id,
            newest.world_size,
            ranking.rejected,
        )

    if no_dist:
        return look()
    agreement = Agreement()
    try:
        return agreement.decide(look)
    finally:
        agreement.close()
