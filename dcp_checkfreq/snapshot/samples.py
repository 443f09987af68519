"""Samples of memory, to notice changes that torch does not count.

A write through ``tensor.data``, numpy or DLPack raises no version. Such writes mostly change all of
a tensor or most of it (clamping, loading, averaging), so that a few places of each tell.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from dcp_checkfreq.snapshot import reads

SAMPLE_BYTES = 512
_PER_TENSOR = 3  # first, middle, last
_MOST = 2000  # of one snapshot: about a millisecond each time they are looked at

_Sample = tuple[int, int, int, int]  # tensor, address, bytes, place of the copy


def _stays(_number: int) -> bool:
    return False


class Samples:
    """What some places of CPU tensors hold at one moment.

    Their memory may be freed meanwhile: a tensor whose memory is gone has changed.

    Tensors that are not contiguous, or on a device, are left out: what lies between their elements
    may be another's, and a look at a device would wait for it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # More tensors than samples: every n-th, as whoever changes one mostly changes many.
        every = -(-len(tensors) // _MOST)
        parts = max(1, min(_PER_TENSOR, _MOST // max(1, len(tensors))))
        self._spans: list[_Sample] = []
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
        self._size = used
        self._copies = ctypes.create_string_buffer(max(1, used))
        self._read(self._spans, self._copies)

    def first_changed(self, is_elsewhere: Callable[[int], bool] = _stays) -> int | None:
        """Return the number of a tensor that holds something else by now; None: none was seen.

        Args:
            is_elsewhere: tells of a tensor's number that its memory is no more the one that was
                looked at, and need not be looked at again.
        """
        now = ctypes.create_string_buffer(max(1, self._size))
        if self._read(self._spans, now) and _same(now, self._copies, 0, self._size):
            return None
        for span in self._spans:
            number, _address, length, place = span
            if is_elsewhere(number):
                continue
            if not self._read([span], now) or not _same(now, self._copies, place, length):
                return number
        return None

    @staticmethod
    def _read(spans: Sequence[_Sample], into: ctypes.Array[ctypes.c_char]) -> bool:
        begin = ctypes.addressof(into)
        for first in range(0, len(spans), reads.MOST_SPANS):
            part = spans[first : first + reads.MOST_SPANS]
            _numbers, addresses, sizes, places = zip(*part, strict=True)
            targets = [begin + place for place in places]
            if reads.read(targets, addresses, sizes, short=True) < sum(sizes):
                return False
        return True


def _same(
    one: ctypes.Array[ctypes.c_char], other: ctypes.Array[ctypes.c_char], place: int, size: int
) -> bool:
    views = (memoryview(both)[place : place + size] for both in (one, other))
    return bytes(next(views)) == bytes(next(views))
