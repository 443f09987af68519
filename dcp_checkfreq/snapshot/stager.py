"""Copies a state dict into leased buffers and hands DCP a state dict that lives there."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_checkfreq.errors import CheckFreqError, SnapshotFailed
from dcp_checkfreq.runtime.clock import Clock, SystemClock
from dcp_checkfreq.runtime.gc_paused import collector_held
from dcp_checkfreq.shards.codec import cloned
from dcp_checkfreq.shards.nesting import naming
from dcp_checkfreq.shards.self_described import describes_itself, to_pickle
from dcp_checkfreq.snapshot.background_copy import (
    Copy,
    PendingCopy,
    copy_at_once,
    start_overlapped,
)
from dcp_checkfreq.snapshot.copy_plan import (
    Asked,
    CopyPlan,
    Kept,
    Leases,
)
from dcp_checkfreq.snapshot.inventory import Inventory, Survey
from dcp_checkfreq.snapshot.optimizer_guard import Address
from dcp_checkfreq.snapshot.pool import PROCESS_POOL, BufferPool, allocated_bytes, device_pool

# Less than this is copied at once: a thread would cost more than it saves.
OVERLAP_FROM_BYTES = 1 << 20
_NEVER_CHANGES = frozenset([str, int, float, bool, type(None), bytes, complex])
_GPU_SHARE = 0.9  # of the free GPU memory; the rest is for peaks that were not seen


class _Staged(dict[str, Any]):
    """A state dict in leased buffers. When it goes, the leases go."""

    __slots__ = ("leases",)
    leases: Leases

    def __reduce__(self) -> tuple[Any, ...]:
        # To another process goes the content, not the lease.
        return dict, ({key: _to_pickle(value, str(key)) for key, value in self.items()},)


class Snapshot:
    """A copy of a state, complete or with copies under way. Thread-safe.

    Attributes:
        state: what to save. Its tensors are complete after `wait`. Those that another rank writes
            are meta tensors of the same shape and dtype.
        copied_bytes: that this rank copies.
        state_bytes: of all tensors of this rank.
    """

    def __init__(
        self,
        state: dict[str, Any],
        pending: Sequence[PendingCopy],
        at_once_s: float,
        copied_bytes: int,
        state_bytes: int,
    ) -> None:
        self.state = state
        self._pending = pending
        self._at_once_s = at_once_s
        self.copied_bytes = copied_bytes
        self.state_bytes = state_bytes

    def before_update(self) -> None:
        """On the training thread: return once the live state may change.

        Raises:
            SnapshotFailed: the copy failed; this snapshot must not be saved.
        """
        for copying in self._pending:
            copying.before_update()

    def wait(self) -> None:
        """On any thread: return once the copy is complete. Raises the same."""
        for copying in self._pending:
            copying.wait()

    def end(self) -> None:
        """Let go of the copy: it is on storage, or given up."""
        self.state = {}

    def when_done(self) -> Future[dict[str, Any]]:
        """Return a future of the complete state, or of the error."""
        future: Future[dict[str, Any]] = Future()

        def wait() -> None:
            try:
                self.wait()
            except BaseException as error:  # noqa: BLE001  the future raises it
                future.set_exception(error)
            else:
                future.set_result(self.state)

        if not self.is_done:
            with contextlib.suppress(RuntimeError):  # no thread can be had, here or now
                threading.Thread(target=wait, name="checkfreq-staged", daemon=True).start()
                return future
        wait()
        return future

    @property
    def is_done(self) -> bool:
        """Whether nothing is being copied any more."""
        return all(copying.is_done for copying in self._pending)

    @property
    def copy_s(self) -> float:
        """How long copying took, at once and during training; call it after `wait`."""
        return self._at_once_s + max((copying.seconds_s for copying in self._pending), default=0.0)


class Stager:
    """Stages for one writer; the memory comes from pools that all writers share."""

    def __init__(
        self,
        pool: BufferPool = PROCESS_POOL,
        *,
        overlap_from_bytes: int = OVERLAP_FROM_BYTES,
        clock: Clock | None = None,
    ) -> None:
        self._pool = pool
        self._overlap_from_bytes = overlap_from_bytes
        self._clock = clock or SystemClock()
        self._leases: Leases | None = None

    def __reduce__(self) -> tuple[type[Stager], tuple[()]]:
        return Stager, ()  # a lease means nothing in another process

    def stage(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of the state that no later change of the original can reach.

        Raises:
            UnsupportedState: a tensor that could not be written, or loaded again.
            SnapshotFailed: no buffer, or a value that cannot be copied.
        """
        snapshot = self.begin(self.survey(state))
        try:
            snapshot.wait()
        except BaseException:
            self.release()
            raise
        return snapshot.state

    def survey(self, state: Mapping[str, Any]) -> Survey:
        """Look at a state, which may be that of an earlier snapshot.

        Raises:
            UnsupportedState: a tensor that could not be written, or loaded again.
        """
        with collector_held():
            return Survey(state, [plan.inventory for plan in self._plans_before()])

    def _plans_before(self) -> list[CopyPlan]:
        """Return the plans of the last snapshots."""
        return [
            kept.plan
            for kept in self._pool.kept
            if isinstance(kept, Kept) and kept.plan is not None
        ]

    @torch.no_grad()
    def begin(
        self,
        survey: Survey,
        *,
        only: AbstractSet[str] | None = None,
        guarded: AbstractSet[Address] = frozenset(),
        on_gpu: bool = False,
        touch_first: bool = False,
    ) -> Snapshot:
        """Start a snapshot of a state as it is now.

        Tensors are copied into the leased buffer: views only their own elements, tied ones once.
        Everything else is deep-copied. What is not guarded is copied before this returns (on CUDA:
        queued on the current stream, so that later work on it comes after). Waits while the
        snapshot before is still being written out.

        Args:
            survey: of the state.
            only: flat keys of the tensors that this rank writes; None: all of them.
            guarded: where the tensors are that nobody changes before `Snapshot.before_update`.
            on_gpu: copy guarded CUDA tensors into GPU memory, to be read from there.
            touch_first: make sure that new memory is there before the copying starts.

        Raises:
            SnapshotFailed: nothing was staged.
        """
        asked = Asked(only, guarded, on_gpu, self._overlap_from_bytes)
        plan = self._plan(survey.inventory, asked)
        leases = Leases(self._pool.lease(plan.host_bytes, fit=only is not None))
        try:
            for device, size_bytes in plan.gpu_bytes.items():
                leases.on_device[device] = device_pool(device).lease(size_bytes, fit=True)
            if touch_first:
                leases.host.touch()
            everything = functools.partial(_by_path, survey)
            with collector_held(), naming(everything):
                staged = self._copy(survey, plan, leases)
        except CheckFreqError:
            leases.release()
            raise
        except Exception as error:  # whatever a value of the user's raises when it is copied
            leases.release()
            raise SnapshotFailed(f"a value of the state cannot be copied: {error}") from error
        except BaseException:
            leases.release()
            raise
        self._leases = staged.leases = leases
        return Snapshot(
            staged,
            leases.pending,
            leases.at_once_s,
            plan.copied_bytes,
            survey.inventory.state_bytes,
        )

    def needed_bytes(
        self, survey: Survey, *, guarded: AbstractSet[Address], on_gpu: bool
    ) -> tuple[int, int]:
        """Return how many bytes of host and GPU memory snapshots of all of a state take.

        With ``on_gpu`` what is guarded may go to either: it is counted in both.
        """
        host_bytes = CopyPlan(survey.inventory, Asked(None, guarded, on_gpu=False)).host_bytes
        plan = CopyPlan(survey.inventory, Asked(None, guarded, on_gpu=on_gpu))
        return allocated_bytes(host_bytes), sum(map(allocated_bytes, plan.gpu_bytes.values()))

    def _plan(self, inventory: Inventory, asked: Asked) -> CopyPlan:
        """Return the plan of an earlier snapshot that fits this one, or a new one."""
        fit = (plan for plan in self._plans_before() if plan.is_for(inventory, asked))
        return next(fit, None) or CopyPlan(inventory, asked)

    def _copy(self, survey: Survey, plan: CopyPlan, leases: Leases) -> _Staged:
        kept = leases.kept(plan, survey.values)
        begun_s = self._clock.monotonic_s()
        for copying in copy_at_once(_copies(plan.at_once, survey, kept)):
            leases.pending.append(copying)
        leases.at_once_s = self._clock.monotonic_s() - begun_s
        staged = _Staged(_rebuilt(survey.tree, kept.tensors, survey.values))
        # Last: a thread that copies would slow down all of the above.
        for copying in start_overlapped(_copies(plan.overlapped, survey, kept), self._clock):
            leases.pending.append(copying)
        return staged

    @property
    def holds_a_snapshot(self) -> bool:
        """Whether a snapshot is leased that was not released yet."""
        return self._leases is not None

    def check(self) -> None:
        """Raise `SnapshotFailed` if the snapshot that is held turned out to be torn."""
        if self._leases is not None:
            for copying in self._leases.pending:
                copying.wait()

    def handed_to(self, worker: threading.Thread) -> None:
        """Name the thread that writes the snapshot out; its end ends the lease."""
        if self._leases is not None:
            self._leases.handed_to(worker)

    def release(self) -> None:
        """Say that the snapshot's bytes are on storage, or given up. May be called twice."""
        # Taken out first: once it is released, `begin` in another thread may set the next one.
        leases, self._leases = self._leases, None
        if leases is not None:
            leases.release()


