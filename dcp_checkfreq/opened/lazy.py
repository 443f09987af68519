"""Tensors and values of an opened checkpoint: what they are is known, their bytes are read late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_checkfreq.opened.picked import picked
from dcp_checkfreq.opened.source import Source
from dcp_checkfreq.state.saved import Leaf


class LazyTensor:
    """One tensor of a checkpoint, whatever its shards are. Several threads may read it.

    ``lazy[10:20]`` reads these rows, ``lazy[..., 0]`` and the like as well: numbers, slices and
    ``...``, as torch has them. Where the checkpoint lies on a local disk and what is asked for is
    in one piece of it, the tensor is the file's own memory, mapped privately: nothing is copied,
    writing to it changes no file, and it outlives the checkpoint's deletion. Otherwise it is a
    copy. Either way every digest block of it was checked.

    Attributes:
        key: flat, as DCP has it.
        shape: of the whole tensor.
        dtype: that was saved.
    """

    def __init__(self, source: Source, leaf: Leaf) -> None:
        assert isinstance(leaf.kept, TensorStorageMetadata)
        self._source, self._leaf = source, leaf
        self.key = leaf.key
        self.shape = torch.Size(leaf.kept.size)
        self.dtype: torch.dtype = leaf.kept.properties.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """The size of its elements in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def tensor(self) -> torch.Tensor:
        """Return all of it, on the CPU.

        Raises:
            BrokenMetadata: parts of it are missing in the checkpoint.
            BrokenShard: a file is missing or short, or a block fails its digest.
        """
        return read_together([(self, ...)])[0]

    def __getitem__(self, index: object) -> torch.Tensor:
        """Return a part of it, on the CPU; only the digest blocks that it touches are read.

        Raises:
            IndexError: out of range, or more indices than dimensions.
            TypeError: another kind of index.
            ValueError: a slice that does not go forward.
            BrokenMetadata, BrokenShard: as `tensor`.
        """
        return read_together([(self, index)])[0]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __bool__(self) -> bool:
        raise TypeError("whether a lazy tensor is true is not known: load it first, .tensor()")

    def __repr__(self) -> str:
        return f"LazyTensor({self.key!r}, {list(self.shape)}, {self.dtype})"


def read_together(parts: Sequence[tuple[LazyTensor, object]]) -> list[torch.Tensor]:
    """Return parts of tensors of one checkpoint, by their indices, read in one go.

    Raises:
        IndexError, TypeError, ValueError, BrokenMetadata, BrokenShard: as ``lazy[index]``.
    """
    picks = [picked(index, lazy.shape) for lazy, index in parts]
    source = parts[0][0]._source
    boxes = source.boxes(
        [
            (lazy._leaf, what.offsets, what.lengths)
            for (lazy, _), what in zip(parts, picks, strict=True)
        ]
    )
    return [box[what.rest] if what.rest else box for box, what in zip(boxes, picks, strict=True)]


class LazyValue:
    """One value of a checkpoint that is no tensor."""

    def __init__(self, source: Source, leaf: Leaf) -> None:
        self._source, self._leaf = source, leaf
        self.key = leaf.key

    def value(self, *, allow_pickle: bool = False) -> Any:
        """Return it.

        Args:
            allow_pickle: let it run code when it is unpickled. Only for a writer you trust.

        Raises:
            UnsafePickle: it needs code to unpickle; the code was not run.
            BrokenShard: its file is missing or short, or a block fails its digest.
        """
        return self._source.value(self._leaf, allow_pickle=allow_pickle)

    def __repr__(self) -> str:
        return f"LazyValue({self.key!r})"
