"""Tiers that fail or hold chosen calls, to see what becomes of the data then."""

from __future__ import annotations

import errno
import fnmatch
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from dcp_checkfreq.storage.tier import Tier
from dcp_checkfreq.testing.forwarding_tier import ForwardingTier, Result, Verb


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Which calls fail, and how."""

    verb: Verb
    name: str = "*"  # shell pattern for the file, or for the folder of `make`, `sync` and so on
    nth: int = 0  # the first call that fails, counted from 0 among those that match
    times: Literal["once", "forever"] = "once"
    error: int = errno.EIO  # an errno value, such as errno.ENOSPC
    lost_answer: bool = False  # the call is carried out all the same; only its answer is lost
    after_bytes: int | None = None  # `write_shard` fails after this much content, not at its start

    def __post_init__(self) -> None:
        if self.after_bytes is not None and (self.verb != "write_shard" or self.lost_answer):
            raise ValueError("after_bytes is for a write_shard that fails half-way")

    def strikes(self, count: int) -> bool:
        """Tell whether the matching call with this count, from 0, fails."""
        return count == self.nth or (self.times == "forever" and count > self.nth)


class FaultyTier(ForwardingTier):
    """Hands calls on to ``inner`` and fails those that ``plan`` names; thread-safe.

    ``calls`` is the record of all calls so far: verb and name, in the order they were begun.
    """

    def __init__(self, inner: Tier, plan: Iterable[Fault]) -> None:
        super().__init__(inner)
        self.calls: list[tuple[Verb, str]] = []
        self.struck = 0  # how many calls were made to fail
        self._plan = tuple(plan)
        self._counts = [0] * len(self._plan)
        self._lock = threading.Lock()
        self._half_way = threading.local()

    def around(self, verb: Verb, name: str, call: Callable[[], Result]) -> Result:
        """Carry out the call, or fail it as the plan says.

        Raises:
            OSError: the plan names this call; its text says that it was injected.
        """
        fault = self._next_fault(verb, name)
        if fault is None:
            return call()
        if fault.after_bytes is not None:
            # The pieces are made and consumed by this thread, inside the call.
            self._half_way.fault = fault
            try:
                return call()
            finally:
                self._half_way.fault = None
        if fault.lost_answer:
            call()
        raise _injected(fault, name)

    def around_pieces(self, name: str, pieces: Iterable[memoryview]) -> Iterable[memoryview]:
        """Return the pieces, cut off by an error if this write is to fail half-way."""
        fault: Fault | None = getattr(self._half_way, "fault", None)
        return pieces if fault is None else _cut_off(fault, name, pieces)

    def _next_fault(self, verb: Verb, name: str) -> Fault | None:
        striking = None
        with self._lock:
            self.calls.append((verb, name))
            for index, fault in enumerate(self._plan):
                if fault.verb == verb and fnmatch.fnmatchcase(name, fault.name):
                    if striking is None and fault.strikes(self._counts[index]):
                        striking = fault
                        self.struck += 1
                    self._counts[index] += 1
        return striking


def _injected(fault: Fault, name: str) -> OSError:
    return OSError(fault.error, f"{os.strerror(fault.error)} (injected in {fault.verb})", name)


def _cut_off(fault: Fault, name: str, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    left_bytes = fault.after_bytes or 0
    for piece in pieces:
        flat = piece.cast("B")
        if len(flat) > left_bytes:
            if left_bytes:
                yield flat[:left_bytes]
            break
        left_bytes -= len(flat)
        yield flat
    raise _injected(fault, name)


HELD_BY_DEFAULT: tuple[Verb, ...] = ("write_shard",)


class GatedTier(ForwardingTier):
    """Holds chosen calls before they reach ``inner``, until `release`. For saves kept in flight.

    Every wait ends after ``timeout_s`` with an error, so a broken test fails and does not hang.
    """

    def __init__(
        self,
        inner: Tier,
        *,
        verbs: Collection[Verb] = HELD_BY_DEFAULT,
        name: str = "*",
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(inner)
        self._verbs, self._name, self._timeout_s = frozenset(verbs), name, timeout_s
        self._held = threading.Event()
        self._gate = threading.Event()

    def around(self, verb: Verb, name: str, call: Callable[[], Result]) -> Result:
        """Carry out the call, after `release` if it is one of the held ones.

        Raises:
            TimeoutError: nobody released the gate; the call was not carried out.
        """
        if verb in self._verbs and fnmatch.fnmatchcase(name, self._name):
            self._held.set()
            if not self._gate.wait(self._timeout_s):
                raise TimeoutError(f"{verb} {name!r} was never released")
        return call()

    def wait_until_held(self) -> None:
        """Return once a call has arrived at the gate.

        Raises:
            TimeoutError: no such call came.
        """
        if not self._held.wait(self._timeout_s):
            raise TimeoutError(f"no call of {sorted(self._verbs)} came")

    def release(self) -> None:
        """Let the held calls, and all later ones, go on."""
        self._gate.set()
