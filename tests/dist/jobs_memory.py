"""Job: what the first line of a run says of the memory that snapshots take."""

import dataclasses
import logging

import torch
import torch.distributed as dist
from jobs import job

from dcp_checkfreq import Checkpointer, PerRank
from dcp_checkfreq.snapshot.pool import PROCESS_POOL


class Heard(logging.Handler):
    """Keeps each line, and how much memory snapshots had when it was logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.getMessage(), PROCESS_POOL.held_bytes))


@job
def the_first_line_says_what_snapshots_take(shared):
    """Rank 1 holds three times as much. Return what was forecast, said, and taken."""
    rank, log = dist.get_rank(), logging.getLogger("dcp_checkfreq")
    PROCESS_POOL.drop()
    log.setLevel(logging.INFO)
    log.addHandler(heard := Heard())
    try:
        parts = {"own": PerRank(torch.zeros((1 + 2 * rank) * (5 << 20)))}
        with Checkpointer(shared / "memory", parts, every=1, timeout_s=60) as ckpt:
            ahead = ckpt.forecast()
            for _ in range(2):
                ckpt.after_step()
                ckpt.wait()
            later = ckpt.forecast()
    finally:
        log.removeHandler(heard)
        log.setLevel(logging.NOTSET)
    lines = [line for line, _ in heard.lines if "snapshots take" in line]
    said = {"ahead": dataclasses.asdict(ahead), "is_the_same_later": later == ahead}
    return said | {"first": heard.lines[0], "lines": lines, "taken": PROCESS_POOL.held_bytes}
