"""Ranks that want the same bytes of a checkpoint: one reads and checks them, all get them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.ranks.patience import Asking
from dcp_checkfreq.runtime.crew import Crew, Task
from dcp_checkfreq.shards.codec import bytes_of
from dcp_checkfreq.shards.fetch import Taker
from dcp_checkfreq.shards.read_plan import Want
from dcp_checkfreq.shards.shared_read_plan import (
    Chunk,
    Range,
    range_of,
    rounds,
)

# What a rank holds at once of its own, twice, and of all others together.
_CHUNK_BYTES, _ALL_CHUNKS_BYTES = 32 << 20, 256 << 20

Fetch = Callable[[Sequence[Want], Sequence[Taker], Sequence[Sequence[int]], Sequence[str]], int]


@dataclass(slots=True)
class Shared:
    """What came of sharing, on one rank."""

    tickets: frozenset[int]  # wants that are served
    bytes_read: int = 0  # by this rank
    bytes_received: int = 0  # from others


class _Slot:
    """Takes a part into its place in a chunk."""

    def __init__(self, memory: memoryview, start: int) -> None:
        self._memory, self._start = memory, start

    def take(self, want: Want, data: memoryview) -> None:
        begin = want.start - self._start
        self._memory[begin : begin + len(data)] = data


def share(
    ranks: Ranks,
    wants: Sequence[Want],
    targets: Sequence[Taker],
    digests: Sequence[Sequence[int]],
    keys: Sequence[str],
    fetch: Fetch,
    asking: Asking,
    where: str,
) -> Shared:
    """Read what more than one rank wants once, and hand it to the targets of all of them.

    All ranks call it. Wants of which no other rank has the very same are left alone.

    Args:
        ranks: of this job.
        wants: of this rank; ``targets`` and ``digests`` are looked up by their tickets.
        targets: see `Fetcher.fetch`.
        digests: see `Fetcher.fetch`.
        keys: see `Fetcher.fetch`.
        fetch: like `Fetcher.fetch`; called in a thread.
        asking: gives up if that never returns.
        where: the checkpoint.

    Raises:
        BrokenShard: of any rank, on all of them. Some targets may have got some bytes.
        RankLost: a rank did not answer.
    """
    mine: dict[Range, list[Want]] = {}
    for want in wants:
        mine.setdefault(range_of(want), []).append(want)
    chunk_bytes = min(_CHUNK_BYTES, max(1 << 20, _ALL_CHUNKS_BYTES // ranks.world_size))
    plan = rounds(ranks.all_gather(list(mine)), chunk_bytes=chunk_bytes)
    exchange = _Exchange(ranks, mine, targets, digests, keys, fetch)
    crew = Crew(1, "checkfreq-share")  # its thread ends when that is dropped: nobody waits for it
    reading: Task[torch.Tensor | None] | None = None
    try:
        for number, chunks in enumerate(plan):
            reading = reading or crew.start(functools.partial(exchange.read, chunks))
            # Before anybody waits for bytes that will not come.
            with ranks.region("reading for other ranks"):
                read = asking.result_of(reading, "reading for other ranks", where)
                into = exchange.room(chunks)
            reading = None
            if number + 1 < len(plan):
                reading = crew.start(functools.partial(exchange.read, plan[number + 1]))
            exchange.swap(chunks, read, into)
    except BaseException:
        if reading is not None and not asking.is_given_up:  # it uses files that the caller closes
            with contextlib.suppress(Exception):
                asking.result_of(reading, "reading for other ranks", where)
        raise
    exchange.done.tickets = frozenset(
        want.ticket
        for chunks in plan
        for chunk in chunks
        if ranks.rank in chunk.wanters
        for wanted, _ in chunk.parts
        for want in mine[wanted]
    )
    return exchange.done


class _Exchange:
    def __init__(
        self,
        ranks: Ranks,
        mine: Mapping[Range, Sequence[Want]],
        targets: Sequence[Taker],
        digests: Sequence[Sequence[int]],
        keys: Sequence[str],
        fetch: Fetch,
    ) -> None:
        self._ranks, self._mine = ranks, mine
        self._targets, self._digests, self._keys = targets, digests, keys
        self._fetch = fetch
        self.done = Shared(frozenset())

    def read(self, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        """Read this rank's chunk of a round, if it has one."""
        own = next((chunk for chunk in chunks if chunk.owner == self._ranks.rank), None)
        if own is None:
            return None
        content = torch.empty(own.size_bytes, dtype=torch.uint8)
        memory = bytes_of(content)
        wants, slots, digests, keys = [], [], [], []
        at = 0
        for ticket, (wanted, part) in enumerate(own.parts):
            size_bytes = part.stop - part.start
            wants.append(replace(part, ticket=ticket))
            slots.append(_Slot(memory[at : at + size_bytes], part.start))
            first = self._mine[wanted][0].ticket
            digests.append(self._digests[first])
            keys.append(self._keys[first])
            at += size_bytes
        self.done.bytes_read += self._fetch(wants, slots, digests, keys)
        return content

    def room(self, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        """Return memory for what this rank gets from others in a round, in order."""
        return [
            torch.empty(chunk.size_bytes, dtype=torch.uint8)
            for chunk in chunks
            if chunk.owner != self._ranks.rank and self._ranks.rank in chunk.wanters
        ]

    def swap(
        self, chunks: Sequence[Chunk], own: torch.Tensor | None, room: Sequence[torch.Tensor]
    ) -> None:
        """Send this rank's chunk of a round, get those of others, and hand all of them on."""
        free = iter(room)
        rank = self._ranks.rank
        sends: list[tuple[int, torch.Tensor]] = []
        receives: list[tuple[int, torch.Tensor]] = []
        here: list[tuple[Chunk, torch.Tensor]] = []
        for chunk in chunks:
            if chunk.owner == rank:
                assert own is not None
                sends += [(other, own) for other in chunk.wanters if other != rank]
                here.append((chunk, own))
            elif rank in chunk.wanters:
                content = next(free)
                receives.append((chunk.owner, content))
                here.append((chunk, content))
                self.done.bytes_received += chunk.size_bytes
        self._ranks.exchange(sends, receives)
        for chunk, content in here:
            memory = bytes_of(content)
            at = 0
            for wanted, part in chunk.parts:
                size_bytes = part.stop - part.start
                for want in self._mine[wanted]:
                    taken = replace(part, ticket=want.ticket)
                    self._targets[want.ticket].take(taken, memory[at : at + size_bytes])
                at += size_bytes
