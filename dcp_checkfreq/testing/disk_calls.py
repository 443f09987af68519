"""Stop a real program at the n-th system call with which it changes a disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

CHANGES = (
    "mkdir",
    "rmdir",
    "link",
    "rename",
    "unlink",
    "ftruncate",
    "posix_fallocate",
    "fsync",
    "fdatasync",
)


class DiskCalls:
    """The count of calls so far, and what was under way at the chosen one."""

    def __init__(self) -> None:
        self.count = 0
        self.stopped_at: str | None = None


@contextmanager
def at_disk_call(
    n: int, when: Literal["before", "after"], do: Callable[[str], object]
) -> Iterator[DiskCalls]:
    """Call ``do`` once, just before or just after the ``n``-th call, from 0, that changes a disk.

    Calls are those made through Python's `os` module: new files, links, renames, removals, syncs
    and preallocation. Writing content is not counted: before the sync it promises nothing. ``do``
    gets the name of the call. The whole process is affected, so run one at a time.
    """
    calls = DiskCalls()
    lock = threading.Lock()

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if name == "open" and not (len(args) > 1 and args[1] & os.O_CREAT):
                return real(*args, **options)
            with lock:
                here = calls.count == n
                calls.count += 1
                if here:
                    calls.stopped_at = f"{when} os.{name}"
            if here and when == "before":
                do(name)
            result = real(*args, **options)
            if here and when == "after":
                do(name)
            return result

        return call

    real = {name: getattr(os, name) for name in (*CHANGES, "open")}
    try:
        for name, function in real.items():
            setattr(os, name, watched(name, function))
        yield calls
    finally:
        for name, function in real.items():
            setattr(os, name, function)
