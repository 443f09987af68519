"""The load planner of a restore: it knows what is wanted, and needs no state dict to fill."""

from __future__ import annotations

import io

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dcp_checkfreq.dcp.boundary import tells_errors
from dcp_checkfreq.dcp.covered import check_covered
from dcp_checkfreq.dcp.load_planner import CheckFreqLoadPlanner
from dcp_checkfreq.errors import LoadFailed
from dcp_checkfreq.format.safe_bytes import load_object
from dcp_checkfreq.runtime.gc_paused import collector_held
from dcp_checkfreq.state.packed import TREE
from dcp_checkfreq.state.unpacked import check_loaded
from dcp_checkfreq.state.wanted import Wanted


class WantedPlanner(CheckFreqLoadPlanner):
    """Loads what is wanted, and nothing into the state dict that DCP is given.

    Args:
        wanted: of this rank.
        allow_pickle: see `CheckFreqLoadPlanner`.
    """

    def __init__(self, wanted: Wanted, *, allow_pickle: bool) -> None:
        super().__init__(allow_pickle=allow_pickle)
        self._wanted = wanted

    @tells_errors(LoadFailed, "planning")
    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads.

        Raises:
            BrokenMetadata: parts of a tensor are missing in the checkpoint.
        """
        assert self.metadata is not None
        none = torch.Size([])
        with collector_held():
            items = [item for one in self._wanted.tensors.values() for item in one.items()]
            for one in self._wanted.values.values():
                source, target = MetadataIndex(one.leaf.key), MetadataIndex(one.name)
                items.append(ReadItem(LoadItemType.BYTE_IO, target, none, source, none, none))
            plan = LoadPlan(items)
            self.state_dict = {name: one.tensor for name, one in self._wanted.tensors.items()}
            check_covered(plan, self, self.metadata, self._where)
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the room for a tensor."""
        return self._wanted.tensors[index.fqn].box(index.offset)

    @tells_errors(LoadFailed, "reading a value")
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle a byte item.

        Raises:
            UnsafePickle: it needs code to unpickle; the code was not run.
        """
        one = self._wanted.values[read_item.dest_index.fqn]
        key = one.leaf.key
        one.value = load_object(value, key, self._where, allow_pickle=self._allow_pickle)
        if one.leaf.path[-1:] == (TREE,):
            check_loaded(one.value, key, self._where, may_import=self._allow_pickle)
