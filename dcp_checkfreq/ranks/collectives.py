"""Rank 0 decides, all ranks hear the same. The only place that uses collectives.

No rank leaves a call of `Ranks` by an error of its own: what a rank runs into is told to the
others in the meeting that they are on their way to, and all raise it. Every meeting is the same two
collectives (all ranks tell rank 0, rank 0 tells all), so that a rank that has failed meets the
others wherever they are.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import os
import pickle
import sys
import traceback
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq import options
from dcp_checkfreq.errors import RankFailed, RankLost, SaveFailed, UnsupportedOption
from dcp_checkfreq.format.torch_private import default_store
from dcp_checkfreq.ranks.rollcall import RollCall
from dcp_checkfreq.ranks.watchdog import Watchdog
from dcp_checkfreq.runtime.clock import Clock, SystemClock
from dcp_checkfreq.runtime.process_end import wait_for_all
from dcp_checkfreq.runtime.told import (
    Told,
    Wrap,
    as_ours,
    tell,
    text_of,
)

T = TypeVar("T")
V = TypeVar("V")

_DEFAULT_TIMEOUT_S = 1800.0
_AGREED = "_dcp_checkfreq_agreed"  # on an error that all ranks raise

# What a rank says in a meeting: at what it is, its value as a pickle, or an error.
_Message = tuple[str, bytes, "Told | None"]
# What rank 0 answers: the result as a pickle, or an error; whether all ranks had the same one.
_Answer = tuple[bytes, "Told | None", bool]
_NOTHING = pickle.dumps(None)
_HERALDS = "checkfreq"  # the name of their backend
_made = itertools.count()  # of this process; the ranks make theirs in the same order


GROUP_IS_GONE = (
    "the process group with which the Checkpointer was made was destroyed. Close the Checkpointer, "
    "or leave its with block, before destroy_process_group(), and make a new one after "
    "init_process_group()"
)
_OF_THE_PARENT = (
    "a forked child has the connections of its parent's process group, and would take the answers "
    "of other ranks from it. Fork before init_process_group(), start the child in another way "
    "(multiprocessing's 'spawn'), or let the parent save"
)


def _world() -> dist.ProcessGroup | None:
    """Return the process group of this job."""
    is_there = dist.is_available() and dist.is_initialized()
    return dist.group.WORLD if is_there else None


class _Known:
    """Knows a process group again. It is not kept alive: that would keep its connections open."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = None if group is None else weakref.ref(group)

    def is_it(self, group: dist.ProcessGroup | None) -> bool:
        return group is not None and self._group is not None and self._group() is group


_inherited = _Known(None)


def _in_child() -> None:
    global _inherited
    _inherited = _Known(_world())


os.register_at_fork(after_in_child=_in_child)


