"""Which data-parallel rank this process is."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DataRank:
    """This process among those that share the data."""

    rank: int
    world_size: int
    assumed: bool = False  # neither given, nor was there a process group to ask

    def check(self, what: str) -> None:
        """Raise RuntimeError if a process group has come up since, and this rank is not alone.

        Every rank would train on all of the data, and nothing else would notice.
        """
        if not self.assumed:
            return
        now = resolve(None, None)
        if now.world_size > 1:
            raise RuntimeError(
                f"{what}: it was made before torch.distributed was initialised, as rank 0 of 1, "
                f"and this is rank {now.rank} of {now.world_size}. Make it afterwards, or pass "
                "rank= and world_size="
            )


def resolve(rank: int | None, world_size: int | None) -> DataRank:
    """Return the place that is given, or that of this process in the default group.

    With tensor, pipeline or context parallelism the default group is not the data-parallel one:
    pass the rank and size of that dimension of the mesh.

    Raises:
        ValueError: only one of the two is given.
    """
    if rank is not None and world_size is not None:
        return DataRank(rank, world_size)
    if rank is not None or world_size is not None:
        raise ValueError(f"pass both or neither: rank={rank}, world_size={world_size}")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return DataRank(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return DataRank(0, 1, assumed=True)
