"""What DCP hands over (tensors, byte streams) as payloads: flat bytes that are written as they lie.

A tensor's payload is its elements in C order. CPU tensors that already lie so are not copied.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from dcp_checkfreq.errors import UnsupportedState
from dcp_checkfreq.format.digest import block_bytes, digest
from dcp_checkfreq.format.envelope import Envelope, Envelopes
from dcp_checkfreq.shards.assign import Extent, Placement

_NO_ENVELOPE = Envelope(b"", 0, b"")
_NO_SUBCLASS = (torch.Tensor, torch.nn.Parameter)  # asking them for what they lack is slow


@dataclass(slots=True)
class Item:
    """One payload to write, and what becomes known of it while it is written."""

    source: torch.Tensor | memoryview
    envelope: Envelope
    payload_bytes: int
    block: int = 0  # digest block in bytes
    digests: list[int] = field(default_factory=list)
    same_as: int | None = None  # position of an earlier item with the same memory

    @property
    def extent(self) -> Extent:
        """The sizes that decide where the item goes."""
        return Extent(len(self.envelope.prefix), self.payload_bytes, len(self.envelope.suffix))


def byte_item(stream: io.BytesIO) -> Item:
    """Make an item of a stream that a planner has already serialised."""
    view = stream.getbuffer()
    return Item(view, _NO_ENVELOPE, len(view), block_bytes(len(view)))


def is_sharded_tensor(tensor: torch.Tensor) -> bool:
    """Tell whether this is FSDP1's ShardedTensor, which torch gives no public name."""
    return type(tensor) not in _NO_SUBCLASS and hasattr(tensor, "local_shards")


def check_storable(tensor: torch.Tensor, key: str) -> None:
    """Raise `UnsupportedState` for a tensor whose elements cannot be written or loaded again."""
    kind = type(tensor).__name__
    if is_lazy(tensor):
        raise UnsupportedState(key, kind, "it has no data yet: let its module run once first")
    if type(tensor) not in _NO_SUBCLASS and hasattr(tensor, "__tensor_flatten__"):
        raise UnsupportedState(
            key,
            kind,
            "a wrapper subclass has no bytes of its own. `Checkpointer` saves its inner tensors; "
            "for `dcp.save` put them under keys of their own, or save a dequantised copy",
        )
    if tensor.layout != torch.strided:
        raise UnsupportedState(key, f"{tensor.layout} tensor", "save a dense copy, or its parts")
    if tensor.is_meta:
        raise UnsupportedState(key, "meta tensor", "it has no data: materialise it first")
    if tensor.is_nested:
        raise UnsupportedState(key, "nested tensor", "save its parts (`unbind()`)")
    if tensor.is_quantized:
        raise UnsupportedState(key, "quantized tensor", "save int_repr(), scale and zero point")
    if _bytes_behind(tensor) < _reach_bytes(tensor):
        raise UnsupportedState(
            key,
            "tensor without its memory",
            "its storage was freed or cut (resize_): save while it is whole",
        )


def check_not_sharded_tensor(tensor: torch.Tensor, key: str) -> None:
    """Raise `UnsupportedState` for a tensor of which no snapshot can be taken."""
    if is_sharded_tensor(tensor):
        raise UnsupportedState(
            key,
            "ShardedTensor",
            "only DTensor shards can be staged. Give FSDP a device_mesh, use fully_shard, "
            "or save with dcp.save",
        )


