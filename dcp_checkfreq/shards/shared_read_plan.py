"""Which rank reads what several ranks want, so that every byte is read once. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcp_checkfreq.shards.read_plan import Want, split

_PART_FROM_BYTES = 256 << 10

Range = tuple[str, int, int, int, int]  # file, payload offset, start, stop, digest block


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one rank reads at once and sends to others."""

    owner: int
    wanters: tuple[int, ...]  # all ranks that want it, the owner among them
    parts: tuple[tuple[Range, Want], ...]  # each part, and of which wanted range it is
    size_bytes: int


def range_of(want: Want) -> Range:
    """Return what makes wants of different ranks the same."""
    return want.file, want.payload_offset, want.start, want.stop, want.block


def rounds(ranks: Sequence[Sequence[Range]], *, chunk_bytes: int) -> list[list[Chunk]]:
    """Share out what more than one rank wants; the same on every rank.

    Ranges that are wanted by the same ranks are dealt out to these in runs of about equal size, in
    the order of the files.

    Args:
        ranks: what each rank wants.
        chunk_bytes: no chunk has more, unless a digest block does.

    Returns:
        What is read and sent at once: at most one chunk of every rank in each round.
    """
    wanters: dict[Range, list[int]] = {}
    for rank, ranges in enumerate(ranks):
        for wanted in dict.fromkeys(ranges):
            wanters.setdefault(wanted, []).append(rank)
    alike: dict[tuple[int, ...], list[Range]] = {}
    for wanted, by in wanters.items():
        if len(by) > 1 and wanted[2] < wanted[3]:
            alike.setdefault(tuple(by), []).append(wanted)
    queues: dict[int, list[Chunk]] = {}
    for by_all, ranges in sorted(alike.items()):
        for owner, parts in _dealt(by_all, sorted(ranges), chunk_bytes).items():
            queues.setdefault(owner, []).extend(_chunks(owner, by_all, parts, chunk_bytes))
    longest = max(map(len, queues.values()), default=0)
    return [
        [queue[number] for _, queue in sorted(queues.items()) if number < len(queue)]
        for number in range(longest)
    ]


def _dealt(
    owners: Sequence[int], ranges: Sequence[Range], chunk_bytes: int
) -> Mapping[int, list[tuple[Range, Want]]]:
    total_bytes = sum(wanted[3] - wanted[2] for wanted in ranges)
    # Fine enough for an even deal, and no finer than pays.
    part_bytes = min(chunk_bytes, max(_PART_FROM_BYTES, total_bytes // (4 * len(owners))))
    parts = [(wanted, part) for wanted in ranges for part in split(Want(0, *wanted), part_bytes)]
    dealt: dict[int, list[tuple[Range, Want]]] = {}
    before_bytes = 0
    for wanted, part in parts:
        turn = before_bytes * len(owners) // total_bytes
        dealt.setdefault(owners[turn], []).append((wanted, part))
        before_bytes += part.stop - part.start
    return dealt


def _chunks(
    owner: int, wanters: tuple[int, ...], parts: Sequence[tuple[Range, Want]], chunk_bytes: int
) -> list[Chunk]:
    made: list[Chunk] = []
    group: list[tuple[Range, Want]] = []
    group_bytes = 0
    for wanted, part in parts:
        part_bytes = part.stop - part.start
        if group and group_bytes + part_bytes > chunk_bytes:
            made.append(Chunk(owner, wanters, tuple(group), group_bytes))
            group, group_bytes = [], 0
        group.append((wanted, part))
        group_bytes += part_bytes
    if group:
        made.append(Chunk(owner, wanters, tuple(group), group_bytes))
    return made
