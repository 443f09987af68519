"""A small training job for `test_data_resume.py`: killed, started again.

``data_job.py <folder> <launch> <batch size> <workers>``. Each rank writes a line for each step that
it trained, before the checkpoint of that step begins: ``step epoch item:draw item:draw ...``.
"""

import hashlib
import os
import random
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from dcp_checkfreq import Checkpointer
from dcp_checkfreq.data import ResumableLoader, RNGState, seed_everything

ITEMS, EPOCHS, EVERY, SEED = 203, 3, 3, 11


class Augmented(Dataset):
    def __len__(self):
        return ITEMS

    def __getitem__(self, index):
        return index, random.random()


def random_state():
    states = repr(random.getstate()) + repr(torch.get_rng_state().tolist())
    return hashlib.sha256(states.encode()).hexdigest()[:16]


def main():
    folder, launch, batch_size, workers = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"pid-{launch}-{rank}").write_text(str(os.getpid()))
    seed_everything(SEED, rank=rank)  # DDP makes the weights the same
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = ResumableLoader(
        Augmented(), batch_size, seed=SEED, num_workers=workers,
        prefetch_factor=4 if workers else None,
    )  # fmt: skip
    parts = {"model": model, "optim": optimizer, "data": loader, "rng": RNGState(SEED)}
    log = open(folder / f"log-{launch}-{rank}", "w", buffering=1)  # noqa: SIM115
    with Checkpointer(folder / "run", parts, every=EVERY, timeout_s=60) as ckpt:
        ckpt.restore()
        print("restored", ckpt.step, random_state(), file=log)
        while (epoch := loader.epoch) < EPOCHS:
            for items, draws in loader:
                seen = torch.stack([items.float() / ITEMS, draws.float()], dim=1)
                model(seen).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                pairs = zip(items.tolist(), draws.tolist(), strict=True)
                counted = [f"{item}:{draw!r}" for item, draw in list(pairs)[: loader.valid]]
                print(ckpt.step + 1, random_state(), epoch, *counted, file=log)
                ckpt.after_step()
                time.sleep(random.random() * 0.02 * torch.rand(()).item())
    print("done", file=log)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
