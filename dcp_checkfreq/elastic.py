"""Process groups that come back when `torchrun --max-restarts` starts the workers again.

All attempts of a job use the store of the launcher's agent. Torch's own set-up leaves addresses in
it under names that do not depend on the attempt, and gloo of the next attempt tries to reach the
processes of the last one (seen on torch 2.13: it never comes back). Here the ranks of an attempt
first find each other, whatever the store holds, and use names that no other attempt has.
"""

from __future__ import annotations

import datetime
import os
import uuid
from typing import Any, Protocol

import torch.distributed as dist

from dcp_checkfreq.errors import RankLost
from dcp_checkfreq.runtime.clock import Clock, SystemClock

_KEY = "dcp_checkfreq/elastic"
_POLL_S = 0.02
_DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)  # torch's for gloo


class Store(Protocol):
    """What is used of the agent's store."""

    def set(self, key: str, value: str, /) -> object:
        """Write a key."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is there."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all keys are there."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return it."""
        ...


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: datetime.timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    **options: Any,
) -> None:
    """Do what `torch.distributed.init_process_group` does, on every attempt of an elastic job.

    Takes its arguments. Without ``torchrun``, and with a ``store`` or an ``init_method`` other than
    ``env://``, it is torch's own.

    Raises:
        RankLost: the ranks of this attempt did not find each other within ``timeout``.
    """
    if timeout is not None:
        options["timeout"] = timeout
    is_elastic = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not is_elastic or store is not None or init_method not in (None, "env://"):
        dist.init_process_group(
            backend, init_method, world_size=world_size, rank=rank, store=store, **options
        )
        return
    rank = int(os.environ["RANK"]) if rank < 0 else rank
    world_size = int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size
    limit = timeout or _DEFAULT_TIMEOUT
    agents = dist.TCPStore(  # type: ignore[attr-defined]  # public in the docs
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=limit,
        wait_for_workers=False,
    )
    # Not by TORCHELASTIC_RESTART_COUNT: each agent counts its own restarts, one that was started
    # again begins at 0, and a change of the membership is none.
    key = f"{_KEY}/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    attempt = find_each_other(agents, rank, world_size, key=key, timeout_s=limit.total_seconds())
    names = dist.PrefixStore(  # type: ignore[attr-defined]  # public in the docs
        f"{key}/attempt/{attempt}", agents
    )
    dist.init_process_group(backend, store=names, rank=rank, world_size=world_size, **options)


def find_each_other(
    store: Store,
    rank: int,
    world_size: int,
    *,
    key: str,
    timeout_s: float,
    clock: Clock | None = None,
) -> str:
    """Return a name that the ranks of this attempt share, and no other attempt has.

    Every rank writes a word that nobody else knows; rank 0 answers all words that it finds, those
    of dead processes too, until all other ranks have taken the answer. All ranks call it.

    Args:
        store: of all attempts of the job.
        rank: of this process.
        world_size: processes in this attempt.
        key: before every key in the store.
        timeout_s: how long to wait for the others.
        clock: by which that is.

    Raises:
        RankLost: some did not come.
    """
    clock = clock or SystemClock()
    until_s = clock.monotonic_s() + timeout_s
    if rank == 0:
        return _answer(store, world_size, key, until_s, clock)
    word = uuid.uuid4().hex
    store.set(f"{key}/word/{store.add(f'{key}/words', 1)}", word)
    while not store.check([f"{key}/answer/{word}"]):
        if clock.monotonic_s() > until_s:
            raise RankLost(f"rank {rank}", f"rank 0 did not come within {timeout_s:g} s")
        clock.sleep(_POLL_S)
    token = store.get(f"{key}/answer/{word}").decode()
    store.add(f"{key}/taken/{token}", 1)
    return token


def _answer(store: Store, world_size: int, key: str, until_s: float, clock: Clock) -> str:
    token = uuid.uuid4().hex
    begun_s = clock.monotonic_s()
    seen, unwritten = 0, set[int]()
    while (taken := store.add(f"{key}/taken/{token}", 0)) < world_size - 1:
        words = store.add(f"{key}/words", 0)
        unwritten.update(range(seen + 1, words + 1))
        seen = words
        for number in sorted(unwritten):
            if store.check([f"{key}/word/{number}"]):
                word = store.get(f"{key}/word/{number}").decode()
                store.set(f"{key}/answer/{word}", token)
                unwritten.discard(number)
        if clock.monotonic_s() > until_s:
            raise RankLost(
                "rank 0",
                f"{taken} of {world_size - 1} other ranks came within "
                f"{clock.monotonic_s() - begun_s:.0f} s",
            )
        clock.sleep(_POLL_S)
    return token
