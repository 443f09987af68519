"""`install` and `uninstall`: stock's classes themselves change, whoever has imported them when.

A script may hold `FileSystemWriter` since before, or a subclass of it: so no name is replaced but
the methods of the class, and its objects stay what they are.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from dcp_checkfreq.dropin import background, readers, writers
from dcp_checkfreq.dropin.behind import Switch, behind_writer, saves_under_way
from dcp_checkfreq.format.torch_private import ProcessExecutor, ThreadExecutor

_log = logging.getLogger(__name__)

_JOIN_S = 5.0  # a thread whose save has just ended

_lock = threading.RLock()
_depth = 0


@dataclass(frozen=True, slots=True)
class _Patch:
    """One method of a class that was replaced."""

    owner: type
    name: str
    before: Any  # what the class had of its own; None: it inherits the method
    method: Callable[..., Any]

    def undo(self) -> None:
        """Put back what was there, unless somebody else has replaced ours."""
        if vars(self.owner).get(self.name) is not self.method:
            place = f"{self.owner.__name__}.{self.name}"
            _log.warning("drop-in: %s was replaced by others and stays; ours passes on", place)
        elif self.before is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


_patches: list[_Patch] = []


class Installed:
    """An `install` that ends with a ``with`` block."""

    def __init__(self) -> None:
        self._is_over = False

    def __enter__(self) -> Installed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._is_over:
            self._is_over = True
            uninstall()


def install() -> Installed:
    """Let stock DCP save and load through `CheckFreqWriter` and `CheckFreqReader` from now on.

    That is for `dcp.save`, `dcp.async_save` and `dcp.load` by ``checkpoint_id=``, and by stock's
    `FileSystemWriter`, `FileSystemReader`, `FsspecWriter` and `FsspecReader`, whose options keep
    their meanings. May be called again; each call is undone by one of `uninstall`.

    Returns:
        For ``with install():``, which uninstalls at its end.
    """
    global _depth
    with _lock:
        _depth += 1
        if _depth == 1:
            _patch()
            Switch.is_on = True
            _log.info("%s", notice())
    return Installed()


def notice() -> str:
    """Return the line that says that it is on, and what it has replaced."""
    return (
        f"drop-in is on (torch {torch.__version__}): FileSystemWriter, FsspecWriter, "
        "FileSystemReader and FsspecReader save and load through CheckFreqWriter and "
        "CheckFreqReader; asynchronous saves without a process group get one of gloo"
    )


def uninstall() -> None:
    """Undo one `install`; the last one waits for asynchronous saves and puts stock's methods back.

    Without an `install` it does nothing.
    """
    global _depth
    with _lock:
        if _depth > 1 or _depth == 0:
            _depth = max(0, _depth - 1)
            return
        _depth = 0
        Switch.is_on = False
    background.wait_for_the_last()
    for worker in saves_under_way():
        worker.join(_JOIN_S)
    with _lock:
        if Switch.is_on:  # again, by another thread
            return
        if saves_under_way():
            _log.info("drop-in is off; its methods stay for a save under way, and pass on others")
            return
        _unpatch()
        _log.info("drop-in is off")


def arrive(writer: FileSystemWriter) -> FileSystemWriter:
    """Let ours be behind a writer that came from a process with the drop-in; return it."""
    with _lock:
        _patch()
    behind_writer(writer).is_carried = True
    return writer


def _patch() -> None:
    if _patches:
        return
    for owner, methods in (
        (FileSystemWriter, writers.METHODS),
        (FileSystemReader, readers.METHODS),
        (ThreadExecutor, {"execute_save": background.in_a_thread}),
        (ProcessExecutor, {"execute_save": functools.partial(background.in_a_process, arrive)}),
    ):
        for name, ours in methods.items():
            stock = inspect.getattr_static(owner, name)
            method = _with_stock(ours, stock)
            _patches.append(_Patch(owner, name, vars(owner).get(name), method))
            setattr(owner, name, method)


def _unpatch() -> None:
    while _patches:
        _patches.pop().undo()


def _with_stock(ours: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method: ours, with stock's own function as its first argument."""

    @functools.wraps(stock)  # DCP looks at its signature
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(stock, self, *args, **kwargs)

    return method