def _bytes_behind(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _reach_bytes(tensor: torch.Tensor) -> int:
    """Return how far into its storage a tensor reaches."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.element_size()


def tensor_item(tensor: torch.Tensor, key: str, envelopes: Envelopes) -> Item:
    """Make an item of a tensor of any device; no bytes are copied yet.

    Raises:
        UnsupportedState: see `check_storable`.
    """
    check_storable(tensor, key)
    envelope = envelopes.get(tensor.dtype, tuple(tensor.shape))
    size = envelope.payload_bytes
    return Item(tensor, envelope, size, block_bytes(size))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, and any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a value that two tensors share only if they are the same elements of memory."""
    return (
        tensor.data_ptr(),
        tensor.device,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as plain C-ordered CPU memory: itself, or a copy if it is not that."""
    if tensor.is_cpu and _is_plain(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a C-ordered CPU tensor as a flat writable view of bytes.

    Works for every dtype. The view, and every slice of it, keeps the tensor alive.
    """
    size = tensor.nbytes
    if not size:
        return memoryview(b"")
    memory: Any = (ctypes.c_char * size).from_address(tensor.data_ptr())
    memory.owner = tensor
    return memoryview(memory).cast("B")


def cloned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy, detached, with memory of its own."""
    bare = tensor.detach()
    if bare.layout != torch.strided:
        return bare.clone()  # a contiguous one of a jagged one has no holes
    if bare.is_quantized and bare.qscheme() == torch.per_channel_affine_float_qparams:
        return copy.deepcopy(bare.contiguous())  # torch clones none of these
    return bare.clone(memory_format=torch.contiguous_format)


def is_same(live: torch.Tensor, saved: torch.Tensor) -> bool:
    """Tell whether two tensors have the same dtype, shape and bits; devices may differ."""
    live, saved = local_of(live.detach()), local_of(saved.detach())
    if live.layout != torch.strided or live.is_quantized or live.is_nested:
        return False  # they have no bits in order, and some not even a shape
    if live.dtype != saved.dtype or saved.is_nested or live.shape != saved.shape:
        return False
    if live.data_ptr() == saved.data_ptr() and live.stride() == saved.stride():
        return live.device == saved.device
    return torch.equal(_bits(live), _bits(saved.to(live.device)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    for wide in (torch.int64, torch.int32, torch.int16):  # compared several times as fast
        if flat.numel() % wide.itemsize == 0 and flat.storage_offset() % wide.itemsize == 0:
            return flat.view(wide)
    return flat


def finish_gpu_work(values: Iterable[object]) -> None:
    """Wait for all streams of the GPUs on which these tensors are, which other streams touch next.

    Values that are no CUDA tensors do not count.
    """
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def pieces(items: list[Item], placement: Placement) -> Iterator[memoryview]:
    """Yield the content of one shard file in order, filling in ``item.digests`` on the way.

    A block is digested right before it is yielded, so that the writer finds it in cache.
    A tensor that is not plain CPU memory is copied when its turn comes, and the copy is freed with
    the last piece of it.
    """
    glue: dict[tuple[bytes, int, bytes], memoryview] = {}
    end, tail = 0, b""
    for position, start in zip(placement.items, placement.starts, strict=True):
        item = items[position]
        envelope = item.envelope
        key = (tail, start - end, envelope.prefix)
        between = glue.get(key)
        if between is None:
            between = glue[key] = memoryview(tail + bytes(start - end) + envelope.prefix)
        yield between
        tail = envelope.suffix
        end = start + len(envelope.prefix) + item.payload_bytes + len(tail)
        source = item.source
        if isinstance(source, torch.Tensor) and source.is_cuda and _is_plain(source):
            yield from _from_gpu(source, item)
            continue
        payload = source if isinstance(source, memoryview) else bytes_of(dense(source))
        if item.payload_bytes > item.block:
            yield from _digested(payload, item)
        elif item.payload_bytes:
            item.digests = [digest(payload)]
            yield payload
    yield memoryview(tail + bytes(placement.size_bytes - end))


def _digested(payload: memoryview, item: Item) -> Iterator[memoryview]:
    block, size = item.block, len(payload)
    digests: list[int] = []
    # Handed on in runs of whole blocks, so that small blocks do not make many small pieces.
    run = max(_RUN_BYTES // block, 1) * block
    for begin in range(0, size, run):
        stop = min(begin + run, size)
        digests += [digest(payload[at : min(at + block, stop)]) for at in range(begin, stop, block)]
        yield payload[begin:stop]
    item.digests = digests


def _from_gpu(tensor: torch.Tensor, item: Item) -> Iterator[memoryview]:
    """Yield the payload in pieces of pinned host memory, each its own, on a stream of its own.

    The tensor must be complete: nothing here waits for the streams that made it.
    """
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    run = max(_GPU_RUN_BYTES // max(item.block, 1), 1) * item.block
    stream = _stream_for_reading(tensor.device)
    digests: list[int] = []
    for begin in range(0, item.payload_bytes, run):
        part = flat[begin : begin + run]
        host = torch.empty(part.shape, dtype=torch.uint8, pin_memory=True)
        # The device too: leaving the stream would set this thread's device to the first GPU.
        with torch.cuda.device(tensor.device), torch.cuda.stream(stream):
            host.copy_(part, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(stream)
        done.synchronize()
        view = bytes_of(host)
        digests += [digest(view[at : at + item.block]) for at in range(0, len(view), item.block)]
        yield view
    item.digests = digests


@functools.cache
def _stream_for_reading(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_GPU_RUN_BYTES = 16 << 20  # a transfer of this size runs at the speed of the bus
_RUN_BYTES = 1 << 20  # stays in the second-level cache between digest and copy
