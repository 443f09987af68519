"""Rank 0 decides, all ranks hear the same. The only place that uses collectives.

No rank leaves a call of `Ranks` by an error of its own: what a rank runs into is passed to the
others in the meeting that they are on their way to, and all raise it. Every meeting is the same two
collectives (all ranks tell rank 0, rank 0 tells all), so that a rank that has failed meets the
others wherever they are.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import pickle
import sys
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq.errors import RankLost, UnsupportedOption
from dcp_checkfreq.format.torch_private import default_store
from dcp_checkfreq.ranks.dcp_errors import raise_of_dcp
from dcp_checkfreq.ranks.meeting import (
    NOTHING,
    Answer,
    Message,
    answer,
    is_agreed,
    mark_agreed,
    raise_agreed,
)
from dcp_checkfreq.ranks.own_group import (
    GROUP_IS_GONE,
    KnownGroup,
    OwnGroup,
    refuse_parents_group,
    world,
)
from dcp_checkfreq.ranks.rollcall import RollCall
from dcp_checkfreq.ranks.watchdog import Watchdog
from dcp_checkfreq.runtime import options
from dcp_checkfreq.runtime.clock import Clock, SystemClock
from dcp_checkfreq.runtime.error_reports import (
    Wrap,
    report_of,
    text_of,
)

T = TypeVar("T")
V = TypeVar("V")

_DEFAULT_TIMEOUT_S = 1800.0

_made = itertools.count()  # of this process; the ranks make theirs in the same order


class Ranks:
    """A gloo group of its own, used by nothing else, or a job of one process.

    Collectives of one group must come in the same order on all ranks: one that uses `group` in a
    background thread must be done before the next call here.

    Args:
        timeout_s: how long a rank waits for the others, and for its own storage, before it raises.
        clock: by which work takes long; see `Watchdog`.

    Raises:
        RankLost: a rank did not take part within the timeout.
        RankFailed: a rank was given a timeout that is none.
        SaveFailed: this is a forked child, and the process group is its parent's.
    """

    def __init__(
        self, *, timeout_s: float = _DEFAULT_TIMEOUT_S, clock: Clock | None = None
    ) -> None:
        self._own: OwnGroup | None = None
        group = world()
        self._world = KnownGroup(group)
        self._lost: RankLost | None = None
        self._notes: RollCall | None = None
        self.rank, self.world_size = 0, 1
        if group is not None:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # A clock that is none is refused where it was given, on all ranks together.
        is_clock = clock is not None and hasattr(clock, "monotonic_s")
        self.watchdog = Watchdog(self.rank, clock if clock and is_clock else SystemClock())
        self.is_alone = group is None
        self.timeout_s, problem = _checked(timeout_s)
        self.watchdog.limit_s = self.timeout_s
        refuse_parents_group(group)
        # Its thread must not keep alive what a script has dropped without closing it.
        weakref.finalize(self, self.watchdog.close).atexit = False
        self.watchdog.start()
        try:
            if not self.is_alone:
                self._meet_first()
            key = self.combine(
                "checking timeout_s", lambda: _raise(problem), lambda _: uuid.uuid4().hex
            )
        except BaseException:
            self._end()
            self.watchdog.close()
            raise
        if not self.is_alone:
            self._leave_notes_under(key)

    def _meet_first(self) -> None:
        """Make the group. Who does not come is named, although the ranks have no key yet."""
        self._leave_notes_under(f"making/{next(_made)}")
        with self._others_answer("making a process group", ""):
            self._own = OwnGroup(self.timeout_s)

    def _leave_notes_under(self, key: str) -> None:
        self._notes = RollCall(default_store(), f"checkfreq/{key}", self.rank, self.world_size)
        self.watchdog.connect(self._notes.doing, self._notes.others_doing)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group, or None in a job of one process."""
        return None if self._own is None else self._own.group

    def is_gone(self) -> bool:
        """Whether the process group was destroyed by others, and with it this one."""
        return self.group is not None and not self._world.is_it(world())

    def doing(self, phase: str, where: str = "") -> contextlib.AbstractContextManager[None]:
        """Say what this rank is at, for a warning if it does not return; see `Watchdog`."""
        return self.watchdog.doing(phase, where)

    def asking(self, phase: str, where: str = "") -> contextlib.AbstractContextManager[None]:
        """Say what this rank asks the storage for; what it does not come back from is given up."""
        return self.watchdog.doing(phase, where, in_storage=True)

    def tell_stuck(self) -> None:
        """Note for the other ranks, if they come to ask, what this one does not come back from."""
        text = self.watchdog.stuck()
        if self._notes is not None and text is not None:
            self._notes.doing(text)

    # --- what all ranks call ---

    def together(self, what: str, work: Callable[[], T], *, wrap: Wrap | None = None) -> T:
        """Call ``work`` on every rank; return once it has returned on all, or raise on all.

        It may use the methods of this object, and no other collectives.

        Args:
            what: all ranks do, the same on all; errors say "while {what}".
            work: returns what stays on this rank.
            wrap: makes an error of this package of the text of another one; default: `RankFailed`.

        Raises:
            CheckFreqError: of the lowest rank that failed, on all ranks, with its number. The
                ``__cause__`` on that rank is its own error. If all ranks failed alike, each raises
                its own; `KeyboardInterrupt` and `SystemExit` go on as such on their own rank.
            RankLost: a rank did not take part within the timeout.
        """
        with self.region(what, wrap=wrap):
            return work()

    @contextlib.contextmanager
    def region(self, what: str, *, wrap: Wrap | None = None) -> Iterator[None]:
        """Do the body on every rank: `together`, as a ``with`` statement."""
        if self.is_alone:
            with self._at(what):
                yield
            return
        try:
            with self._at(what):
                yield
        except BaseException as error:
            if not is_agreed(error):
                self._meet(self._told(error, what, wrap), error, _no_rule, wrap)
            raise
        self._meet((what, NOTHING, None), None, _no_rule, wrap)

    @contextlib.contextmanager
    def making(self, what: str, undo: Callable[[], None]) -> Iterator[None]:
        """Do the body, which makes an object, on every rank; call ``undo`` if any of them fails."""
        try:
            with self.region(f"making {what}"):
                yield
        except BaseException:
            undo()
            self.close()
            raise

    def combine(
        self,
        what: str,
        work: Callable[[], V],
        rule: Callable[[list[V]], T],
        *,
        wrap: Wrap | None = None,
    ) -> T:
        """Call ``work`` on every rank, ``rule`` on rank 0 with what it returned; return its result.

        Args:
            what: see `together`.
            work: returns a value that can be pickled.
            rule: of the values of all ranks, in rank order.
            wrap: see `together`.

        Raises:
            CheckFreqError: see `together`; also what ``rule`` raises.
            RankLost: a rank did not take part within the timeout.
        """
        if self.is_alone:
            with self._at(what):
                return rule([work()])
        own: BaseException | None = None
        message: Message
        try:
            with self._at(what):
                message = (what, pickle.dumps(work()), None)
        except BaseException as error:
            if is_agreed(error):
                raise
            own, message = error, self._told(error, what, wrap)
        return self._meet(message, own, rule, wrap)

    def on_rank_0(
        self, on_rank_0: Callable[[], T], what: str = "deciding", *, wrap: Wrap | None = None
    ) -> T:
        """Call ``on_rank_0`` on rank 0 and return its result on all ranks, or raise its error.

        Raises:
            RankLost: a rank did not take part within the timeout.
        """
        return self.combine(what, lambda: None, lambda _: on_rank_0(), wrap=wrap)

    def reduce_on_rank_0(self, value: V, rule: Callable[[list[V]], T], what: str = "deciding") -> T:
        """Call ``rule`` on rank 0 with every rank's value; return its result, or raise, on all.

        Raises:
            RankLost: a rank did not take part within the timeout.
        """
        return self.combine(what, lambda: value, rule)

    def all_gather(self, value: T, what: str = "telling each other") -> list[T]:
        """Return every rank's value, in rank order, on all ranks.

        Raises:
            RankLost: a rank did not take part within the timeout.
        """
        return self.reduce_on_rank_0(value, lambda values: values, what)

    def same(self, values: Mapping[str, object]) -> None:
        """Make sure that options are the same on all ranks.

        Raises:
            UnsupportedOption: one of them is not; on all ranks.
        """

        def rule(ranks: list[Mapping[str, object]]) -> None:
            for name, first in ranks[0].items():
                for rank, other in enumerate(ranks):
                    if other[name] != first:
                        raise UnsupportedOption(
                            f"{name}={other[name]!r} on rank {rank}",
                            f"it is {first!r} on rank 0, and must be the same on all ranks",
                        )

        self.combine("comparing options", lambda: values, rule)

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
        with self._others_answer("exchanging bytes", ""):
            waiting = [dist.irecv(tensor, rank, group=self.group) for rank, tensor in receives]
            waiting += [dist.isend(tensor, rank, group=self.group) for rank, tensor in sends]
            for work in waiting:
                if work is not None:
                    work.wait()

    @contextlib.contextmanager
    def dcp(self, what: str, where: str, *, wrap: Wrap | None = None) -> Iterator[None]:
        """Let DCP use `group` in the body, and turn what it raises into what all ranks raise.

        Args:
            what: see `together`.
            where: the checkpoint.
            wrap: see `together`.

        Raises:
            CheckFreqError: of the lowest rank that failed; see `together`.
            RankLost: a rank did not take part within the timeout.
        """
        try:
            with self._others_answer(what, where):
                yield
        except CheckpointException as error:
            if error.__traceback__ is not None:
                traceback.clear_frames(error.__traceback__)  # see `_lose`
            raise_of_dcp(error, self.rank, None if self.is_alone else self.world_size, what, wrap)

    # --- how ---

    def _at(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self.watchdog.doing(what)

    def _told(self, error: BaseException, what: str, wrap: Wrap | None) -> Message:
        return what, b"", report_of(error, self.rank, what, wrap)

    def _meet(
        self,
        message: Message,
        own: BaseException | None,
        rule: Callable[[list[Any]], T],
        wrap: Wrap | None,
    ) -> T:
        what = message[0]
        result: list[T] = []
        answers: list[Answer | None] = [None]
        with self._others_answer(what, ""):
            everyones: list[Any] | None = None
            if self.rank == 0:
                everyones = [None] * self.world_size
            dist.gather_object(message, everyones, dst=0, group=self.group)
            if everyones is not None:
                try:
                    with self._at(what):
                        answers[0] = answer(everyones, rule, result)
                except BaseException as error:  # noqa: BLE001  every rank raises it below
                    own = error
                    answers[0] = (b"", report_of(error, 0, what, wrap, named=False), False)
            dist.broadcast_object_list(answers, src=0, group=self.group)
        assert answers[0] is not None
        payload, report, is_of_all = answers[0]
        if report is None:
            return result[0] if self.rank == 0 else pickle.loads(payload)
        if own is not None and (is_of_all or not isinstance(own, Exception)):
            mark_agreed(own)
            raise own
        agreed: BaseException = report.rebuilt()
        if own is not None and type(own) is type(agreed) and str(own) == str(agreed):
            agreed, own = own, own.__cause__
        return raise_agreed(agreed, own)

    @contextlib.contextmanager
    def _others_answer(self, what: str, where: str) -> Iterator[None]:
        """Turn a failure of the group into `RankLost`, and see to it that no one waits for us."""
        if self._lost is not None:
            raise self._lost_again()
        if self.is_gone():
            raise self._lose(what, where, RuntimeError(GROUP_IS_GONE)) from None
        try:
            if self.is_alone:
                yield
            else:
                with self.watchdog.doing(f"waiting for the other ranks while {what}", where):
                    yield
        except CheckpointException:
            raise
        except RuntimeError as error:
            if self.is_alone:
                raise
            if self._lost is not None:
                raise self._lost_again() from None
            raise self._lose(what, where, error) from None
        except BaseException as error:
            if self._lost is not None:  # deeper in the body
                raise self._lost_again() from None
            if self.is_gone():
                raise self._lose(what, where, error) from None
            # It strikes between two collectives, as a signal's may: the others must not wait.
            if not self.is_alone:
                self._lose(what, where, error)
            raise

    def _lost_again(self) -> RankLost:
        assert self._lost is not None
        again = RankLost(*self._lost.args)
        mark_agreed(again)
        return again

    def _lose(self, what: str, where: str, error: BaseException) -> RankLost:
        text = GROUP_IS_GONE if self.is_gone() else text_of(error)
        is_of_group = isinstance(error, RuntimeError) and ("gloo" in text or self.group is None)
        # The group closes its connections when nobody refers to it, and only then do ranks hear
        # of it that wait for this one. The frames where it failed do.
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
        if self._notes is not None and not is_of_group:
            self._notes.leave(f"while {what}: {text}")
        self._end()
        missing = self._notes.missing() if self._notes is not None and is_of_group else ""
        why = f"while {what}: {text}"
        if text is not GROUP_IS_GONE:
            why = (
                f"another rank did not answer while {what}; its own log says why "
                f"({missing + '; ' if missing else ''}{text})"
            )
        self._lost = RankLost(where or f"rank {self.rank}", why)
        mark_agreed(self._lost)
        return self._lost

    def _end(self) -> None:
        if self._own is not None:
            self._own.end()

    def close(self) -> None:
        """Give up the group. May be called twice."""
        self.watchdog.close()
        if self.group is None:
            return
        if self._notes is not None and self._lost is None:
            error = sys.exc_info()[1]
            because = "" if error is None else f" because of {text_of(error)}"
            self._notes.leave(f"its Checkpointer was closed{because}")
        self._lost = self._lost or RankLost(f"rank {self.rank}", "the ranks' group is closed")
        self._end()


def _no_rule(_: list[Any]) -> None:
    """Conclude nothing."""


def _checked(timeout_s: float) -> tuple[float, Exception | None]:
    """Return a timeout that works, and what is wrong with the given one: the others must hear."""
    try:
        rule = {"timeout_s": options.CHECKPOINTER["timeout_s"]}
        options.check(rule, {"timeout_s": timeout_s})
        datetime.timedelta(seconds=timeout_s)
    except (TypeError, ValueError, OverflowError) as error:
        return _DEFAULT_TIMEOUT_S, error
    return timeout_s, None


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem
