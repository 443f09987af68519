"""A job for `test_stream_kills.py`: run on ranks, killed, started again on others.

``shard_job.py <folder> <launch> <kind> <batch size> <workers> <hold>``. Each rank writes a line
for each step that it trained, before the checkpoint of that step begins: ``step epoch item ...``.
After ``hold`` steps (0: never) it waits to be killed, however busy the machine is.
"""

import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dcp_checkfreq import Checkpointer
from dcp_checkfreq.data import (
    ParquetSource,
    ResumableParquetLoader,
    ResumableStreamLoader,
    ShardSource,
    TarReader,
)

ITEMS, EPOCHS, EVERY, SEED = 203, 2, 3, 11


def number_of(sample):
    return {"id": int(sample["json"])}


def loader_of(kind, folder, batch_size, workers):
    options = {"seed": SEED, "num_workers": workers}
    if kind == "parquet":
        return ResumableParquetLoader(ParquetSource(folder, lanes=12), batch_size, **options)
    source = ShardSource(f"{folder}/*.tar", TarReader(), index=folder / "index", lanes=12, window=5)
    return ResumableStreamLoader(source, batch_size, transform=number_of, **options)


def main():
    folder, launch, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    batch_size, workers, hold = map(int, sys.argv[4:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"pid-{launch}-{rank}").write_text(str(os.getpid()))
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = loader_of(kind, folder / "data", batch_size, workers)
    parts = {"model": model, "optim": optimizer, "data": loader}
    log = open(folder / f"log-{launch}-{rank}", "w", buffering=1)  # noqa: SIM115
    with Checkpointer(folder / "run", parts, every=EVERY, timeout_s=60) as ckpt:
        ckpt.restore()
        until = ckpt.step + hold
        print("restored", ckpt.step, file=log)
        while (epoch := loader.epoch) < EPOCHS:
            for batch in loader:
                items = batch["id"]
                model(items.float()[:, None] / ITEMS).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                print(ckpt.step + 1, epoch, *items[: loader.valid].tolist(), file=log)
                ckpt.after_step()
                time.sleep(600 if hold and ckpt.step >= until else 0.01)
    print("done", file=log)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