class Ranks:
    """A gloo group of its own, used by nothing else, or a job of one process.

    Collectives of one group must come in the same order on all ranks: whoever uses `group` in a
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
        self._group: dist.ProcessGroup | None = None
        self._herald: dist.ProcessGroup | None = None
        world = _world()
        self._world = _Known(world)
        self._lost: RankLost | None = None
        self._notes: RollCall | None = None
        self.rank, self.world_size = 0, 1
        if world is not None:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # A clock that is none is refused by whoever was given it, on all ranks together.
        is_clock = clock is not None and hasattr(clock, "monotonic_s")
        self.watchdog = Watchdog(self.rank, clock if clock and is_clock else SystemClock())
        self.is_alone = world is None
        self.timeout_s, problem = _checked(timeout_s)
        self.watchdog.limit_s = self.timeout_s
        if world is not None and _inherited.is_it(world):
            raise SaveFailed(f"process {os.getpid()}", _OF_THE_PARENT)
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
            self._group = dist.new_group(
                backend="gloo", timeout=datetime.timedelta(seconds=self.timeout_s)
            )
            _register_heralds()
            self._herald = dist.new_group(
                backend=_HERALDS, timeout=datetime.timedelta(seconds=self.timeout_s)
            )

    def _leave_notes_under(self, key: str) -> None:
        self._notes = RollCall(default_store(), f"checkfreq/{key}", self.rank, self.world_size)
        self.watchdog.connect(self._notes.doing, self._notes.others_doing)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group, or None in a job of one process."""
        return self._group

    def is_gone(self) -> bool:
        """Whether the process group was destroyed by others, and with it this one."""
        return self._group is not None and not self._world.is_it(_world())

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
        self._meet((what, _NOTHING, None), None, _no_rule, wrap)

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
        message: _Message
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
            waiting = [dist.irecv(tensor, rank, group=self._group) for rank, tensor in receives]
            waiting += [dist.isend(tensor, rank, group=self._group) for rank, tensor in sends]
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
            # Every rank has the errors of all from DCP, its own as a copy.
            rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
            if self.is_alone:
                ours = cause if wrap is None else as_ours(cause, wrap)
                raise ours from error if ours is cause else cause
            told = {
                number: tell(one, number, what, wrap, named=False).rebuilt()
                for number, (one, _) in error.failures.items()
            }
            alike = {(type(one), str(one)) for one in told.values()}
            is_of_all = len(told) == self.world_size and len(alike) == 1
            own = error.failures.get(self.rank, (None, None))[0]
            if own is not None and not isinstance(own, Exception):
                _mark(own)
                raise own from error
            _raise_agreed(told[rank] if is_of_all else told[rank].of_rank(rank), error)

    # --- how ---

    def _at(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self.watchdog.doing(what)

    def _told(self, error: BaseException, what: str, wrap: Wrap | None) -> _Message:
        return what, b"", tell(error, self.rank, what, wrap)

    def _meet(
        self,
        message: _Message,
        own: BaseException | None,
        rule: Callable[[list[Any]], T],
        wrap: Wrap | None,
    ) -> T:
        what = message[0]
        result: list[T] = []
        answer: list[_Answer | None] = [None]
        with self._others_answer(what, ""):
            everyones: list[Any] | None = None
            if self.rank == 0:
                everyones = [None] * self.world_size
            dist.gather_object(message, everyones, dst=0, group=self._group)
            if everyones is not None:
                try:
                    with self._at(what):
                        answer[0] = _answer(everyones, rule, result)
                except BaseException as error:  # noqa: BLE001  every rank raises it below
                    own = error
                    answer[0] = (b"", tell(error, 0, what, wrap, named=False), False)
            dist.broadcast_object_list(answer, src=0, group=self._group)
        assert answer[0] is not None
        payload, told, is_of_all = answer[0]
        if told is None:
            return result[0] if self.rank == 0 else pickle.loads(payload)
        if own is not None and (is_of_all or not isinstance(own, Exception)):
            _mark(own)
            raise own
        agreed: BaseException = told.rebuilt()
        if own is not None and type(own) is type(agreed) and str(own) == str(agreed):
            agreed, own = own, own.__cause__
        return _raise_agreed(agreed, own)

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
        _mark(again)
        return again

    def _lose(self, what: str, where: str, error: BaseException) -> RankLost:
        text = GROUP_IS_GONE if self.is_gone() else text_of(error)
        is_of_group = isinstance(error, RuntimeError) and ("gloo" in text or self._group is None)
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
        _mark(self._lost)
        return self._lost

    def _end(self) -> None:
        groups = self._group, self._herald
        self._group = self._herald = None
        if groups[1] is not None:
            groups[1].is_armed = False  # type: ignore[attr-defined]
        for group in groups:
            if group is not None and dist.is_initialized():
                with contextlib.suppress(ValueError, RuntimeError):  # gone with the default group
                    dist.destroy_process_group(group)

    def close(self) -> None:
        """Give up the group. May be called twice."""
        self.watchdog.close()
        if self._group is None:
            return
        if self._notes is not None and self._lost is None:
            error = sys.exc_info()[1]
            because = "" if error is None else f" because of {text_of(error)}"
            self._notes.leave(f"its Checkpointer was closed{because}")
        self._lost = self._lost or RankLost(f"rank {self.rank}", "the ranks' group is closed")
        self._end()


def _answer(
    everyones: Sequence[_Message], rule: Callable[[list[Any]], T], result: list[T]
) -> _Answer:
    """On rank 0: conclude, keep the result, and return what the others get."""
    failures = [told for _, _, told in everyones if told is not None]
    if failures:
        alike = {(told.kind, str(_unnamed(told))) for told in failures}
        is_of_all = len(failures) == len(everyones) and len(alike) == 1
        return b"", failures[0], is_of_all
    places = [what for what, _, _ in everyones]
    for rank, place in enumerate(places):
        if place != places[0]:
            raise RankFailed(rank, place, f"the ranks are in different calls; rank 0: {places[0]}")
    result.append(rule([pickle.loads(payload) for _, payload, _ in everyones]))
    return pickle.dumps(result[0]), None, False


def _unnamed(told: Told) -> tuple[object, ...]:
    """Return the fields of an error without the number of the rank."""
    return tuple(
        field.replace(f"rank {told.rank}", "rank", 1) if isinstance(field, str) else field
        for field in told.fields
        if field != told.rank
    )


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


def is_agreed(error: BaseException) -> bool:
    """Tell whether all ranks have raised this."""
    return hasattr(error, _AGREED)


def _mark(error: BaseException) -> None:
    with contextlib.suppress(AttributeError, TypeError):
        setattr(error, _AGREED, True)


def _raise_agreed(error: BaseException, cause: BaseException | None) -> NoReturn:
    _mark(error)
    raise error from cause


@functools.cache
def _register_heralds() -> None:
    """Make known to torch a kind of group that carries nothing, and hears of its end.

    `destroy_process_group` calls `shutdown` of all groups before it takes anything apart. Scripts
    end with that call, torch tells nobody of it, and a save needs its group to the end.
    """

    class Herald(dist.ProcessGroup):  # here, as there are builds of torch without any groups
        is_armed = True

        def getBackendName(self) -> str:
            return _HERALDS

        def shutdown(self) -> None:
            if self.is_armed:
                wait_for_all()

    def make(_store: object, rank: int, world_size: int, _timeout: object) -> Herald:
        return Herald(rank, world_size)  # type: ignore[call-arg]  # not in the stubs

    dist.Backend.register_backend(_HERALDS, make, devices=["cpu"])
