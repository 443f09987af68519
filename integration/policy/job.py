"""A `SimJob` as a process of its own, alone or as a rank under torchrun: ``job.py SPEC.json``.

It restores, trains to the end, and writes what it did into ``<journal>/rank<r>.jsonl``, one line
per step before the step can be saved. Times are of the machine's monotonic clock, which all
processes share. Nothing in here knows of kills.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sim import SimJob, SimSpec

from dcp_checkfreq import Checkpointer, find_latest_valid

MODES = ("auto", "epoch")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What to train, and how to save: at the chosen interval, or in the loop at the epoch's end."""

    mode: str
    root: str
    journal: str
    steps: int
    steps_per_epoch: int
    max_overhead: float
    sim: dict[str, Any]

    def dump(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> JobSpec:
        return JobSpec(**json.loads(path.read_text()))


def main(spec_path: str) -> None:
    spec = JobSpec.read(Path(spec_path))
    # stock DCP says this on every load in one process
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable", UserWarning)
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks > 1 else 0
    with Path(spec.journal, f"rank{rank}.jsonl").open("a", buffering=1) as file:

        def write(**fields: Any) -> None:  # a line that is written outlives the process
            file.write(json.dumps({**fields, "at_s": time.monotonic()}) + "\n")

        write(pid=os.getpid())
        train(spec, SimJob(SimSpec(**spec.sim), ranks=ranks), write)
    if ranks > 1:
        dist.destroy_process_group()


def train(spec: JobSpec, job: SimJob, write: Any) -> None:
    # Timed apart from the restore, which looks for itself once more.
    began_s = time.monotonic()
    find_latest_valid(spec.root) if Path(spec.root).exists() else None
    find_s = time.monotonic() - began_s
    options: dict[str, Any] = (
        {"max_overhead": spec.max_overhead, "steps_per_epoch": spec.steps_per_epoch}
        if spec.mode == "auto"
        else {"every": spec.steps_per_epoch, "snapshot": "blocking"}
    )
    with Checkpointer(spec.root, job.state, **options) as ckpt:
        write(ready=True)
        restored = ckpt.restore()
        if restored is not None:
            job.check_whole(restored.step)
        write(
            restored=restored.step if restored else None,
            find_s=find_s,
            restore_s=restored.seconds if restored else 0.0,
        )

        def after() -> None:
            write(
                step=ckpt.step + 1,
                loss=job.loss,
                interval_steps=ckpt.interval_steps,
                last_saved=ckpt.last_saved_step,
            )
            ckpt.after_step()
            if spec.mode == "epoch" and ckpt.step % spec.steps_per_epoch == 0:
                ckpt.wait()  # the loop stands still until the checkpoint is there

        while ckpt.step < spec.steps:
            job.iterate(after)
    job.check_whole(spec.steps)
    write(finished=True, loss=job.loss)


if __name__ == "__main__":
    main(sys.argv[1])
