"""Copies that go on while training computes: in a thread for host memory, on a stream for CUDA.

A `PendingCopy` is one that is under way. It promises that what arrives is the state at the moment
it was started, as long as the tensors do not change before `before_update` has been called.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from dcp_checkfreq.errors import SnapshotFailed
from dcp_checkfreq.format.torch_private import versions_of
from dcp_checkfreq.runtime.clock import Clock
from dcp_checkfreq.runtime.crew import Crew
from dcp_checkfreq.snapshot.memcpy import Moved, copy_tensors
from dcp_checkfreq.snapshot.samples import Samples

_log = logging.getLogger(__name__)

_MOST_COPIES = 4  # of different writers at the same time; more wait


class Copy(NamedTuple):
    """What to copy: the memory, and the tensor it is part of, if that counts its own changes."""

    name: str  # for errors
    source: torch.Tensor
    target: torch.Tensor
    whole: torch.Tensor | None = None  # a DTensor: changes show in its version, not its shard's


class PendingCopy(Protocol):
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

    def let_go(self) -> None:
        """Wait for the end, and keep the sources no longer. Errors stay known."""
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
    """Notices sources that were changed in place before they were allowed to.

    By their versions, and by samples of what they hold: a write through ``.data``, numpy or DLPack
    raises no version.

    Torch raises a tensor's version when the change is done, so that one that is under way can be
    missed for a moment: the look from the training thread itself, in `allow_changes`, is certain.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        whole = [copy for copy in copies if copy.whole is not None]
        sources = [copy.source for copy in copies]
        self._copies = [*copies, *whole]
        self._tensors = sources + [copy.whole for copy in whole if copy.whole is not None]
        self._versions = versions_of(self._tensors)
        self.begins = [source.data_ptr() for source in sources]
        self._samples: Samples | None = Samples(sources, self.begins)
        self._are_allowed = False
        self._error: SnapshotFailed | None = None
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise if a source was changed too early. On any thread."""
        with self._lock:
            self._look()
            if self._error is not None:
                raise self._error

    def allow_changes(self) -> None:
        """On the training thread: look a last time."""
        with self._lock:
            self._look()
            self._let_go()
            if self._error is not None:
                raise self._error

    def let_go(self) -> None:
        """Look a last time, and keep nothing alive from now on."""
        with self._lock:
            self._look()
            self._let_go()

    def _let_go(self) -> None:
        self._are_allowed = True
        self._copies, self._tensors, self._versions = [], [], []
        self._samples = None

    def _look(self) -> None:
        if self._error is not None or self._are_allowed:
            return
        versions = versions_of(self._tensors)
        name = None
        if versions != self._versions:
            changed = zip(self._copies, versions, self._versions, strict=True)
            name = next(copy.name for copy, now, before in changed if now != before)
        elif self._samples is not None:
            # What is elsewhere by now was copied before: the copying itself has looked.
            number = self._samples.first_changed(
                lambda n: self._tensors[n].data_ptr() != self.begins[n]
            )
            name = None if number is None else self._copies[number].name
        if name is None:
            return
        self._error = _touched(name, "was changed")


def _touched(name: str, what: str) -> SnapshotFailed:
    return SnapshotFailed(
        f"{name!r} {what} while it was being copied, outside of the optimizer's step. Call "
        "wait_for_snapshot() before such a change, or use snapshot='blocking'"
    )


# Threads that stay: starting one waits for it to run, while training is to go on.
_CREW = Crew(_MOST_COPIES, "checkfreq-snapshot")


class _ThreadCopy:
    """Copies host memory in a background thread; an update has to wait for its end.

    If no thread can be started, the thread that waits for it copies.
    """

    def __init__(self, copies: Sequence[Copy], clock: Clock) -> None:
        self._watched = _Watched(copies)
        self._copying = _CREW.start(
            functools.partial(_timed_copy, copies, self._watched.begins, clock)
        )

    @property
    def is_done(self) -> bool:
        return self._copying.is_done

    @property
    def seconds_s(self) -> float:
        return self._copying.result()

    def before_update(self) -> None:
        self._copying.problem()
        self._watched.allow_changes()
        self.wait()

    def wait(self) -> None:
        error = self._copying.problem()
        if isinstance(error, SnapshotFailed):
            raise SnapshotFailed(error.why) from error  # of its own, as several may wait
        if error is not None:
            raise SnapshotFailed(f"copying failed: {error}") from error
        self._watched.check()

    def let_go(self) -> None:
        self._copying.problem()
        self._watched.let_go()


def _timed_copy(copies: Sequence[Copy], begins: Sequence[int], clock: Clock) -> float:
    started_s = clock.monotonic_s()
    _copy(copies, begins)
    return clock.monotonic_s() - started_s


def _copy(copies: Sequence[Copy], begins: Sequence[int]) -> None:
    try:
        copy_tensors([one.source for one in copies], [one.target for one in copies], begins)
    except Moved as moved:
        what = "was changed (its memory was freed, or moved elsewhere)"
        raise _touched(copies[moved.number].name, what) from moved


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    _log.info(
        "snapshots of %s are copied during training. Changes outside of the optimizer's step "
        "that torch does not count (.data, DLPack) are not noticed there: make them after "
        "wait_for_snapshot(), or use snapshot='blocking'",
        device,
    )
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class _StreamCopy:
    """Copies CUDA tensors of one device on a side stream. Never blocks the host.

    The side stream starts after all that the training stream has queued so far, and
    `before_update` makes the training stream wait for the copy: the order is kept on the device.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._watched = _Watched(copies)  # also keeps the sources' memory from being used again
        self._device = copies[0].source.device
        side = _side_stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        self._spans = _queue(copies, side)

    def before_update(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._spans.ended)
        self._watched.allow_changes()

    def wait(self) -> None:
        self._spans.ended.synchronize()
        self._watched.check()

    def let_go(self) -> None:
        self._spans.ended.synchronize()
        self._watched.let_go()

    @property
    def is_done(self) -> bool:
        return self._spans.is_done

    @property
    def seconds_s(self) -> float:
        return self._spans.seconds_s


