"""Reads boxes of tensors, and byte items, of one checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from dcp_checkfreq.dcp.item_reads import ItemRead, ItemReads
from dcp_checkfreq.dcp.wanted_planner import WantedPlanner
from dcp_checkfreq.errors import BrokenShard
from dcp_checkfreq.format.index import Record
from dcp_checkfreq.opened.mapped_boxes import MappedBoxes
from dcp_checkfreq.shards.fetch import Fetcher
from dcp_checkfreq.state.saved import Leaf
from dcp_checkfreq.state.wanted import Wanted
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.storage.tier import Tier


class Source:
    """The bytes of one checkpoint. Several threads may read.

    Args:
        tier: its folder.
        metadata: of DCP.
        record: ours; None for a checkpoint of stock DCP.
        verify: compare digests.
        map_files: map files of a local disk where a box lies in one piece.
        threads: reads at once, for each call.
    """

    def __init__(
        self,
        tier: Tier,
        metadata: Metadata,
        record: Record | None,
        *,
        verify: bool,
        map_files: bool,
        threads: int,
    ) -> None:
        self.location = tier.location
        self._metadata, self._verify = metadata, verify
        sizes = record.files if record else {}
        self._fetcher = Fetcher(tier, sizes, threads)
        self._mapped: MappedBoxes | None = None
        if map_files and record is not None and isinstance(tier, LocalTier):
            self._mapped = MappedBoxes(tier, sizes)
        self._reads = ItemReads(
            metadata,
            record,
            tier.location,
            verify=verify,
            allow_pickle=False,
            allow_dtype_cast=False,
        )

    def boxes(
        self, asked: Sequence[tuple[Leaf, tuple[int, ...], tuple[int, ...]]]
    ) -> list[torch.Tensor]:
        """Return boxes of tensors, by offsets and lengths, which are read in one go.

        Raises:
            BrokenMetadata: parts of one are missing in the checkpoint.
            BrokenShard: a file is missing or short, or a block fails its digest.
        """
        wanted = Wanted()
        ones = [
            wanted.shard(leaf, ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths)))
            for leaf, offsets, lengths in asked
        ]
        for name, one in list(wanted.tensors.items()):
            if not one.tensor.numel():
                del wanted.tensors[name]
        planner = self._planner(wanted, allow_pickle=False)
        jobs = self._reads.planned(planner.create_local_plan(), planner)
        if len(ones) == len(jobs) == 1 and self._mapped is not None:
            box = self._mapped.box(jobs[0])
            if box is not None:
                return [box]
        self._fetch(jobs, planner)
        return [one.tensor for one in ones]

    def value(self, leaf: Leaf, *, allow_pickle: bool) -> Any:
        """Return a byte item, unpickled.

        Raises:
            UnsafePickle: it needs code to unpickle; the code was not run.
            BrokenShard: its file is missing or short, or a block fails its digest.
        """
        wanted = Wanted()
        one = wanted.value(leaf)
        planner = self._planner(wanted, allow_pickle=allow_pickle)
        self._fetch(self._reads.planned(planner.create_local_plan(), planner), planner)
        return one.value

    def _planner(self, wanted: Wanted, *, allow_pickle: bool) -> WantedPlanner:
        planner = WantedPlanner(wanted, allow_pickle=allow_pickle)
        planner.set_up_planner({}, self._metadata, is_coordinator=True)
        return planner

    def _fetch(self, jobs: list[ItemRead], planner: WantedPlanner) -> None:
        try:
            self._fetcher.fetch(
                [job.want for job in jobs],
                [job.target for job in jobs],
                [job.digests for job in jobs],
                [job.key for job in jobs],
            )
            for job in jobs:
                self._reads.hand_over(job, planner)
        except BrokenShard as error:
            raise error.before_the_state() from error

    def close(self) -> None:
        """Close the files. A read after it opens them again."""
        self._fetcher.close()
        if self._mapped is not None:
            self._mapped.let_go()