def gpu_copy_s(survey: Survey, guarded: AbstractSet[Address]) -> float | None:
    """Return how long copying what is guarded into free GPU memory takes (Tg).

    None without a GPU, or if it does not fit into what is free. The memory is kept in the pool.
    """
    plan = CopyPlan(survey.inventory, Asked(None, guarded, on_gpu=True))
    seconds_s = 0.0
    for device, size_bytes in plan.gpu_bytes.items():
        if size_bytes > torch.cuda.mem_get_info(device)[0] * _GPU_SHARE:
            return None
        try:
            lease = device_pool(device).lease(size_bytes, fit=True)
        except SnapshotFailed:
            return None
        copies = [
            Copy("", local, slot.part_of(lease.memory, piece))
            for piece, slot, local in zip(
                plan.inventory.pieces, plan.slots, survey.locals, strict=True
            )
            if slot is not None and slot.device == device
        ]
        try:
            for warm in (False, True):
                (queued,) = copy_at_once({device: copies})
                queued.wait()
                if warm:
                    seconds_s = max(seconds_s, queued.seconds_s)
        finally:
            lease.release()
    return seconds_s if plan.gpu_bytes else None


def _by_path(survey: Survey) -> dict[str, object]:
    return dict(zip(survey.paths, survey.values, strict=True))


