"""A loop of accelerate's, with prepared parts registered, or `save_state` through the drop-in."""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType, set_seed

from dcp_checkfreq import Checkpointer, dropin
from dcp_checkfreq.data import ResumableIterator, ResumableLoader, RNGState

SAMPLES, EPOCHS = 32, 2


def full(tensors):
    whole = [getattr(one, "full_tensor", lambda one=one: one)() for one in tensors]
    return [one.flatten().tolist() for one in whole]


def digest(model):
    return full(model.state_dict().values())


def moments(optimizer):
    return full(one for of in optimizer.state.values() for one in of.values())


def made():
    set_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    return model, optimizer, schedule


def registered(job):
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=job.accumulate,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=job.dispatch),
    )
    numbers = torch.arange(SAMPLES, dtype=torch.float32)
    data = torch.utils.data.TensorDataset(torch.stack([numbers, numbers.sin()], 1))
    ranks = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
    if job.by_position:
        size = job.per_rank * accelerator.num_processes
        loader = ResumableLoader(data, global_batch=size, seed=1, **ranks)
    else:
        loader = torch.utils.data.DataLoader(data, batch_size=job.per_rank, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(*made(), loader)
    batches = loader if job.by_position else ResumableIterator(loader)
    parts = {"model": model, "optim": optimizer, "sched": schedule}
    parts |= {"data": batches, "rng": RNGState(seed=3), "epoch": 0}
    with Checkpointer(job.folder / "root", parts, every=3) as ckpt:
        ckpt.restore()
        step = ckpt.step
        while parts["epoch"] < EPOCHS:
            for (batch,) in batches:
                if step + 1 == job.kill:
                    ckpt.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
                with accelerator.accumulate(model):
                    loss = (model(batch) - batch[:, 1:]).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                line = {
                    "step": step + 1,
                    "samples": batch[:, 0].int().tolist(),
                    "pid": os.getpid(),
                    "said": [loss.item(), *schedule.get_last_lr()],
                }
                with open(job.out / f"rank{accelerator.process_index}.jsonl", "a") as file:
                    file.write(json.dumps(line) + "\n")
                if accelerator.sync_gradients:
                    step += 1
                    ckpt.after_step()
            parts["epoch"] += 1
    end = {"model": digest(model)}
    torch.save(end, job.out / f"end{accelerator.process_index}.pt")
    accelerator.end_training()


def saved_state(job):
    """Save, train on, load, and find what was saved."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="no_wrap"
    )
    if "RANK" not in os.environ:  # one rank, without torchrun
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # accelerate shards on GPUs only, although torch does it with gloo as well
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    with dropin.install():
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model, optimizer, schedule = accelerator.prepare(*made())

        def step():
            accelerator.backward(model(torch.ones(4, 2)).square().mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

        folder = job.folder / "state"
        if not job.load:
            step()
            accelerator.save_state(str(folder))
        else:
            accelerator.load_state(str(folder))
        at_save = digest(model), moments(optimizer)
        # the second step: the same random numbers, moments and rate, or it is another one
        step()
    end = {"at save": at_save, "model": digest(model), "rate": schedule.get_last_lr()}
    torch.save(end, job.out / f"end{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    if job.kill and not job.load:
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("per_rank", type=int)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--dispatch", action="store_true")
    parser.add_argument("--by-position", action="store_true", help="a ResumableLoader")
    parser.add_argument("--kill", type=int, default=0)
    parser.add_argument("--state", action="store_true", help="save_state through the drop-in")
    parser.add_argument("--load", action="store_true")
    job = parser.parse_args()
    job.out.mkdir(parents=True, exist_ok=True)
    (saved_state if job.state else registered)(job)


if __name__ == "__main__":
    main()
