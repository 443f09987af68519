"""A job of Lightning, alone or under torchrun: `pl_job.py FOLDER OUT GLOBAL_BATCH LAYOUT ...`."""

import argparse
import json
import os
from pathlib import Path

import jobs
import lightning.pytorch as pl
import torch
from torch.distributed.fsdp import fully_shard

from dcp_checkfreq.data import ResumableLoader
from dcp_checkfreq.integrations import lightning as ours

SAMPLES, EPOCHS = 64, 2


class Model(pl.LightningModule):
    def __init__(self, job):
        super().__init__()
        self.job, self.losses = job, []
        self.body = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
        )

    def configure_model(self):
        if self.job.layout == "fsdp2" and not isinstance(
            self.body, torch.distributed.fsdp.FSDPModule
        ):
            fully_shard(self.body, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        optim = torch.optim.AdamW(self.parameters(), lr=0.01)
        sched = torch.optim.lr_scheduler.StepLR(optim, 3)
        return {"optimizer": optim, "lr_scheduler": {"scheduler": sched, "interval": "step"}}

    def training_step(self, batch, batch_idx):
        step = self.trainer.global_step + 1
        if step == self.job.kill:
            jobs.die(self.job.folder / "root", min(2, step // (self.job.every + 1)))
        batch = batch.float()
        numbers = batch.long().tolist()
        features = torch.stack([torch.sin(batch * k) for k in range(1, 5)], dim=1)
        loss = (self.body(features).squeeze(1) - torch.cos(batch)).square().mean()
        line = {"step": step, "samples": numbers, "pid": os.getpid()}
        with open(self.job.out / f"rank{self.global_rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        self.losses.append((step, loss.item()))
        return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("layout")
    parser.add_argument("--kill", type=int, default=0)
    parser.add_argument("--every", type=int, default=3)
    job = parser.parse_args()
    job.out.mkdir(parents=True, exist_ok=True)
    pl.seed_everything(3, verbose=False)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    strategy = {
        "alone": lambda: ours.CheckFreqSingleDevice(device="cpu"),
        "ddp": lambda: ours.CheckFreqDDP(process_group_backend="gloo"),
        "fsdp2": lambda: ours.CheckFreqModelParallel(
            data_parallel_size=world, tensor_parallel_size=1, process_group_backend="gloo"
        ),
    }[job.layout]()
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, max_epochs=EPOCHS, logger=False, strategy=strategy,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=None,
        callbacks=[ours.CheckFreqCheckpoint(job.folder / "root", every=job.every)],
    )  # fmt: skip
    rank = int(os.environ.get("RANK", "0"))
    loader = ResumableLoader(
        [float(one) for one in range(SAMPLES)], global_batch=8, seed=1, rank=rank, world_size=world
    )
    model = Model(job)
    trainer.fit(model, loader, ckpt_path="last")
    state = model.state_dict()
    full = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in state.items()}
    if rank == 0:
        torch.save({"losses": model.losses, "model": full}, job.out / "end.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
