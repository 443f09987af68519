"""What became of work whose end must be reached, whatever raises on the way there.

Other ranks wait there. Between the work and its end there is code of others, too: a handler that
the user gave to `logging` may raise what it likes.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable

from dcp_checkfreq.told import text_of

_log = logging.getLogger(__name__)


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
    try:
        log(text, *args)
    except BaseException:  # noqa: BLE001  it is told, in the one way that is left
        with contextlib.suppress(Exception):  # stderr may be closed
            traceback.print_exc()
