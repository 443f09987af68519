"""Threads that help with work, which gets done without them, too.

While the interpreter shuts down new threads are refused (since Python 3.12), and executors refuse
work; a machine that is full refuses threads at any time. A save that is under way then must come to
its end. So what no thread will do is done by the thread that waits for it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Generic, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Cancelled(Exception):
    """Nobody had begun the task, and nobody will."""


class Task(Generic[T]):
    """Work that is done once, by the first thread that comes. Thread-safe.

    Attributes:
        is_nobodys: no thread will do it: `problem` and `result` do.
    """

    __slots__ = ("_begun", "_done", "_error", "_pid", "_value", "_work", "is_nobodys")

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._begun = threading.Lock()  # taken by the thread that does it, for good
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._value: T
        self.is_nobodys = True  # until a crew takes it
        self._pid = os.getpid()

    def run(self) -> None:
        """Do it, unless somebody has begun. Raises nothing: see `result`."""
        if not self._begun.acquire(blocking=False):
            return
        work = self._work
        assert work is not None
        try:
            self._value = work()
        except BaseException as error:  # noqa: BLE001  raised by `result`
            self._error = error
        finally:
            self._work = None  # it may hold a model
            self._done.set()

    def cancel(self) -> None:
        """See to it that nobody begins it."""
        if self._begun.acquire(blocking=False):
            self._work = None
            self._error = Cancelled()
            self._done.set()

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._done.is_set()

    def wait(self, at_most_s: float | None = None) -> bool:
        """Wait for its end in whichever thread it is done; tell whether it has ended."""
        return self._done.wait(at_most_s)

    def problem(self) -> BaseException | None:
        """Wait for its end, and return what it raised."""
        if self.is_nobodys:
            self.run()
        if self._pid != os.getpid() and not self._done.is_set():
            return Cancelled("it is done by the parent of this process")
        self._done.wait()
        return self._error

    def result(self) -> T:
        """Wait for its end, and return what it returned, or raise what it raised."""
        error = self.problem()
        try:
            if error is not None:
                raise error
            return self._value
        finally:
            del error  # else its traceback and this frame hold each other


class Crew:
    """A few threads that do tasks in the order in which they were started, or fewer, or none.

    The threads are started as they are needed, and end with `close`, or when the crew is dropped.
    They are daemons: they never keep the process from ending, only a thread that waits for a task
    does. In a forked child it is a new crew. Thread-safe.

    Args:
        most: threads.
        name: of the threads, with a number.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._begin()

    def _begin(self) -> None:
        """Begin with no threads: also in a child, in which those of the parent do not live."""
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._queue: queue.SimpleQueue[Task[Any] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._pid = os.getpid()
        weakref.finalize(self, _dismiss, self._queue, self._threads).atexit = False

    def start(self, work: Callable[[], T]) -> Task[T]:
        """Have a thread do it, as soon as one is free. Never fails."""
        task = Task(work)
        self.take(task)
        return task

    def take(self, task: Task[Any]) -> None:
        """Do the same with a task. Once."""
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            self._queue.put(task)
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
                self._add_thread()
            task.is_nobodys = not self._threads

    def _add_thread(self) -> None:
        thread = threading.Thread(
            target=_do_tasks,
            args=(self._queue, self._idle),
            name=f"{self._name}_{len(self._threads)}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as error:  # no more threads here, or now
            _log.debug("%s: %s", thread.name, error)
        else:
            self._threads.append(thread)

    def run_all(self, jobs: Iterable[Callable[[], T]]) -> list[T]:
        """Do all jobs, in this thread as well; return their results when all have ended.

        When some fail, the error of the first is raised. After an interrupt none is begun any more.
        """
        tasks = [self.start(job) for job in jobs]
        try:
            for task in tasks:
                task.run()
                if task.is_done and _is_interrupt(task.problem()):
                    break
            else:
                for task in tasks:
                    task.wait()
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:  # whatever has happened: they may use what the caller gives back
                task.wait()
        problems = [task.problem() for task in tasks]
        try:
            for problem in problems:
                if problem is not None and not isinstance(problem, Cancelled):
                    raise problem
            return [task.result() for task in tasks]
        finally:
            del problems, tasks

    def close(self) -> None:
        """End the threads when they have done what was started, and wait. May be called twice."""
        if self._pid != os.getpid():
            return
        with self._lock:
            threads, self._threads = self._threads, []
            self._pid = -1
        _dismiss(self._queue, threads)
        for thread in threads:
            thread.join()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[Crew], tuple[int, str]]:
        return Crew, (self._most, self._name)  # threads do not go to another process


def _dismiss(tasks: queue.SimpleQueue[Task[Any] | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        tasks.put(None)


def _do_tasks(tasks: queue.SimpleQueue[Task[Any] | None], idle: threading.Semaphore) -> None:
    while True:
        try:
            task = tasks.get_nowait()
        except queue.Empty:
            idle.release()
            task = tasks.get()
        if task is None:
            return
        task.run()
        del task  # else it lives until the next one comes


def _is_interrupt(problem: BaseException | None) -> bool:
    return problem is not None and not isinstance(problem, Exception)
