"""What is finished before this process ends, in whatever way that Python can see.

There are two moments. When the main thread has ended, saves that are under way are waited for while
all of the interpreter still works: right after this, executors refuse work. When all other threads
have ended, too, what is open is closed; if something was lost the process ends with an exit code
that is not 0.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeVar

from dcp_checkfreq.runtime.error_reports import text_of
from dcp_checkfreq.runtime.outcome import report, try_to

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Unfinished(Protocol):
    """Something that a background thread does, which must not be cut off."""

    @property
    def is_under_way(self) -> bool:
        """Whether it has begun and not ended."""
        ...

    def wait_at_exit(self) -> None:
        """Wait for its end, or raise why there is none.

        On the main thread; the interpreter may be shutting down.
        """
        ...

    def problem(self) -> BaseException | None:
        """Return why it failed, once it has ended."""
        ...


class _Process:
    """What this process has to finish; in a forked child it is nothing at first."""

    def __init__(self) -> None:
        # No lock: what is taken out by the collector may come at any moment, to any thread.
        self.watched: dict[int, weakref.ref[Unfinished]] = {}
        self.open: dict[int, tuple[weakref.ref[Any], Callable[[Any], None], str]] = {}
        self.lost: list[BaseException] = []
        self.begun: list[Unfinished] = []  # was under way when the main thread ended

    def under_way(self) -> list[Unfinished]:
        found = [watched() for watched in list(self.watched.values())]
        return [one for one in found if one is not None and one.is_under_way]


_process = _Process()
_is_hooked = False


def watch(one: Unfinished) -> None:
    """Finish it before this process ends, if it is under way then. It is not kept alive."""
    _hook()
    mine, number = _process, id(one)

    def gone(_: object) -> None:
        mine.watched.pop(number, None)

    mine.watched[number] = weakref.ref(one, gone)


def close_at_exit(owner: T, close: Callable[[T], None], *, place: str = "") -> Callable[[], None]:
    """Call ``close`` with ``owner`` before this process ends, if it is alive then.

    What it raises is logged, and makes the exit code another one than 0.

    Args:
        owner: is not kept alive.
        close: takes it.
        place: where it is at work, for `open_at`.

    Returns:
        What takes it back, as ``owner`` was closed.
    """
    _hook()
    mine, number = _process, id(owner)

    def forget(_: object = None) -> None:
        mine.open.pop(number, None)

    mine.open[number] = (weakref.ref(owner, forget), close, place)
    return forget


def open_at(place: str) -> list[Any]:
    """Return what is alive and open at this place in this process."""
    found = [open_() for open_, _close, where in list(_process.open.values()) if where == place]
    return [one for one in found if one is not None]


def wait_for_all() -> None:
    """Wait for what is under way now."""
    for one in _process.under_way():
        one.wait_at_exit()


def lost(error: BaseException) -> None:
    """Say that nobody was left to hear of this: the exit code will not be 0."""
    _hook()
    _process.lost.append(error)


def _hook() -> None:
    global _is_hooked
    if _is_hooked:
        return
    _is_hooked = True
    atexit.register(_at_exit)
    # Private, and all that comes before executors refuse work (their own hook is one of these, and
    # was there first: the last one comes first). Saves end well without it, as no step of ours
    # needs an executor; but other packages', such as the client of an S3 server that it has no
    # open connection to, may.
    register: Callable[[Callable[[], None]], None] | None
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down already
            register(_main_thread_has_ended)


def _main_thread_has_ended() -> None:
    mine = _process
    mine.begun = mine.under_way()
    given_up = {one: problem for one in mine.begun if (problem := _wait_for(one)) is not None}
    mine.begun = [one for one in mine.begun if one not in given_up]
    mine.lost += given_up.values()
    if given_up or multiprocessing.parent_process() is not None:
        # Such processes end without the other hooks; and what was given up may be the work of an
        # executor's thread, which Python would wait for now.
        _at_exit()


def _at_exit() -> None:
    mine = _process
    begun = mine.begun + [one for one in mine.under_way() if one not in mine.begun]
    problems = list(mine.lost)
    for open_, close, _place in list(mine.open.values()):
        owner = open_()
        if owner is None:
            continue
        try:
            close(owner)
        except BaseException as error:  # noqa: BLE001  logged below
            problems.append(error)
    for one in begun:
        problem = _wait_for(one) or one.problem()
        if problem is not None and problem not in problems:
            problems.append(problem)
    mine.lost, mine.begun = [], []
    if problems:
        _end(problems)


def _wait_for(one: Unfinished) -> Exception | None:
    """Wait for the end of one; return why there is none."""
    try:
        one.wait_at_exit()
    except Exception as error:  # noqa: BLE001  reported at the end
        return error
    except BaseException as error:  # noqa: BLE001  the user's Ctrl-C
        _end([error])
    return None


def _end(problems: list[BaseException]) -> NoReturn:
    for problem in problems:
        text = text_of(problem)
        report(_log.error, "this process ends, and something was not saved: %s", text)
    code: object = getattr(problems[0], "exit_code", 1)
    try_to(logging.shutdown)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            try_to(stream.flush)
    # The only way to an exit code from here.
    os._exit(code if isinstance(code, int) and code else 1)


def _in_child() -> None:
    global _process
    _process = _Process()


os.register_at_fork(after_in_child=_in_child)
