"""One call at a time of an object, and none from within another: noticed, not muddled."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from dcp_checkfreq.errors import SaveFailed

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    thread: int
    frame: int  # its address: holding the frame would hold all that is in it

    def is_going_on(self, frame: FrameType | None) -> bool:
        """Tell whether it is on the stack whose innermost frame this is.

        An interrupt may come when a call has ended and before that is noted: what is noted is a
        hint, the stack knows.
        """
        while frame is not None and not (
            id(frame) == self.frame and frame.f_code is _CODE_OF_CALLS
        ):
            frame = frame.f_back
        return frame is not None


class OneCall:
    """Knows which call of its owner is going on. Thread-safe as far as the interpreter is.

    Args:
        where: the owner is at work, for errors.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._call: _Call | None = None
        self._is_handed_on = False
        self._pid = os.getpid()

    def begin(self, name: str, frame: FrameType) -> _Call | None:
        """Begin a call in this thread; return what `end` is to be given.

        Args:
            name: of the method.
            frame: of the call.

        Raises:
            SaveFailed: another one is going on.
        """
        if self._pid != os.getpid():  # of what goes on in the parent nothing does here
            self._pid, self._call, self._is_handed_on = os.getpid(), None, False
        before = self._call
        mine = _Call(name, threading.get_ident(), id(frame))
        if before is not None:
            if before.thread == mine.thread:
                is_inside = before.is_going_on(frame.f_back)
                if is_inside and not self._is_handed_on:
                    raise SaveFailed(self._where, _from_within(name, before.name))
            else:
                is_inside = False
                if before.is_going_on(sys._current_frames().get(before.thread)):
                    raise SaveFailed(self._where, _beside(name, before))
            before = before if is_inside else None
        self._is_handed_on = False
        self._call = mine
        return before

    def end(self, before: _Call | None) -> None:
        """End the call that `begin` has returned this for."""
        self._call, self._is_handed_on = before, before is not None

    def hand_on(self) -> None:
        """Let the owner's own method make its calls from here on, until this one has ended."""
        self._is_handed_on = True


def _from_within(name: str, outer: str) -> str:
    return (
        f"{name}() was called from within {outer}() of the same Checkpointer. A part's state_dict "
        "and load_state_dict, a hook and a signal handler must not; only preempt() may be called "
        "at any time"
    )


def _beside(name: str, other: _Call) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return (
        f"{name}() was called while {other.name}() of the same Checkpointer is going on in thread "
        f"{names.get(other.thread)!r}. Call it from one thread at a time; only preempt() may be "
        "called from any"
    )


class _Owner(Protocol):
    _calls: OneCall


S = TypeVar("S", bound=_Owner)


def one_at_a_time(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R]:
    """Decorate a method that must not be called while another one of these is going on."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        frame = inspect.currentframe()
        assert frame is not None
        before = self._calls.begin(method.__name__, frame)
        try:
            return method(self, *args, **kwargs)
        finally:
            del frame  # it holds itself
            self._calls.end(before)

    return call


_CODE_OF_CALLS = one_at_a_time(lambda self: None).__code__
