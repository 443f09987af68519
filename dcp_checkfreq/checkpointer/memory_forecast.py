"""What memory snapshots take, on each rank and on each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """What snapshots of the state as it is now take; see `Checkpointer.forecast`.

    It is what the first snapshot takes, which copies everything. Later ones take no more, as long
    as the state stays as large: a rank then copies only what no other rank writes.

    Attributes:
        host_bytes: of host memory, for this rank. It is kept from save to save.
        gpu_bytes: of GPU memory, for this rank. Where the way of copying is not decided yet
            (``snapshot="auto"``), what the profile tries.
        node_host_bytes: of host memory, for all ranks of this node.
        node_gpu_bytes: of GPU memory, for all ranks of this node.
        node_ranks: how many ranks that are.
        without_state: registered optimizers of this rank that have no state, by name. Most make it
            in their first step: until then it is not counted.
    """

    host_bytes: int
    gpu_bytes: int
    node_host_bytes: int
    node_gpu_bytes: int
    node_ranks: int
    without_state: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Needs:
    """What a rank says of itself."""

    node: str
    host_bytes: int
    gpu_bytes: int
    without_state: tuple[str, ...] = ()


def forecasts(ranks: Sequence[Needs]) -> list[MemoryForecast]:
    """Return the forecast of each rank, from what all of them need."""
    nodes = _ranks_of_nodes(ranks)
    return [
        MemoryForecast(
            host_bytes=mine.host_bytes,
            gpu_bytes=mine.gpu_bytes,
            node_host_bytes=sum(ranks[other].host_bytes for other in nodes[mine.node]),
            node_gpu_bytes=sum(ranks[other].gpu_bytes for other in nodes[mine.node]),
            node_ranks=len(nodes[mine.node]),
            without_state=mine.without_state,
        )
        for mine in ranks
    ]


def first_lines(ranks: Sequence[Needs]) -> Mapping[int, str]:
    """Return what the first rank of each node says before the first snapshot."""
    found = forecasts(ranks)
    return {on_node[0]: _told(found[on_node[0]]) for on_node in _ranks_of_nodes(ranks).values()}


def _ranks_of_nodes(ranks: Sequence[Needs]) -> dict[str, list[int]]:
    nodes: dict[str, list[int]] = {}
    for rank, needs in enumerate(ranks):
        nodes.setdefault(needs.node, []).append(rank)
    return nodes


def _told(ahead: MemoryForecast) -> str:
    ranks = "1 rank" if ahead.node_ranks == 1 else f"{ahead.node_ranks} ranks"
    return (
        f"snapshots take {ahead.node_host_bytes} bytes of host memory and {ahead.node_gpu_bytes} "
        f"bytes of GPU memory on this node ({ranks}), the first one now"
    )
