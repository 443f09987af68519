"""Samples of memory, to notice changes that torch does not count.

A write through ``tensor.data``, numpy or DLPack raises no version. Such writes mostly change all of
a tensor or most of it (clamping, loading, averaging), so that a few places of each tell.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

SAMPLE_BYTES = 512
_PER_TENSOR = 3  # first, middle, last
_MOST = 2000  # of one snapshot: about a millisecond each time they are looked at

# With the GIL held: to ask for it again thousands of times, beside training, would take seconds.
_libc = ctypes.PyDLL(None)
_memcpy = _libc.memcpy
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy.restype = ctypes.c_void_p
_memcmp = _libc.memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


class Samples:
    """What some places of CPU tensors hold at one moment. The tensors must stay alive.

    Tensors that are not contiguous, or on a device, are left out: what lies between their elements
    may be another's, and a look at a device would wait for it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # More tensors than samples: every n-th, as whoever changes one mostly changes many.
        every = -(-len(tensors) // _MOST)
        parts = max(1, min(_PER_TENSOR, _MOST // max(1, len(tensors))))
        self._spans: list[tuple[int, int, int, int]] = []  # tensor, address, bytes, place of copy
        used = 0
        for number in range(0, len(tensors), max(1, every)):
            one = tensors[number]
            size = one.nbytes
            if not size or not one.is_cpu or not one.is_contiguous():
                continue
            begin, length = one.data_ptr(), SAMPLE_BYTES
            if size <= parts * SAMPLE_BYTES:
                self._spans.append((number, begin, size, used))
                used += size
                continue
            if parts == 1:
                self._spans.append((number, begin + (size - length) // 2, length, used))
                used += length
                continue
            apart = (size - length) // (parts - 1)
            for part in range(parts):
                self._spans.append((number, begin + part * apart, length, used))
                used += length
        self._copies = ctypes.create_string_buffer(max(1, used))
        self._begin = ctypes.addressof(self._copies)
        for _number, address, length, place in self._spans:
            _memcpy(self._begin + place, address, length)

    def first_changed(self) -> int | None:
        """Return the number of a tensor that holds something else by now; None: none was seen."""
        begin = self._begin
        for number, address, length, place in self._spans:
            if _memcmp(begin + place, address, length):
                return number
        return None
