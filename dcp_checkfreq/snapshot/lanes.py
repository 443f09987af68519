"""Copies that go on while training computes: in a thread for host memory, on a stream for CUDA.

A lane is one such copy under way. It promises that what arrives is the state at the moment it was
started, as long as the tensors do not change before `before_update` has been called.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from dcp_checkfreq.clock import Clock
from dcp_checkfreq.errors import SnapshotFailed
from dcp_checkfreq.format.torch_private import version_of
from dcp_checkfreq.snapshot.copies import copy_tensors

_MOST_COPIES = 4  # of different writers at the same time; more wait

Copy = tuple[str, torch.Tensor, torch.Tensor]  # name for errors, source, target


class Lane(Protocol):
    """A copy under way."""

    def before_update(self) -> None:
        """On the training thread: return once whatever comes next may change the sources.

        Raises:
            SnapshotFailed: the copy failed, or the sources changed before.
        """
        ...

    def wait(self) -> None:
        """On any thread: return once the copy is complete in its targets. Raises the same."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether the copy is complete, or has failed."""
        ...

    @property
    def seconds_s(self) -> float:
        """How long the copy took; call it after `wait`."""
        ...


class _Watched:
    """Notices sources that were changed in place while they were being copied."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._seen = [(name, source, version_of(source)) for name, source, _ in copies]
        self._may_change = False
        self._lock = threading.Lock()

    def check(self, *, may_change_now: bool) -> None:
        with self._lock:
            if self._may_change:
                return
            self._may_change = may_change_now
            for name, source, version in self._seen:
                if version_of(source) != version:
                    raise SnapshotFailed(
                        f"{name!r} was changed while it was being copied, outside of the "
                        "optimizer's step. Call wait_for_snapshot() before such a change, or use "
                        "snapshot='blocking'"
                    )


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return threads that stay: starting one waits for it to run, while training is to go on."""
    return ThreadPoolExecutor(_MOST_COPIES, thread_name_prefix="checkfreq-snapshot")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not live on in a child


class _ThreadCopy:
    """Copies host memory in a background thread; an update has to wait for its end."""

    def __init__(self, copies: Sequence[Copy], clock: Clock) -> None:
        self._watched = _Watched(copies)
        self._copies = copies
        self._clock = clock
        self._error: BaseException | None = None
        self._done = threading.Event()
        self.seconds_s = 0.0
        _threads().submit(self._run)

    def _run(self) -> None:
        started_s = self._clock.monotonic_s()
        try:
            copy_tensors([one[1] for one in self._copies], [one[2] for one in self._copies])
            self._watched.check(may_change_now=True)
        except BaseException as error:  # noqa: BLE001  raised again in `wait`
            self._error = error
        self.seconds_s = self._clock.monotonic_s() - started_s
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def before_update(self) -> None:
        self.wait()

    def wait(self) -> None:
        self._done.wait()
        if isinstance(self._error, SnapshotFailed):
            raise self._error
        if self._error is not None:
            raise SnapshotFailed(f"copying failed: {self._error}") from self._error


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _StreamCopy:
    """Copies CUDA tensors of one device on a side stream. Never blocks the host.

    The side stream starts after all that the training stream has queued so far, and
    `before_update` makes the training stream wait for the copy: the order is kept on the device.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._watched = _Watched(copies)  # also keeps the sources' memory from being used again
        self._device = copies[0][1].device
        side = _side_stream(self._device)
        self._begun = _new_event()
        self._ended = _new_event()
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._begun.record(side)
            for _, source, target in copies:
                target.copy_(source, non_blocking=True)
            self._ended.record(side)

    def before_update(self) -> None:
        self._watched.check(may_change_now=True)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._ended)

    def wait(self) -> None:
        self._ended.synchronize()
        self._watched.check(may_change_now=True)

    @property
    def is_done(self) -> bool:
        return bool(self._ended.query())  # type: ignore[no-untyped-call]

    @property
    def seconds_s(self) -> float:
        return float(self._begun.elapsed_time(self._ended)) / 1000


class _QueuedCopy:
    """Copies of CUDA tensors on the training stream itself: what comes after them is in order."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._sources = [source for _, source, _ in copies]  # kept from being used again
        stream = torch.cuda.current_stream(self._sources[0].device)
        self._begun, self._ended = _new_event(), _new_event()
        self._begun.record(stream)
        for _, source, target in copies:
            target.copy_(source, non_blocking=True)
        self._ended.record(stream)

    def before_update(self) -> None:
        pass

    def wait(self) -> None:
        self._ended.synchronize()

    @property
    def is_done(self) -> bool:
        return bool(self._ended.query())  # type: ignore[no-untyped-call]

    @property
    def seconds_s(self) -> float:
        return float(self._begun.elapsed_time(self._ended)) / 1000


def start_overlapped(copies: Sequence[Copy], clock: Clock) -> list[Lane]:
    """Start all copies: those of host memory in one lane, those of each GPU in one of its own.

    Sources are detached tensors, kept alive until the lane goes. Targets have the same shape and
    dtype; for CUDA sources they are pinned host memory, or on the source's GPU.
    """
    return [
        _ThreadCopy(part, clock) if device.type == "cpu" else _StreamCopy(part)
        for device, part in _by_device(copies).items()
    ]


def copy_at_once(copies: Sequence[Copy]) -> list[Lane]:
    """Copy host memory before this returns, and queue copies from GPUs on the current streams."""
    lanes: list[Lane] = []
    for device, part in _by_device(copies).items():
        if device.type == "cpu":
            copy_tensors([source for _, source, _ in part], [target for _, _, target in part])
        else:
            lanes.append(_QueuedCopy(part))
    return lanes


def _by_device(copies: Sequence[Copy]) -> dict[torch.device, list[Copy]]:
    parts: dict[torch.device, list[Copy]] = {}
    for one in copies:
        parts.setdefault(one[1].device, []).append(one)
    return parts
