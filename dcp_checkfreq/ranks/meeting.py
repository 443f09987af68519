"""What ranks say to each other when they meet, and errors that all of them raise."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from dcp_checkfreq.errors import RankFailed
from dcp_checkfreq.runtime.error_reports import ErrorReport

T = TypeVar("T")

_AGREED = "_dcp_checkfreq_agreed"  # on an error that all ranks raise

# What a rank says in a meeting: at what it is, its value as a pickle, or an error.
Message = tuple[str, bytes, "ErrorReport | None"]
# What rank 0 answers: the result as a pickle, or an error; whether all ranks had the same one.
Answer = tuple[bytes, "ErrorReport | None", bool]
NOTHING = pickle.dumps(None)


def answer(everyones: Sequence[Message], rule: Callable[[list[Any]], T], result: list[T]) -> Answer:
    """On rank 0: conclude, keep the result, and return what the others get."""
    failures = [report for _, _, report in everyones if report is not None]
    if failures:
        alike = {(report.kind, str(_unnamed(report))) for report in failures}
        is_of_all = len(failures) == len(everyones) and len(alike) == 1
        return b"", failures[0], is_of_all
    places = [what for what, _, _ in everyones]
    for rank, place in enumerate(places):
        if place != places[0]:
            raise RankFailed(rank, place, f"the ranks are in different calls; rank 0: {places[0]}")
    result.append(rule([pickle.loads(payload) for _, payload, _ in everyones]))
    return pickle.dumps(result[0]), None, False


def _unnamed(report: ErrorReport) -> tuple[object, ...]:
    """Return the fields of an error without the number of the rank."""
    return tuple(
        field.replace(f"rank {report.rank}", "rank", 1) if isinstance(field, str) else field
        for field in report.fields
        if field != report.rank
    )


def is_agreed(error: BaseException) -> bool:
    """Tell whether all ranks have raised this."""
    return hasattr(error, _AGREED)


def mark_agreed(error: BaseException) -> None:
    """Say that all ranks raise this."""
    with contextlib.suppress(AttributeError, TypeError):
        setattr(error, _AGREED, True)


def raise_agreed(error: BaseException, cause: BaseException | None) -> NoReturn:
    """Raise what all ranks raise."""
    mark_agreed(error)
    raise error from cause
