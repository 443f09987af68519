"""Tensors that say themselves what DCP saves of them, of every kind that there is.

Each is made of blocks of a larger tensor: ``{row where it begins in that: the rows}``.
"""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Described:
    """The three methods that every torch asks. Subclasses have ``whole`` and ``blocks``."""

    def __create_write_items__(self, fqn, object):
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.whole
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self):
        return [
            ChunkStorageMetadata(torch.Size([row, 0]), block.shape)
            for row, block in self.blocks.items()
        ]

    def __get_tensor_shard__(self, index):
        return self.blocks[index.offset[0]]


class Wrapper(Described, torch.Tensor):
    """Has no memory of its own."""

    @staticmethod
    def __new__(cls, whole, blocks):
        return torch.Tensor._make_wrapper_subclass(cls, whole, dtype=torch.float32)

    def __init__(self, whole, blocks):
        self.whole, self.blocks = torch.Size(whole), blocks

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"nobody has to call {function}")


class Flattening(Wrapper):
    """Could be taken apart, too; but it says itself how it is to be saved."""

    def __tensor_flatten__(self):
        raise NotImplementedError

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        raise NotImplementedError


class Buffer(Described, torch.Tensor):
    """Has its blocks in memory of its own, with a row between them that belongs to none."""

    def size(self, *dim):
        return self.whole


def buffer(whole, blocks):
    made, places = laid_out(whole, blocks)
    own = made.as_subclass(Buffer)
    own.whole = torch.Size(whole)
    own.blocks = {
        row: made[at : at + len(block)]
        for (row, block), at in zip(blocks.items(), places, strict=True)
    }
    return own


def with_fields(whole, blocks):
    """A plain tensor with the fields of `dcp.CheckpointableTensor`."""
    made, places = laid_out(whole, blocks)
    made.global_shape = tuple(whole)
    made.global_offsets = tuple((row, 0) for row in blocks)
    made.local_offsets = tuple((at, 0) for at in places)
    made.local_sizes = tuple(tuple(block.shape) for block in blocks.values())
    return made


def laid_out(whole, blocks):
    """Return the blocks in one tensor, and the rows where they begin in it."""
    rows = [row for block in blocks.values() for row in (block, torch.full((1, whole[1]), -7.0))]
    places, at = [], 0
    for block in blocks.values():
        places.append(at)
        at += len(block) + 1
    return torch.cat(rows) if rows else torch.zeros(0, whole[1]), places


KINDS = {"wrapper": Wrapper, "flattening": Flattening, "buffer": buffer}
if hasattr(dcp, "CheckpointableTensor"):
    KINDS["fields"] = with_fields


def blocks_of(tensor):
    """Return the blocks that it holds now."""
    if isinstance(tensor, Described):
        return tensor.blocks
    sizes = zip(tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True)
    return {row: tensor[at : at + rows] for (row, _), (at, _), (rows, _) in sizes}
