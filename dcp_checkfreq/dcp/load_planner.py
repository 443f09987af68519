"""`CheckFreqLoadPlanner`: DCP's own, plus shapes that must fit and byte items that run no code."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
)

from dcp_checkfreq.dcp.boundary import tells_errors
from dcp_checkfreq.dcp.covered import check_covered
from dcp_checkfreq.errors import (
    LoadFailed,
    StateMismatch,
)
from dcp_checkfreq.format.safe_bytes import load_object
from dcp_checkfreq.runtime.gc_paused import collector_held
from dcp_checkfreq.shards.self_described import describes_itself, size_in_checkpoint


class CheckFreqLoadPlanner(DefaultLoadPlanner):
    """DCP's default load plans; byte items are unpickled without running code of theirs.

    Values that were saved under integer keys go back to those keys; stock planners leave them
    as they were and add text keys next to them.

    Args:
        allow_partial_load: leave keys that the checkpoint lacks as they are.
        allow_pickle: let byte items run code. Only for checkpoints whose writer you trust.
    """

    def __init__(self, *, allow_partial_load: bool = False, allow_pickle: bool = False) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self._allow_pickle = allow_pickle
        self._where = "the checkpoint"

    @tells_errors(LoadFailed, "planning")
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state to fill and the metadata of the checkpoint."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        if metadata is not None and metadata.storage_meta is not None:
            self._where = str(metadata.storage_meta.checkpoint_id)

    @tells_errors(LoadFailed, "planning")
    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads.

        Raises:
            StateMismatch: keys are missing in the checkpoint, or shapes differ.
            BrokenMetadata: parts of a tensor are missing in it.
        """
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        differing = [
            f"{key}: saved {list(kept.size)}, wanted {list(size_in_checkpoint(value))}"
            for key, value in self.state_dict.items()
            if isinstance(value, torch.Tensor)
            and isinstance(kept := saved.get(key), TensorStorageMetadata)
            and kept.size != size_in_checkpoint(value)
        ]
        if differing:
            raise StateMismatch(self._where, f"shapes differ: {_listed(differing)}")
        missing = [key for key in self.state_dict if key not in saved]
        with collector_held():
            if not missing:
                plan = self._plan_whole_tensors()
            else:
                try:
                    # Keys may be left out on purpose, and before torch 2.4 they had other names.
                    plan = super().create_local_plan()
                except RuntimeError as error:  # DCP names the first of them
                    raise StateMismatch(self._where, f"it lacks {_listed(missing)}") from error
            check_covered(plan, self, self.metadata, self._where)
        return plan

    def _plan_whole_tensors(self) -> LoadPlan:
        """Plan tensors that are saved and wanted in one piece; leave the others to DCP's rules."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        others: dict[str, Any] = {}
        for key, value in self.state_dict.items():
            kept = self.metadata.state_dict_metadata.get(key)
            if (
                type(value) in (torch.Tensor, torch.nn.Parameter)
                and not describes_itself(value)
                and isinstance(kept, TensorStorageMetadata)
                and len(kept.chunks) == 1
                and kept.chunks[0].sizes == kept.size
            ):
                origin = kept.chunks[0].offsets
                index = MetadataIndex(key, origin, 0)
                items.append(ReadItem(LoadItemType.TENSOR, index, origin, index, origin, kept.size))
            else:
                others[key] = value
        rest = create_default_local_load_plan(others, self.metadata, not self.allow_partial_load)
        return LoadPlan(items + rest.items)

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of ``tensor`` that the item fills."""
        if tensor.shape == read_item.lengths:
            return tensor
        return super().transform_tensor(read_item, tensor)  # type: ignore[no-any-return]

    @tells_errors(LoadFailed, "reading a value")
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle a byte item and put it where it was.

        Raises:
            UnsafePickle: it needs code to unpickle; the code was not run.
        """
        key = read_item.dest_index.fqn
        loaded = load_object(value, key, self._where, allow_pickle=self._allow_pickle)
        path = self.mappings[key]
        container: Any = self.original_state_dict
        for part in path[:-1]:
            container = container[_real_key(container, part)]
        try:
            container[_real_key(container, path[-1])] = loaded
        except (TypeError, IndexError) as error:
            raise StateMismatch(self._where, f"{key!r} has no place in the state") from error


def _listed(texts: Sequence[str]) -> str:
    return "; ".join(texts[:5]) + (f"; and {len(texts) - 5} more" if len(texts) > 5 else "")


def _real_key(container: Any, part: str | int) -> Any:
    """DCP's flat keys turn integer keys into text; return the key that the container has."""
    if isinstance(container, Mapping) and part not in container:
        for key in container:
            if str(key) == part:
                return key
    return part
