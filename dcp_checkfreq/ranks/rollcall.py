"""Notes between ranks that cannot meet any more: who is still there, who left and why.

They go through the store of the process group. The process that serves it may be the one that is
gone, or stopped, so that no call of it is waited for without an end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

_log = logging.getLogger(__name__)

_PATIENCE_S = 3.0  # for the ranks that are there to say so: all hear of it at about the same time
_POLL_S = 0.05
_STORE_S = 2.0  # for one note

T = TypeVar("T")


class Store(Protocol):
    """What is used of a process group's store."""

    def set(self, key: str, value: str, /) -> object:
        """Write a key."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all keys are there."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is there."""
        ...


class RollCall:
    """What the ranks of one job leave for each other.

    Args:
        store: of all ranks, with a connection that nobody else uses.
        key: before every key; the same on all ranks, another one for every job.
        rank: of this process.
        world_size: processes in the job.
    """

    def __init__(self, store: Store, key: str, rank: int, world_size: int) -> None:
        self._store, self._key = store, key
        self._rank, self._world_size = rank, world_size
        self._one_at_a_time = threading.Lock()  # a connection of a store has one anyway
        self._never = threading.Event()

    def leave(self, why: str) -> None:
        """Note that this rank takes part no more. What was noted first stays."""
        key = self._key_of("left", self._rank)

        def note() -> None:
            if not self._store.check([key]):
                self._store.set(key, why)

        self._within(_STORE_S, note)

    def doing(self, text: str) -> None:
        """Note what this rank has been at for long; empty: it is through."""
        self._within(
            _STORE_S, lambda: self._store.set(self._key_of("doing", self._rank), text or "-")
        )

    def others_doing(self) -> dict[int, str]:
        """Return what other ranks have been at for long."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        return self._within(_STORE_S, lambda: self._notes("doing", others)) or {}

    def missing(self) -> str:
        """Say that this rank is there, wait for the others to, and return who is not; or ''."""
        answer = self._within(2 * _PATIENCE_S, self._call)
        if answer is None:
            return (
                "the store of the process group does not answer: the process that serves it is"
                " gone or hangs (rank 0, if no launcher does)"
            )
        present, left, doing = answer
        ranks = range(self._world_size)
        texts = [f"rank {rank} has left: {why}" for rank, why in left.items()]
        for rank in ranks:
            if rank not in present and rank not in left:
                at = f", it {doing[rank]}" if rank in doing else ""
                texts.append(f"rank {rank} is gone or does not answer{at}")
        return "; ".join(texts)

    def _call(self) -> tuple[set[int], Mapping[int, str], Mapping[int, str]]:
        self._store.set(self._key_of("here", self._rank), "1")
        ranks = list(range(self._world_size))
        present: set[int] = set()
        left: dict[int, str] = {}
        for _ in range(round(_PATIENCE_S / _POLL_S)):
            present, left = set(self._notes("here", ranks)), self._notes("left", ranks)
            if len(present | set(left)) == len(ranks):
                break
            self._never.wait(_POLL_S)
        missing = [rank for rank in ranks if rank not in present]
        left.pop(self._rank, None)
        return present, left, self._notes("doing", missing)

    def _notes(self, kind: str, ranks: list[int]) -> dict[int, str]:
        notes = {}
        for rank in ranks:
            key = self._key_of(kind, rank)
            if self._store.check([key]):
                notes[rank] = self._store.get(key).decode(errors="replace")
        return {rank: text for rank, text in notes.items() if text != "-"}

    def _key_of(self, kind: str, rank: int) -> str:
        return f"{self._key}/{kind}/{rank}"

    def _within(self, limit_s: float, talk: Callable[[], T]) -> T | None:
        """Return what ``talk`` does, or None if the store failed, or does not come back in time."""
        answers: list[T] = []

        def run() -> None:
            try:
                with self._one_at_a_time:
                    answers.append(talk())
            except RuntimeError as error:  # torch's DistError
                _log.debug("rank %d: the store failed: %s", self._rank, error)

        thread = threading.Thread(target=run, name="checkfreq-notes", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # this process is ending: there are no new threads
            return None
        thread.join(limit_s)
        return answers[0] if answers else None
