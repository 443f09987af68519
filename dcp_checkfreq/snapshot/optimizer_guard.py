"""Makes `optimizer.step` wait for a snapshot that is still being copied."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from dcp_checkfreq.errors import SnapshotFailed
from dcp_checkfreq.runtime.outcome import report
from dcp_checkfreq.shards.codec import local_of
from dcp_checkfreq.state.held_optimizers import initialised_in

_log = logging.getLogger(__name__)

Address = tuple[int, int]  # of a tensor's first element, and its bytes


class Guarded(Protocol):
    """A snapshot, seen from the training loop."""

    def before_update(self) -> None:
        """Return once the live state may change. Raises `SnapshotFailed`."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether nothing is being copied any more."""
        ...


def address_of(local: torch.Tensor) -> Address:
    """Return where a tensor's elements are."""
    return local.data_ptr(), local.nbytes


class Guard:
    """Stands before the weight updates of some optimizers (CheckFreq, section 4.2).

    Works with any optimizer that is called through `Optimizer.step`: closures, GradScaler,
    foreach and fused ones, accumulated gradients (the hook runs only when there is a step). Not
    with a step that is replayed from a CUDA graph, which runs no hook: an optimizer whose hook has
    not run since the last snapshot counts as not guarded.

    Args:
        optimizers: whose parameters and state may be copied while training goes on.
        raise_errors: raise a failed snapshot before the update, rather than log it there. The
            save has failed in either case, and is reported as such.
        around_update: called before and after each update, after the waiting, and with what the
            waiting began: for measurements.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        raise_errors: bool = False,
        around_update: UpdateTimer | None = None,
    ) -> None:
        self._raise_errors = raise_errors
        self._times = around_update
        self._snapshot: Guarded | None = None
        self._pid = os.getpid()
        # Since the last snapshot. Weak, as the hooks of an optimizer keep its guard alive.
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._heard = weakref.WeakSet(self._heard_of(optimizers))
        self._replayed: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.has_stepped = False  # since `mark_step`, or what a step changes may have changed
        self._hooks = [
            remove
            for optimizer in self._heard
            for remove in (
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(self._after),
            )
        ]

    @staticmethod
    def _heard_of(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        """Return those whose steps are heard of, once each; a wrapper's are those inside of it."""
        found = [one for optimizer in optimizers for one in initialised_in(optimizer)]
        return list({id(one): one for one in found}.values())

    @torch.no_grad()
    def addresses(self, *, of_all: bool = False) -> set[Address]:
        """Return where the tensors are that only these optimizers change, in steps we hear of.

        Args:
            of_all: also of those that have not stepped since the last snapshot.
        """
        optimizers = self._heard if of_all else self._stepped
        # Sparse and nested ones have no elements in a row: their parts are copied at once.
        return {
            (one.data_ptr(), size)
            for one in map(local_of, _tensors_of(optimizers))
            if one.layout is torch.strided and not one.is_nested and (size := one.nbytes)
        }

    def mark_step(self) -> None:
        """Say that a training step is complete: `has_stepped` is of the next one."""
        self.has_stepped = False

    def hears(self, optimizer: Optimizer) -> bool:
        """Tell whether all steps of this optimizer are heard of."""
        inside = initialised_in(optimizer)
        return bool(inside) and all(
            one in self._heard and one not in self._replayed for one in inside
        )

    def arm(self, snapshot: Guarded) -> None:
        """Let the next update wait for this snapshot."""
        self._snapshot = snapshot
        self._pid = os.getpid()
        self._stepped.clear()

    def wait(self) -> None:
        """Return once the live state may change.

        Raises:
            SnapshotFailed: the snapshot failed; its step will not be saved.
        """
        snapshot = self._snapshot
        if snapshot is None:
            return
        if self._pid != os.getpid():
            self._snapshot = None  # the memory that is copied is the parent's
            return
        try:
            snapshot.before_update()
        finally:
            if snapshot.is_done:  # else another optimizer, on another stream, has to wait too
                self._snapshot = None

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self.has_stepped = True
        if _is_being_captured():
            self._replayed.add(optimizer)
            return  # its replays will not come by here
        self._stepped.add(optimizer)
        times = self._times
        if self._snapshot is not None:
            begun = times.mark() if times else None
            try:
                self.wait()
            except SnapshotFailed as error:
                if self._raise_errors:
                    raise
                report(_log.error, "this step will not be saved: %s", error)
            if times:
                times.add_wait(begun, times.mark())
        if times:
            self._update_begun = times.mark()

    def _after(self, *_: Any) -> None:
        if self._times and not _is_being_captured():
            self._times.add_update(self._update_begun, self._times.mark())

    def close(self) -> None:
        """Take the hooks away. May be called twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._stepped.clear()
        self._snapshot = None


def _tensors_of(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            # an optimizer made by hand may keep one tensor, or anything
            for value in state.values() if isinstance(state, dict) else (state,):
                if isinstance(value, torch.Tensor):
                    yield value


def _is_being_captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class UpdateTimer(Protocol):
    """Where a guard reports how long things took. Moments are what `mark` returns."""

    mark: Callable[[], Any]

    def add_wait(self, begun: Any, ended: Any) -> None:
        """Take note that an update waited for a snapshot."""
        ...

    def add_update(self, begun: Any, ended: Any) -> None:
        """Take note of an update (Tw)."""
        ...


# The optimizer's hooks keep its guard alive; this must not, as the guard keeps the optimizer.
_guards: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Guard]] = weakref.WeakKeyDictionary()


def guard_of(optimizer: Optimizer) -> Guard:
    """Return the guard that writers made anew for every save share for this optimizer."""
    known = _guards.get(optimizer)
    guard = known() if known is not None else None
    if guard is None:
        guard = Guard([optimizer])
        _guards[optimizer] = weakref.ref(guard)
    return guard
