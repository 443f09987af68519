"""What all ranks raise for an error of DCP, which gives every rank the errors of all."""

from __future__ import annotations

from typing import NoReturn

from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq.ranks.meeting import mark_agreed, raise_agreed
from dcp_checkfreq.runtime.error_reports import Wrap, as_ours, report_of


def raise_of_dcp(
    error: CheckpointException, rank: int, world_size: int | None, what: str, wrap: Wrap | None
) -> NoReturn:
    """Raise the error of the lowest rank that failed, the same on all ranks.

    Args:
        error: of DCP. A rank has its own error in it, and copies of the others'.
        rank: this one.
        world_size: of the job; None: this process is alone.
        what: all ranks did.
        wrap: see `Ranks.together`.

    Raises:
        CheckFreqError: see `Ranks.together`.
    """
    lowest, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    if world_size is None:
        ours = cause if wrap is None else as_ours(cause, wrap)
        raise ours from error if ours is cause else cause
    reports = {
        number: report_of(one, number, what, wrap, named=False).rebuilt()
        for number, (one, _) in error.failures.items()
    }
    alike = {(type(one), str(one)) for one in reports.values()}
    is_of_all = len(reports) == world_size and len(alike) == 1
    own = error.failures.get(rank, (None, None))[0]
    if own is not None and not isinstance(own, Exception):
        mark_agreed(own)
        raise own from error
    raise_agreed(reports[lowest] if is_of_all else reports[lowest].of_rank(lowest), error)
