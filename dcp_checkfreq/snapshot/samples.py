"""Samples of memory, to notice changes that torch does not count.

A write through ``tensor.data``, numpy or DLPack raises no version. Such writes mostly change all of
a tensor or most of it (clamping, loading, averaging), so that a few places of each tell.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence

import torch

from dcp_checkfreq.snapshot import reads

SAMPLE_BYTES = 512
_PER_TENSOR = 3  # first, middle, last
_MOST = 2000  # of one snapshot: about a millisecond each time they are looked at


def _stays(_number: int) -> bool:
    return False


class Samples:
    """What some places of CPU tensors hold at one moment.

    Their memory may be freed meanwhile: a tensor whose memory is gone has changed.

    Tensors that are not contiguous, or on a device, are left out: what lies between their elements
    may be another's, and a look at a device would wait for it.

    Args:
        tensors: to look at.
        begins: address of each one's first element.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], begins: Sequence[int]) -> None:
        # More tensors than samples: every n-th, as code that changes one mostly changes many.
        every = -(-len(tensors) // _MOST)
        parts = max(1, min(_PER_TENSOR, _MOST // max(1, len(tensors))))
        self._numbers: list[int] = []  # of the tensor, for each sample
        self._addresses: list[int] = []
        self._sizes: list[int] = []
        for number in range(0, len(tensors), max(1, every)):
            one = tensors[number]
            size = one.nbytes
            if not size or not one.is_cpu or not one.is_contiguous():
                continue
            if size <= parts * SAMPLE_BYTES:
                places: Sequence[int] = (begins[number],)
            else:
                places, size = _spread(begins[number], size, parts), SAMPLE_BYTES
            for place in places:
                self._numbers.append(number)
                self._addresses.append(place)
                self._sizes.append(size)
        self._copies = ctypes.create_string_buffer(max(1, sum(self._sizes)))
        self._read(self._copies)

    def first_changed(self, is_elsewhere: Callable[[int], bool] = _stays) -> int | None:
        """Return the number of a tensor that holds something else by now; None: none was seen.

        Args:
            is_elsewhere: tells of a tensor's number that its memory is no more the one that was
                looked at, and need not be looked at again.
        """
        now = ctypes.create_string_buffer(len(self._copies))
        if self._read(now) and now.raw == self._copies.raw:
            return None
        spans = zip(self._numbers, self._addresses, self._sizes, strict=True)
        places = itertools.accumulate(self._sizes, initial=0)
        for (number, address, size), place in zip(spans, places, strict=False):
            if is_elsewhere(number):
                continue
            found = reads.read([ctypes.addressof(now)], [address], [size], short=True)
            if found < size or now[:size] != self._copies[place : place + size]:
                return number
        return None

    def _read(self, into: ctypes.Array[ctypes.c_char]) -> bool:
        """Read all samples; tell whether all are there."""
        target = ctypes.addressof(into)
        for first in range(0, len(self._sizes), reads.MOST_SPANS):
            part = slice(first, first + reads.MOST_SPANS)
            sizes = self._sizes[part]
            total = sum(sizes)
            if reads.read([target], self._addresses[part], sizes, short=True) < total:
                return False
            target += total
        return True


def _spread(begin: int, size: int, parts: int) -> Sequence[int]:
    """Return where samples of a larger tensor begin: in its middle, or from end to end."""
    last = size - SAMPLE_BYTES
    if parts == 1:
        return (begin + last // 2,)
    return [begin + part * (last // (parts - 1)) for part in range(parts)]