class _QueuedCopy:
    """Copies of CUDA tensors on the training stream itself: what comes after them is in order."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies: Sequence[Copy] = copies  # their memory is kept from being used again
        self._spans = _queue(copies, torch.cuda.current_stream(copies[0].source.device))

    def before_update(self) -> None:
        pass

    def wait(self) -> None:
        self._spans.ended.synchronize()

    def let_go(self) -> None:
        self._spans.ended.synchronize()
        self._copies = ()

    @property
    def is_done(self) -> bool:
        return self._spans.is_done

    @property
    def seconds_s(self) -> float:
        return self._spans.seconds_s


class _StreamTimer:
    """The time on a stream between two events."""

    def __init__(self) -> None:
        # Blocking: a thread that waits on the host sleeps, rather than spin on a core.
        make: Any = functools.partial(torch.cuda.Event, enable_timing=True, blocking=True)
        self.begun: torch.cuda.Event = make()
        self.ended: torch.cuda.Event = make()

    @property
    def is_done(self) -> bool:
        return bool(self.ended.query())  # type: ignore[no-untyped-call]

    @property
    def seconds_s(self) -> float:
        return float(self.begun.elapsed_time(self.ended)) / 1000


def _queue(copies: Sequence[Copy], stream: torch.cuda.Stream) -> _StreamTimer:
    span = _StreamTimer()
    try:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            span.begun.record(stream)
            for one in copies:
                # Lazy bits first: torch would work on them on the host before the bytes are there.
                plain = one.source.resolve_conj().resolve_neg()
                # If its memory is freed meanwhile, nobody else gets it before the copy is done.
                one.source.record_stream(stream)
                one.target.copy_(plain, non_blocking=True)
            span.ended.record(stream)
    except RuntimeError as error:  # no memory for a copy in between
        stream.synchronize()  # what was queued writes into memory that is given back now
        raise SnapshotFailed(f"copying from {stream.device} failed: {error}") from error
    return span


Copies = Mapping[torch.device, Sequence[Copy]]  # by device of the source


def start_overlapped(copies: Copies, clock: Clock) -> Iterator[PendingCopy]:
    """Start all copies: those of host memory as one, those of each GPU as one of its own.

    Sources are detached tensors, kept alive until the copy goes. Targets have the same shape and
    dtype; for CUDA sources they are pinned host memory, or on the source's GPU. Yields each copy
    as it is started, so that one that fails leaves the others known.
    """
    for device, part in copies.items():
        yield _ThreadCopy(part, clock) if device.type == "cpu" else _StreamCopy(part)


def copy_at_once(copies: Copies) -> Iterator[PendingCopy]:
    """Copy host memory before this ends, and queue copies from GPUs on the current streams."""
    for device, part in copies.items():
        if device.type == "cpu":
            _copy(part, [one.source.data_ptr() for one in part])
        else:
            yield _QueuedCopy(part)
