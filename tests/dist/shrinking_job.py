"""A training job for `test_elastic_shrinks.py`: each attempt on as many ranks as there are.

`torchrun ... shrinking_job.py FOLDER`. A rank writes one line for each step, before the checkpoint
of that step begins: ``step epoch item item ...``.
"""

import datetime
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from dcp_checkfreq import Checkpointer, elastic
from dcp_checkfreq.data import ResumableLoader

ITEMS, EPOCHS, SEED, TIMEOUT_S = 101, 4, 5, 20
STEP_S = 0.05  # what a step takes, so that there is a middle to be killed in


def main():
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    elastic.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    optim = torch.optim.AdamW(model.parameters())
    loader = ResumableLoader(TensorDataset(torch.arange(ITEMS)), global_batch=4, seed=SEED)
    parts = {"model": model, "optim": optim, "data": loader}
    name = f"{time.time_ns()} {world_size} {rank} {os.getpid()}"
    with (
        open(folder / name, "w", buffering=1) as log,
        Checkpointer(folder / "root", parts, every=3, timeout_s=TIMEOUT_S) as ckpt,
    ):
        ckpt.restore()
        print(ckpt.step, file=log)
        while (epoch := loader.epoch) < EPOCHS:
            for (items,) in loader:
                model(items.float()[:, None]).square().mean().backward()
                optim.step()
                optim.zero_grad()
                print(ckpt.step + 1, epoch, *items[: loader.valid].tolist(), file=log)
                time.sleep(STEP_S)
                ckpt.after_step()
        print("done", file=log)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
