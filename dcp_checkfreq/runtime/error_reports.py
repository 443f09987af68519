"""Errors as plain data: what a rank tells the others of its own.

An error of this package travels as the name of its class and its fields. Of any other only a text
does: its class may be one that another process cannot import, and its pickle one that cannot be
made or read, and then that rank would leave its call alone.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import dataclass

from dcp_checkfreq import errors
from dcp_checkfreq.errors import CheckFreqError, RankFailed

_LONGEST_TEXT = 4000  # of a foreign error: it goes over the network and into every log

Wrap = Callable[[str], CheckFreqError]  # makes an error of this package of a text


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An error of one rank, for all ranks."""

    rank: int
    kind: str  # a class of `errors`
    fields: tuple[object, ...]

    def rebuilt(self) -> CheckFreqError:
        """Return the error."""
        made: CheckFreqError = getattr(errors, self.kind)(*self.fields)
        return made


def report_of(
    error: BaseException, rank: int, doing: str, wrap: Wrap | None = None, *, named: bool = True
) -> ErrorReport:
    """Return what others get to know of an error.

    Args:
        error: of this rank.
        rank: of this process.
        doing: what it was at, as in "while saving".
        wrap: makes an error of this package of the text of another one; default: `RankFailed`.
        named: put the rank into the text of an error of this package, too.
    """
    if is_ours(error):
        assert isinstance(error, CheckFreqError)
        ours = error.of_rank(rank) if named else error
    elif wrap is None:
        ours = RankFailed(rank, doing, text_of(error))
    else:
        ours = wrap(f"rank {rank}, while {doing}: {text_of(error)}")
    fields = ours.__reduce__()[1]
    assert isinstance(fields, tuple)
    return ErrorReport(rank, type(ours).__name__, fields)


def as_ours(error: BaseException, wrap: Wrap) -> BaseException:
    """Return what a caller gets to see of an error: one of this package, or an interrupt.

    Any other one becomes the ``__cause__`` of what ``wrap`` makes of its text.
    """
    if isinstance(error, CheckFreqError) or not isinstance(error, Exception):
        return error
    ours = wrap(text_of(error))
    ours.__cause__ = error
    return ours


def text_of(error: BaseException) -> str:
    """Return class, text and notes of an error, whatever its own methods do."""
    try:
        text = str(error)
        notes = "; ".join(map(str, getattr(error, "__notes__", ())))
    except Exception:  # noqa: BLE001  a foreign class may raise anything here
        text, notes = "", ""
    kind = type(error).__name__
    whole = (f"{kind}: {text}" if text else kind) + (f" ({notes})" if notes else "")
    return whole if len(whole) <= _LONGEST_TEXT else whole[:_LONGEST_TEXT] + " ..."


def is_ours(error: BaseException) -> bool:
    """Tell whether it is of a class of this package, with nothing but plain data in it."""
    kind = type(error)
    if getattr(errors, kind.__name__, None) is not kind:
        return False
    return is_plain(error.__reduce__()[1])


def survives_pickle(error: BaseException) -> bool:
    """Tell whether any process can read a pickle of the error: it has a known class, plain data."""
    kind = type(error)
    is_known = getattr(builtins, kind.__name__, None) is kind or is_ours(error)
    return is_known and is_plain(error.args) and is_plain(vars(error))


def is_plain(value: object) -> bool:
    """Tell whether a value is made of nothing but plain values and containers."""
    try:
        return _is_plain(value)
    except RecursionError:  # it holds itself
        return False


def _is_plain(value: object) -> bool:
    if value is None or type(value) in (bool, int, float, str, bytes):
        return True
    if type(value) is dict:
        return _is_plain([*value, *value.values()])
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return False
