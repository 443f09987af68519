"""Asynchronous saves: a process group of their own, their turn, and the way to another process."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from dcp_checkfreq.dropin.behind import Switch, behind_writer
from dcp_checkfreq.format.torch_private import fsspec_storage
from dcp_checkfreq.ranks.own_group import KnownGroup, OwnGroup, world
from dcp_checkfreq.runtime.process_end import close_at_exit, watch

_TIMEOUT_S = 1800.0  # torch's for gloo

_Stock = Callable[..., Any]


class _Save:
    """One that was begun, for the end of the process or of its process group."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    @property
    def is_under_way(self) -> bool:
        """Whether it has not ended."""
        return not self.future.done()

    def wait_at_exit(self) -> None:
        """Wait for its end, as Python would for its thread."""
        concurrent.futures.wait([self.future])

    def problem(self) -> BaseException | None:
        """Return why it failed."""
        return self.future.exception() if self.future.done() else None


class _Answer(Future[Any]):
    """What the caller gets of a save: it knows whether anybody has asked how that ended."""

    def __init__(self) -> None:
        super().__init__()
        self.is_heard = False
        self.set_running_or_notify_cancel()  # as that of the executor, it cannot be cancelled

    def result(self, timeout: float | None = None) -> Any:
        """Return what the save returns, or raise its error."""
        self.is_heard = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return its error."""
        self.is_heard = True
        return super().exception(timeout)

    def say(self) -> None:
        """Raise the error that nobody has asked for."""
        if self.done() and not self.is_heard:
            super().result()


class _Last:
    """The last asynchronous save of this process: an error that nobody hears of is told at its end.

    One before it is not: whoever saves again has more than that one.
    """

    def __init__(self) -> None:
        self.save: _Save | None = None
        self.answer: _Answer | None = None
        self._forget: Callable[[], None] | None = None

    def follow(self, begun: Future[Any]) -> Future[Any]:
        """Return the answer of a save that has begun."""
        if self._forget is not None:
            self._forget()
        self.save, self.answer = _Save(begun), _Answer()
        watch(self.save)
        self._forget = close_at_exit(self.answer, _Answer.say)
        begun.add_done_callback(functools.partial(_hand_on, self.answer))
        return self.answer


_last = _Last()


class _Line:
    """The asynchronous saves of one process group, one after the other: they share one of gloo."""

    def __init__(self) -> None:
        self.of = KnownGroup(world())
        self.own = OwnGroup(_TIMEOUT_S)
        self.last: _Save | None = None

    def behind_the_last(self, staged: Any) -> Any:
        """Return what is there once the save before has ended: ``staged``."""
        last = self.last
        if last is None or last.future.done():
            return staged
        ready: Future[Any] = Future()

        def go_on(_: object) -> None:
            if isinstance(staged, Future):
                staged.add_done_callback(functools.partial(_hand_on, ready))
            else:
                ready.set_result(staged)

        last.future.add_done_callback(go_on)
        return ready


def _hand_on(to: Future[Any], done: Future[Any]) -> None:
    error = done.exception()
    if error is None:
        to.set_result(done.result())
    else:
        to.set_exception(error)


_line: _Line | None = None


def _the_line() -> _Line:
    """Return the one of the process group that is there now. On all ranks."""
    global _line
    if _line is None or not _line.of.is_it(world()):
        _line = _Line()
    return _line


def wait_for_the_last() -> None:
    """Wait for the asynchronous saves that have begun."""
    if _line is not None and _line.last is not None:
        _line.last.wait_at_exit()


def in_a_thread(stock: _Stock, executor: Any, staged: Any, **options: Any) -> Future[Any]:
    """Start a save in a thread; without a process group it gets one of its own.

    The default group is the training loop's: two threads that use it at once hang, or abort.
    """
    everyone = world()
    begun: Future[Any]
    if not Switch.is_on:
        begun = stock(executor, staged, **options)
        return begun
    if (
        options.get("no_dist")
        or options.get("process_group") is not None
        or everyone is None
        or everyone.size() == 1
    ):
        return _last.follow(stock(executor, staged, **options))
    line = _the_line()
    options["process_group"] = line.own.group
    begun = stock(executor, line.behind_the_last(staged), **options)
    answer = _last.follow(begun)
    line.last = _last.save
    return answer


class Carried:
    """A writer of stock's on its way to another process, where ours will be behind it, too."""

    def __init__(self, writer: FileSystemWriter, arrive: Callable[[FileSystemWriter], Any]) -> None:
        self._writer = writer
        self._arrive = arrive

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The folder it saves into."""
        return self._writer.checkpoint_id

    def __reduce__(self) -> tuple[Any, ...]:
        return self._arrive, (self._writer,)


def in_a_process(
    arrive: Callable[[FileSystemWriter], Any],
    stock: _Stock,
    executor: Any,
    staged: Any,
    **options: Any,
) -> Future[Any]:
    """Start a save in another process, in which the drop-in has to be on for it.

    Args:
        arrive: called there with the writer, which it returns.
        stock: the function that starts it.
        executor: its object.
        staged: see there.
        options: see there.
    """
    writer: Any = options.get("storage_writer")
    if writer is None and Switch.is_on:
        writer = _writer_for(options.get("checkpoint_id"))
    is_stocks = isinstance(writer, FileSystemWriter)
    ours = behind_writer(writer).ours(writer) if is_stocks else None
    if ours is None:
        begun: Future[Any] = stock(executor, staged, **options)
        return begun
    begun = stock(executor, staged, **options | {"storage_writer": Carried(writer, arrive)})
    in_flight = ours.in_flight

    def ended(done: Future[Any]) -> None:
        in_flight.taken_up(threading.current_thread())
        if in_flight.current is not None:
            in_flight.current.end(done.exception())

    begun.add_done_callback(ended)
    return begun


def _writer_for(checkpoint_id: Any) -> FileSystemWriter | None:
    """Return the writer that stock would make there; None where it would refuse."""
    if not checkpoint_id:
        return None
    for kind in (FileSystemWriter, fsspec_storage().FsspecWriter):
        if kind.validate_checkpoint_id(checkpoint_id):
            made: FileSystemWriter = kind(checkpoint_id)
            return made
    return None


def _in_child() -> None:
    global _line, _last
    _line, _last = None, _Last()


os.register_at_fork(after_in_child=_in_child)
