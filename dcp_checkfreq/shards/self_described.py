"""Tensors that say themselves what DCP saves of them and where it belongs.

DCP's planners look at shape and memory of most tensors, and ask these: through the methods that
DTensor has, too, or, since torch 2.14, the fields of `dcp.CheckpointableTensor`. Whoever copies or
compares such a tensor has to ask the same. Here it is asked as the installed DCP asks.

DTensor and ShardedTensor do not count: they are known by their types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from dcp_checkfreq.errors import UnsupportedState
from dcp_checkfreq.shards.codec import is_sharded_tensor

if TYPE_CHECKING:
    from typing_extensions import Self

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_METHODS = frozenset(("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"))
_FIELDS: frozenset[str] = frozenset(
    getattr(getattr(dcp, "CheckpointableTensor", None), "__annotations__", ())
)
_ASKED = _METHODS | _FIELDS


class Part(NamedTuple):
    """One shard, as DCP sees it."""

    item: WriteItem
    data: TensorWriteData
    tensor: torch.Tensor


def describes_itself(tensor: torch.Tensor) -> bool:
    """Tell whether DCP asks this tensor. Cheap for tensors that have no attributes."""
    if type(tensor) in _PLAIN and (not tensor.__dict__ or _ASKED.isdisjoint(tensor.__dict__)):
        return False
    if isinstance(tensor, DTensor) or is_sharded_tensor(tensor):
        return False
    return _has_methods(tensor) or _has_fields(tensor)


def _has_methods(tensor: torch.Tensor) -> bool:
    return any(hasattr(tensor, name) for name in _METHODS)


def _has_fields(tensor: torch.Tensor) -> bool:
    return bool(_FIELDS) and all(hasattr(tensor, name) for name in _FIELDS)


def parts_of(key: str, tensor: torch.Tensor) -> list[Part]:
    """Return the shards that DCP takes of a tensor that describes itself.

    Raises:
        UnsupportedState: it contradicts itself, or has other things than shards.
    """
    try:
        items = create_default_local_save_plan({key: tensor}, True).items
        found = [find_state_dict_object({key: tensor}, item.index) for item in items]
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UnsupportedState(
            key, type(tensor).__name__, f"DCP cannot save it: {error}"
        ) from error
    parts = []
    for item, shard in zip(items, found, strict=True):
        data = item.tensor_data
        if data is None or not isinstance(shard, torch.Tensor) or data.chunk.sizes != shard.shape:
            raise UnsupportedState(
                key,
                type(tensor).__name__,
                f"what it says about the part at {item.index.offset} is not what it has there",
            )
        parts.append(Part(item, data, shard))
    return parts


def description_of(key: str, tensor: torch.Tensor) -> tuple[object, ...]:
    """Return all that a tensor says of itself: while it is the same, a plan made before fits."""
    said = tuple(
        (item.type, *_identity(item.index), data.chunk.sizes, data.size, data.properties.dtype)
        for item, data, _ in parts_of(key, tensor)
    )
    fields = () if _has_methods(tensor) else _FIELDS
    return said, tuple(_frozen(getattr(tensor, name)) for name in sorted(fields))


def _identity(index: MetadataIndex) -> tuple[object, ...]:
    return index.fqn, index.offset, index.index


def _frozen(value: Any) -> object:
    """Return the same as tuples: a later change of a list does not change what was seen of it."""
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def memory_parts(key: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the memory to copy: all of a tensor with fields, else its shards; see `stand_in`."""
    if _has_methods(tensor):
        return [part.tensor for part in parts_of(key, tensor)]
    parts_of(key, tensor)  # raises if it contradicts itself
    return [tensor]


def stand_in(key: str, tensor: torch.Tensor, copies: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what planners take for the same tensor, with copies in place of `memory_parts`."""
    if _has_methods(tensor):
        return Shards.of(
            tensor.shape, tensor.dtype, [part.item for part in parts_of(key, tensor)], copies
        )
    (copy,) = copies
    made = copy.view_as(copy)  # an object of its own: others may stand for the same memory
    carry(tensor, made)
    return made


def to_pickle(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return what planners take for the same tensor, also after it was sent to another process.

    Sending drops all attributes of plain tensors, and with them what such a tensor says of itself.
    """
    if _has_methods(tensor):
        return tensor
    parts = parts_of(key, tensor)
    items, shards = [part.item for part in parts], [part.tensor for part in parts]
    return Shards.of(tensor.shape, tensor.dtype, items, shards)


def carry(source: torch.Tensor, target: torch.Tensor) -> None:
    """Let ``target``, which has the memory of ``source`` or a copy, describe itself the same."""
    for name in _FIELDS:
        setattr(target, name, getattr(source, name))


def carry_all(module: torch.nn.Module, state: dict[str, Any]) -> None:
    """Let the tensors of a module's ``state_dict()`` describe themselves as the module's own do.

    They are detached there, which drops the fields.
    """
    if not _FIELDS:
        return
    tensors: list[tuple[str, torch.Tensor]] = [*module.named_parameters(remove_duplicate=False)]
    tensors += module.named_buffers(remove_duplicate=False)
    for key, tensor in tensors:
        if describes_itself(tensor) and _has_fields(tensor) and key in state:
            carry(tensor, state[key])


def size_in_checkpoint(tensor: torch.Tensor) -> torch.Size:
    """Return the size that a tensor has in checkpoints: of all shards together."""
    if describes_itself(tensor) and not _has_methods(tensor):
        whole: Any = tensor
        return torch.Size(whole.global_shape)
    return tensor.size()  # as DCP asks; some have a shape of their own


class Shards(torch.Tensor):
    """Shards, or copies of them, with what DCP is to be told about them."""

    _items: list[WriteItem]
    _copies: list[torch.Tensor]

    @classmethod
    def of(
        cls,
        size: Sequence[int],
        dtype: torch.dtype,
        items: Sequence[WriteItem],
        copies: Sequence[torch.Tensor],
    ) -> Self:
        """Return them as a tensor of the size of the whole, without memory of its own."""
        made = torch.empty(size, dtype=dtype, device="meta").as_subclass(cls)
        made._items, made._copies = list(items), list(copies)
        return made

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            dataclasses.replace(item, index=dataclasses.replace(item.index, fqn=fqn))
            for item in self._items
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [item.tensor_data.chunk for item in self._items if item.tensor_data is not None]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for item, copy in zip(self._items, self._copies, strict=True):
            if item.index.offset == index.offset:
                return copy
        raise ValueError(f"{index.fqn!r} has no part at {index.offset}")
