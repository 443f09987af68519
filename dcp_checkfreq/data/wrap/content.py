"""A digest of what is in a batch, of bounded cost: large tensors are sampled.

It is the same in every process for the same values. Not looked at: what lies on a device (that
would wait for it), and what is inside of objects whose fields Python does not show.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
import xxhash

from dcp_checkfreq.data.order.permutation import numpy_or_none

# Of one tensor, array or text; of all of a batch. xxh3 takes about 0.1 ms for the latter.
_MAX_ELEMENTS = 8192
_MAX_TEXT = 64 << 10
_MAX_BYTES = 1 << 20
_MAX_ITEMS = 64  # of a list or dict; beyond, so many are taken evenly from all of it
_MAX_LEAVES = 2048
_MAX_DEPTH = 8


def digest_of(value: object) -> int:
    """Return 64 bits that depend on the values, types and shapes in a batch."""
    reader = _Reader()
    reader.take(value, 0)
    return reader.hasher.intdigest()


def evenly(count: int, most: int) -> range:
    """Return at most ``most`` numbers of ``range(count)``, the first among them, evenly spaced."""
    return range(0, count, max(1, -(-count // most)))


class _Reader:
    def __init__(self) -> None:
        self.hasher = xxhash.xxh3_64()
        self._leaves = 0
        self._bytes = 0

    def take(self, value: Any, depth: int) -> None:
        """Put a value into the digest: its kind, its size, and what is in it."""
        self._leaves += 1
        self._name(type(value))
        if self._leaves > _MAX_LEAVES or depth > _MAX_DEPTH:
            return
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, enum.Enum):
            self._bytes_of(value.name.encode())
        elif value is None or isinstance(value, (bool, float, complex)):
            self._bytes_of(repr(value).encode())
        elif isinstance(value, int):
            self._bytes_of(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        elif isinstance(value, str):
            self._bytes_of(value[:_MAX_TEXT].encode("utf-8", "surrogatepass"), len(value))
        elif isinstance(value, (bytes, bytearray, memoryview)):
            self._bytes_of(bytes(memoryview(value).cast("B")[:_MAX_TEXT]), len(value))
        elif self._is_array(value):
            self._array(value, depth)
        elif isinstance(value, Mapping):
            # Keys may come from a set, whose order is another one in each process.
            self._items(sorted(value.items(), key=lambda pair: repr(pair[0])), depth)
        elif isinstance(value, Set):
            self._items(sorted(value, key=repr), depth)
        elif isinstance(value, Sequence):
            self._items(value, depth)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            self._items([(name, getattr(value, name, None)) for name in names], depth)
        elif hasattr(value, "__dict__") and not callable(value):
            self._items(sorted(vars(value).items()), depth)

    def _name(self, kind: type) -> None:
        self.hasher.update(f"{kind.__module__}.{kind.__qualname__}\0".encode())

    def _bytes_of(self, data: bytes, size: int | None = None) -> None:
        self.hasher.update((len(data) if size is None else size).to_bytes(8, "little"))
        if self._bytes < _MAX_BYTES:
            self.hasher.update(data)
            self._bytes += len(data)

    def _items(self, items: Sequence[Any], depth: int) -> None:
        self._bytes_of(len(items).to_bytes(8, "little"))
        for number in evenly(len(items), _MAX_ITEMS):
            self.take(items[number], depth + 1)

    def _tensor(self, tensor: torch.Tensor) -> None:
        self._bytes_of(f"{tensor.dtype} {tensor.layout} {tensor.device.type}".encode())
        # A tensor made of tensors may be sharded: to look into it could be a collective.
        if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
            return
        self._bytes_of(repr(tuple(tensor.shape)).encode())
        if tensor.device.type != "cpu" or tensor.is_quantized or not tensor.numel():
            return
        sampled = tensor.detach()[_sample(tensor.shape)].resolve_conj().resolve_neg().contiguous()
        if sampled.dim() == 0:
            sampled = sampled.reshape(1)
        self._bytes_of(sampled.view(torch.uint8).reshape(-1).numpy().tobytes())

    def _is_array(self, value: Any) -> bool:
        np = numpy_or_none()
        return np is not None and isinstance(value, (np.ndarray, np.generic))

    def _array(self, value: Any, depth: int) -> None:
        self._bytes_of(f"{value.dtype.str} {value.shape}".encode())
        sampled = value[_sample(value.shape)] if value.shape else value
        if value.dtype.hasobject:
            self._items(sampled.tolist() if value.shape else [value.item()], depth)
        else:
            self._bytes_of(sampled.tobytes())


def _sample(shape: Iterable[int]) -> tuple[slice, ...]:
    """Return slices that take at most `_MAX_ELEMENTS`, evenly; of all samples, if it can be.

    The first dimension is most often that of the samples, so it is thinned out last.
    """
    sizes = list(shape)
    kept = list(sizes)
    while (count := _product(kept)) > _MAX_ELEMENTS:
        inner = [n for n in range(1, len(kept)) if kept[n] > 1]
        axis = max(inner, key=lambda n: kept[n]) if inner else 0
        kept[axis] = max(1, min(kept[axis] - 1, kept[axis] * _MAX_ELEMENTS // count))
    return tuple(slice(None, None, -(-size // keep) if keep else None)
                 for size, keep in zip(sizes, kept, strict=True))  # fmt: skip


def _product(sizes: Iterable[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
