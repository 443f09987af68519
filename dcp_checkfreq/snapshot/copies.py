"""Copies many tensors into host memory at the speed of the memory bus."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence

import torch

from dcp_checkfreq.crew import Crew

_THREADS = 2  # they saturate the memory bus of the machines tried; more take cores from training
_IN_THREADS_FROM_BYTES = 16 << 20
_SPAN_BYTES = 16 << 20  # one call, without the GIL

Span = tuple[int, int, int]  # target address, source address, bytes


def copy_tensors(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> bool:
    """Copy each source into the plain CPU target of the same shape and dtype.

    Plain CPU memory goes by memmove in threads of our own: torch's copy splits every single tensor
    over its thread pool and waits for it, which costs more than the copy once the cores are busy
    with training. Device tensors are queued on the current stream.

    Returns:
        Whether copies are queued on a device: the caller has to synchronise with its stream.
    """
    spans: list[Span] = []
    queued = False
    for source, target in zip(sources, targets, strict=True):
        if source.nbytes != target.nbytes:
            raise ValueError(f"{source.nbytes} bytes do not fit into {target.nbytes}")
        if source.is_cpu and source.is_contiguous() and not (source.is_conj() or source.is_neg()):
            spans += _cut(target.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            target.copy_(source, non_blocking=True)
            queued |= not source.is_cpu
    shares = _shares(spans)
    if len(shares) == 1:
        _move(shares[0])
    else:
        _CREW.run_all([functools.partial(_move, share) for share in shares])
    return queued


# Threads that stay: starting one waits for it to run, while training is to go on.
_CREW = Crew(_THREADS - 1, "checkfreq-copy")  # the caller is one of them


def _cut(target: int, source: int, size: int) -> Iterator[Span]:
    for start in range(0, size, _SPAN_BYTES):
        yield target + start, source + start, min(_SPAN_BYTES, size - start)


def _shares(spans: Sequence[Span]) -> list[Sequence[Span]]:
    """Split the spans into neighbouring shares of about the same number of bytes."""
    total = sum(size for _, _, size in spans)
    if total < _IN_THREADS_FROM_BYTES:
        return [spans]
    shares: list[list[Span]] = [[] for _ in range(_THREADS)]
    done = 0
    for span in spans:
        shares[min(done * _THREADS // total, _THREADS - 1)].append(span)
        done += span[2]
    return list(shares)


def _move(spans: Sequence[Span]) -> None:
    for target, source, size in spans:
        ctypes.memmove(target, source, size)
