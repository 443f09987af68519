"""Where bytes that were read and checked go: straight into a tensor, or through scratch."""

from __future__ import annotations

import threading

import torch

from dcp_checkfreq.shards.byte_spans import Span, strides_of
from dcp_checkfreq.shards.codec import bytes_of
from dcp_checkfreq.shards.read_plan import Want
from dcp_checkfreq.storage.local.direct_io import copy_bytes


class TensorTarget:
    """Takes the bytes of one wanted box of a saved chunk.

    If the box is one run of bytes and the tensor is plain CPU memory of the same dtype, bytes are
    copied to where they belong. Otherwise they gather in scratch of the size of the span, and the
    last part copies the box over (strided, cast, or to a device).

    Args:
        tensor: the box in the live state, any device, shape of the box.
        shape: of the saved chunk.
        dtype: of the saved chunk.
        span: where the box is in the chunk, in elements.

    Attributes:
        shape, dtype: of the saved chunk.
        start_bytes, stop_bytes: of the span in the chunk.
    """

    def __init__(
        self, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, span: Span
    ) -> None:
        self._tensor = tensor.detach()
        self.shape, self.dtype = shape, dtype
        self.start_bytes = span.start * dtype.itemsize
        self.stop_bytes = span.stop * dtype.itemsize
        self._lock = threading.Lock()
        self._direct = (
            span.dense
            and tensor.is_cpu
            and tensor.dtype == dtype
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
        )
        self.start_over()

    def start_over(self) -> None:
        """Forget what was taken: the same bytes will come again, from elsewhere."""
        self._missing_bytes = self.stop_bytes - self.start_bytes
        self._scratch: torch.Tensor | None = None
        # Scratch is made when bytes are there: by then the file was seen to have as many.
        self._memory = bytes_of(self._tensor) if self._direct else None

    @property
    def tensor(self) -> torch.Tensor:
        """The box in the live state."""
        return self._tensor

    def take(self, want: Want, data: memoryview) -> None:
        """Take payload bytes ``[want.start, want.stop)``; those outside of the box are dropped."""
        start = max(want.start, self.start_bytes)
        stop = min(want.stop, self.stop_bytes)
        if start >= stop:
            return
        memory = self._memory
        if memory is None:
            memory = self._made_scratch()
        copy_bytes(memory, start - self.start_bytes, data, start - want.start, stop - start)
        with self._lock:
            self._missing_bytes -= stop - start
            done = not self._missing_bytes
        if done and self._scratch is not None:
            box = self._scratch.as_strided(self._tensor.shape, strides_of(self.shape))
            self._tensor.copy_(box)
            self._scratch = None

    def _made_scratch(self) -> memoryview:
        with self._lock:
            if self._memory is None:
                elements = (self.stop_bytes - self.start_bytes) // self.dtype.itemsize
                self._scratch = torch.empty(elements, dtype=self.dtype)
                self._memory = bytes_of(self._scratch)
            return self._memory


class BytesTarget:
    """Gathers a whole byte item."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._data: bytearray | None = None if size_bytes else bytearray()
        self._lock = threading.Lock()

    @property
    def data(self) -> bytearray:
        """The bytes, once all were taken."""
        assert self._data is not None, "no bytes were taken"
        return self._data

    def start_over(self) -> None:
        """Forget what was taken: the same bytes will come again, from elsewhere."""

    def take(self, want: Want, data: memoryview) -> None:
        """Take payload bytes ``[want.start, want.stop)``."""
        with self._lock:
            if self._data is None:  # the file was seen to have as many
                self._data = bytearray(self._size_bytes)
        self._data[want.start : want.stop] = data


Target = TensorTarget | BytesTarget
