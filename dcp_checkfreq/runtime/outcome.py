"""What became of work whose end must be reached, whatever raises on the way there.

Other ranks wait there. Between the work and its end there is code of others, too: a handler that
the user gave to `logging` may raise what it likes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import traceback
from collections.abc import Callable

from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq.errors import PublishUnknown, RankLost
from dcp_checkfreq.runtime.error_reports import text_of

_log = logging.getLogger(__name__)


def fate(error: BaseException) -> str:
    """Say what became of a save that has ended like this."""
    is_open = isinstance(error, PublishUnknown | RankLost)
    return "may have been saved or not" if is_open else "was not saved"


def outcome_of(*parts: Callable[[], object]) -> BaseException | None:
    """Do all parts in order, whatever those before have raised; return the first error.

    What later ones raise is logged.
    """
    first: BaseException | None = None
    try:
        for part in parts:
            try:
                part()
            except BaseException as error:  # noqa: BLE001  returned or logged
                if first is None:
                    first = error
                else:
                    report(_log.exception, "this came after %s", text_of(first))
        return first
    finally:
        del first  # else its traceback and this frame hold each other


def report(log: Callable[..., None], text: str, *args: object) -> None:
    """Log something. A handler that raises stops nothing: that goes to stderr.

    `logging` does the same with the errors of its own handlers.
    """
    try_to(functools.partial(log, text, *args))


def try_to(work: Callable[[], object]) -> None:
    """Do what must stop nothing: what it raises goes to stderr."""
    try:
        work()
    except BaseException:  # noqa: BLE001  it is reported, in the one way that is left
        with contextlib.suppress(Exception):  # stderr may be closed
            traceback.print_exc()


def is_certain(error: CheckpointException) -> bool:
    """Tell whether a save that ended so was not published, so that its files may go on all ranks.

    An interrupt on rank 0 may have come after the commit, in DCP's code or on the way back to it.
    """
    of_rank_0 = error.failures.get(0)
    return of_rank_0 is None or (
        isinstance(of_rank_0[0], Exception) and not isinstance(of_rank_0[0], PublishUnknown)
    )
