"""Rank 0 decides, all ranks hear the same. The only place that uses collectives."""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from dcp_checkfreq.errors import RankLost
from dcp_checkfreq.leaving import wait_for_all

T = TypeVar("T")
V = TypeVar("V")


class Agreement:
    """A gloo group of its own, used by nothing else, or a job of one process.

    Collectives of one group must come in the same order on all ranks: whoever uses `group` in a
    background thread must be done before the next call here.

    Args:
        timeout_s: how long a rank waits for the others before it raises.
    """

    def __init__(self, *, timeout_s: float = 1800.0) -> None:
        self.timeout_s = timeout_s
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.group = dist.new_group(
                backend="gloo", timeout=datetime.timedelta(seconds=timeout_s)
            )
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            _finish_before_groups_go()

    @property
    def is_alone(self) -> bool:
        """Whether there is no process group."""
        return self.group is None

    def is_gone(self) -> bool:
        """Whether the process group was destroyed by others, and with it this one."""
        return self.group is not None and not dist.is_initialized()

    def decide(self, on_rank_0: Callable[[], T]) -> T:
        """Call ``on_rank_0`` on rank 0 and return its result on all ranks, or raise its error.

        Raises:
            RankLost: a rank did not take part within the timeout.
        """
        if self.group is None:
            return on_rank_0()
        answer: list[tuple[bool, object]] = [(False, None)]
        if self.rank == 0:
            try:
                answer = [(True, on_rank_0())]
            except Exception as error:  # noqa: BLE001  every rank raises it below
                answer = [(False, error)]
        with self._others_answer():
            dist.broadcast_object_list(answer, src=0, group=self.group)
        succeeded, value = answer[0]
        if not succeeded:
            assert isinstance(value, BaseException)
            raise value
        return value  # type: ignore[return-value]

    def consult(self, value: V, rule: Callable[[list[V]], T]) -> T:
        """Call ``rule`` on rank 0 with every rank's value; return its result, or raise, on all.

        Raises:
            RankLost: a rank did not take part within the timeout.
        """
        if self.group is None:
            return rule([value])
        values: list[V] | None = [value] * self.world_size if self.rank == 0 else None
        with self._others_answer():
            dist.gather_object(value, values, dst=0, group=self.group)
        return self.decide(lambda: rule(values or []))

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on all ranks.

        Raises:
            RankLost: a rank did not take part within the timeout.
        """
        if self.group is None:
            return [value]
        values: list[T | None] = [None] * self.world_size
        with self._others_answer():
            dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    def exchange(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> None:
        """Send tensors to ranks and receive others in place; returns when all are done.

        Between two ranks, tensors pair in the order in which they are named. CPU memory only.

        Raises:
            RankLost: a rank did not take part within the timeout.
        """
        with self._others_answer():
            waiting = [dist.irecv(tensor, rank, group=self.group) for rank, tensor in receives]
            waiting += [dist.isend(tensor, rank, group=self.group) for rank, tensor in sends]
            for work in waiting:
                if work is not None:
                    work.wait()

    @contextlib.contextmanager
    def _others_answer(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.rank}",
                f"another rank did not answer; its own log says why ({error})",
            ) from error

    def close(self) -> None:
        """Give up the group. May be called twice."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None


@functools.cache
def _finish_before_groups_go() -> None:
    """Let `destroy_process_group` wait for what is under way: without groups it would be lost.

    Scripts end with that call, torch tells nobody of it, and a save needs its group to the end.
    """
    original = dist.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        if group is None or group == dist.group.WORLD:
            wait_for_all()
        original(group)

    dist.destroy_process_group = destroy_process_group
