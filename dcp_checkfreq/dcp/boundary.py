"""Where DCP calls planners, writers and readers: what they raise has to get to the other ranks.

DCP sends errors as pickles. One that cannot be pickled, or not read by the others, ends its own
rank's call at once while the others wait for it. So only errors of this package and builtin ones
with plain data in them pass; others become an error of this package with their text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch

from dcp_checkfreq.errors import CheckFreqError, LoadFailed, SaveFailed
from dcp_checkfreq.ranks.watchdog import Watchdog
from dcp_checkfreq.runtime.error_reports import survives_pickle, text_of

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

_Method = Callable[Concatenate[S, P], R]


def tells_errors(
    made: type[SaveFailed | LoadFailed], doing: str
) -> Callable[[_Method[S, P, R]], _Method[S, P, R]]:
    """Return a decorator for a method that DCP calls on every rank, or on rank 0.

    If its object has a ``watchdog``, that hears what the method is at.

    Args:
        made: of what becomes of a foreign error.
        doing: what the method does, as in "while planning".
    """

    def decorate(method: _Method[S, P, R]) -> _Method[S, P, R]:
        @functools.wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            watchdog: Watchdog | None = getattr(self, "watchdog", None)
            try:
                if watchdog is None:
                    return method(self, *args, **kwargs)
                with watchdog.doing(doing, _where(self), in_storage=True):
                    return method(self, *args, **kwargs)
            except Exception as error:
                if survives_pickle(error) or not _has_others():
                    raise
                raise _told(made, self, doing, error) from error

        return call

    return decorate


def _has_others() -> bool:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    return torch.distributed.get_world_size() > 1


def _where(teller: object) -> str:
    return str(getattr(teller, "checkpoint_id", "") or getattr(teller, "_where", ""))


def _told(
    made: type[SaveFailed | LoadFailed], teller: object, doing: str, error: Exception
) -> CheckFreqError:
    return made(
        _where(teller), f"rank {torch.distributed.get_rank()}, while {doing}: {text_of(error)}"
    )