def _copies(
    numbers: Mapping[torch.device, Sequence[int]], survey: Survey, kept: Kept
) -> dict[torch.device, list[Copy]]:
    pieces, targets = survey.inventory.pieces, kept.targets
    return {
        device: [
            Copy(pieces[n].paths[0], survey.locals[n], target, survey.wholes.get(n))
            for n in group
            if (target := targets[n]) is not None
        ]
        for device, group in numbers.items()
    }


def _rebuilt(tree: Any, tensors: Mapping[int, torch.Tensor], values: Sequence[object]) -> Any:
    """Return the same nesting of mappings and lists, with tensors in the buffer."""
    if isinstance(tree, dict):
        return {key: _rebuilt(inner, tensors, values) for key, inner in tree.items()}
    if isinstance(tree, list):
        return [_rebuilt(inner, tensors, values) for inner in tree]
    tensor = tensors.get(tree)
    return _own_copy(values[tree]) if tensor is None else tensor


def _to_pickle(value: Any, path: str) -> Any:
    if type(value) is dict:
        return {key: _to_pickle(inner, f"{path}.{key}") for key, inner in value.items()}
    if type(value) is list:
        return [_to_pickle(inner, f"{path}.{number}") for number, inner in enumerate(value)]
    if isinstance(value, torch.Tensor) and describes_itself(value):
        return to_pickle(path, value)
    return value


def _own_copy(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Deep-copy what DCP will pickle. Its tensors get memory of their own.

    Pickling a tensor writes all of the storage behind it: for a view of the buffer that would be
    the whole snapshot, and for a view of the user's memory all that it is a view of.

    The containers of most values are copied here, as `copy.deepcopy` takes several times as long.
    """
    kind = type(value)
    if kind in _NEVER_CHANGES:
        return value
    memo = {} if memo is None else memo
    known = memo.get(id(value))
    if known is not None:
        return known
    if kind is dict:
        made = memo[id(value)] = {}
        for key, inner in value.items():
            hashed = key if type(key) in _NEVER_CHANGES else _own_copy(key, memo)
            made[hashed] = inner if type(inner) in _NEVER_CHANGES else _own_copy(inner, memo)
        return made
    if kind is list:
        copied = memo[id(value)] = []
        for inner in value:
            is_fixed = type(inner) in _NEVER_CHANGES
            copied.append(inner if is_fixed else _own_copy(inner, memo))
        return copied
    if kind is tuple:
        items = [one if type(one) in _NEVER_CHANGES else _own_copy(one, memo) for one in value]
        # A list in it that holds the tuple has copied it already.
        return memo.setdefault(id(value), tuple(items))
    _clone_tensors(value, memo)
    return copy.deepcopy(value, memo)  # takes what is in its memo as copied already


# No function in another one that calls itself: it is a cycle, and keeps what it can see alive
# until the cyclic collector comes.
def _clone_tensors(inner: Any, memo: dict[int, Any]) -> None:
    if isinstance(inner, torch.Tensor) and not isinstance(inner, DTensor):
        copied = cloned(inner.detach().cpu())
        if type(inner) is torch.nn.Parameter:
            copied = torch.nn.Parameter(copied, inner.requires_grad)
        elif inner.requires_grad:
            copied.requires_grad_()
        memo[id(inner)] = copied
    elif isinstance(inner, Mapping):
        for element in inner.values():
            _clone_tensors(element, memo)
    elif isinstance(inner, (list, tuple)):
        for element in inner:
            _clone_tensors(element, memo)
