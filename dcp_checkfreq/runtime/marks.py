"""Moments in a training loop: on the host's clock, or on a GPU's, which the host runs ahead of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dcp_checkfreq.runtime.clock import Clock

Mark = Any  # a moment: seconds, or a CUDA event
MarkPair = tuple[Mark, Mark]


def marker(clock: Clock, gpu: torch.device | None) -> Callable[[], Mark]:
    """Return what makes a mark of now: on this GPU's training stream, or without one by a clock."""
    return clock.monotonic_s if gpu is None else functools.partial(_gpu_mark, gpu)


def _gpu_mark(device: torch.device) -> Mark:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(begun: Mark, ended: Mark) -> float | None:
    """Return how long that was; None if the GPU is not there yet: waiting would stop the host."""
    if isinstance(begun, (int, float)):
        return float(ended - begun)
    return begun.elapsed_time(ended) / 1000 if begun.query() and ended.query() else None


def sum_of(spans: list[MarkPair]) -> float:
    """Return how long these were together, as far as is known."""
    return sum(seconds_between(begun, ended) or 0.0 for begun, ended in spans)
