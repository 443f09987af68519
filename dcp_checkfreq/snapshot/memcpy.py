"""Copies many tensors into host memory at the speed of the memory bus."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from dcp_checkfreq.runtime.crew import Crew
from dcp_checkfreq.snapshot import reads

_THREADS = 2  # they saturate the memory bus of the machines tried; more take cores from training
_IN_THREADS_FROM_BYTES = 16 << 20
_SPAN_BYTES = 16 << 20  # one call, without the GIL


class Moved(Exception):
    """The memory of a source is not where it was: it was freed, or another one was taken.

    Attributes:
        number: of the source.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Range(NamedTuple):
    target: int  # address
    source: int  # address
    size_bytes: int
    number: int  # of the source


def copy_tensors(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], begins: Sequence[int]
) -> bool:
    """Copy each source into the plain CPU target of the same shape and dtype.

    CPU memory is copied in threads of our own: torch's copy splits every single tensor over its
    thread pool and waits for it, which costs more than the copy once the cores are busy with
    training. Device tensors are queued on the current stream.

    Args:
        sources: their CPU memory may be freed meanwhile.
        targets: nobody else writes there.
        begins: address of each source's first element, when its memory was still what to copy.

    Returns:
        Whether copies are queued on a device: the caller has to synchronise with its stream.

    Raises:
        Moved: the memory of a source was freed or replaced before it was copied.
    """
    spans: list[_Range] = []
    queued = False
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source.nbytes != target.nbytes:
            raise ValueError(f"{source.nbytes} bytes do not fit into {target.nbytes}")
        if not source.is_cpu:
            target.copy_(source, non_blocking=True)
            queued = True
        elif source.is_contiguous() and not (source.is_conj() or source.is_neg()):
            spans += _cut(target.data_ptr(), begins[number], source.nbytes, number)
        else:
            _copy_strided(number, sources, target, begins)
    shares = _shares(spans)
    if len(shares) == 1:
        _move(shares[0], sources, begins)
    else:
        _CREW.run_all([functools.partial(_move, share, sources, begins) for share in shares])
    return queued


# Threads that stay: starting one waits for it to run, while training is to go on.
_CREW = Crew(_THREADS - 1, "checkfreq-copy")  # the caller is one of them


def _cut(target: int, source: int, size: int, number: int) -> Iterator[_Range]:
    for start in range(0, size, _SPAN_BYTES):
        yield _Range(target + start, source + start, min(_SPAN_BYTES, size - start), number)


def _shares(spans: Sequence[_Range]) -> list[Sequence[_Range]]:
    """Split the spans into neighbouring shares of about the same number of bytes."""
    total = sum(span.size_bytes for span in spans)
    if total < _IN_THREADS_FROM_BYTES:
        return [spans]
    shares: list[list[_Range]] = [[] for _ in range(_THREADS)]
    done = 0
    for span in spans:
        shares[min(done * _THREADS // total, _THREADS - 1)].append(span)
        done += span.size_bytes
    return list(shares)


def _move(spans: Sequence[_Range], sources: Sequence[torch.Tensor], begins: Sequence[int]) -> None:
    for group in _groups(spans):
        # Before and after: what was freed in between may be there again, with other bytes in it.
        _check(group, sources, begins)
        targets, addresses, sizes, numbers = zip(*group, strict=True)
        done = reads.read(targets, addresses, sizes)
        _check(group, sources, begins)
        for size, number in zip(sizes, numbers, strict=True):
            done -= size
            if done < 0:
                raise Moved(number)


def _groups(spans: Sequence[_Range]) -> Iterator[list[_Range]]:
    """Split spans into what is copied in one call: each waits for the GIL once."""
    group: list[_Range] = []
    size = 0
    for span in spans:
        if group and (size + span.size_bytes > _SPAN_BYTES or len(group) == reads.MOST_SPANS):
            yield group
            group, size = [], 0
        group.append(span)
        size += span.size_bytes
    if group:
        yield group


def _check(group: Sequence[_Range], sources: Sequence[torch.Tensor], begins: Sequence[int]) -> None:
    for span in group:
        if sources[span.number].data_ptr() != begins[span.number]:
            raise Moved(span.number)


def _copy_strided(
    number: int, sources: Sequence[torch.Tensor], target: torch.Tensor, begins: Sequence[int]
) -> None:
    """Copy a tensor that is not contiguous, piece by piece: torch must not read what may go."""
    source = sources[number]
    if not source.dim():
        source, target = source.unsqueeze(0), target.unsqueeze(0)
    if not source.nbytes:
        return
    sizes, strides, element = source.shape, source.stride(), source.element_size()
    along = max(range(source.dim()), key=lambda dim: strides[dim] if sizes[dim] > 1 else -1)
    rows = max(1, _SPAN_BYTES // max(1, strides[along] * element))
    for start in range(0, sizes[along], rows):
        length = min(rows, sizes[along] - start)
        shape = [length if dim == along else size for dim, size in enumerate(sizes)]
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        extent = torch.empty(last + 1, dtype=source.dtype)
        address = begins[number] + start * strides[along] * element
        spans = list(_cut(extent.data_ptr(), address, extent.nbytes, number))
        _move(spans, sources, begins)
        part = extent.as_strided(shape, strides)
        part = part.conj() if source.is_conj() else part
        target.narrow(along, start, length).copy_(part.neg() if source.is_neg() else part)
