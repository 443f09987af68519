"""One launch of the job: a small network trained on the digits, killed at a planned step."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from digits import OUTPUTS, build_fed, ordinary, read_digits, test_images
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy
from torch import nn

from dcp_checkfreq import Checkpointer
from dcp_checkfreq.data import ResumableDALILoader


@dataclass(frozen=True, slots=True)
class Launch:
    """What one process does."""

    images: Path
    folder: Path  # of this run: checkpoints and log, kept over all of its launches
    seed: int
    resumable: bool  # our iterator; else an ordinary one, which begins anew
    shuffle_seed: int  # of the ordinary one
    limit: int | None  # files to train with
    epochs: int
    batch_size: int
    save_every: int
    dies_after: int | None  # steps of this launch; then kill -9


class Network(nn.Sequential):
    """11,000 parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(24 * 16, 20), nn.ReLU(), nn.Linear(20, 10),
        )  # fmt: skip


def launch(job: Launch) -> None:
    """Train on from the newest checkpoint to the end, or until killed."""
    # stock DCP says this on every save and load in one process
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable", UserWarning)
    torch.set_num_threads(1)  # the same sums in the same order, whatever the machine does
    torch.manual_seed(job.seed)
    trained, tested = read_digits(job.images, job.limit)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9)
    loader = ResumableDALILoader(
        build_fed, OUTPUTS, trained.paths, None, job.batch_size, seed=job.seed
    )
    parts = {"model": model, "optim": optimizer}
    if job.resumable:
        parts["data"] = loader
    steps_per_epoch = len(loader)
    examined = test_images(tested), tested.classes
    root = job.folder / "checkpoints"
    done = 0
    with (
        (job.folder / "log.jsonl").open("a") as log,
        Checkpointer(root, parts, every=job.save_every) as ckpt,
    ):
        ckpt.restore()
        batches = ours(loader, job) if job.resumable else plain(trained.paths, job)
        total = job.epochs * steps_per_epoch
        while ckpt.step < total:
            batch = next(batches)
            index = batch["index"]
            loss = nn.functional.cross_entropy(model(batch["image"]), trained.classes[index])
            # half a cosine over the run: a function of the step, so it has no state
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * (1 + math.cos(math.pi * ckpt.step / total))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.after_step()
            line: dict[str, Any] = {"step": ckpt.step, "indices": index.tolist()}
            if ckpt.step % steps_per_epoch == 0:
                line |= examine(model, *examined)
            print(json.dumps(line), file=log, flush=True)
            done += 1
            if done == job.dies_after:
                ckpt.wait()  # where the next launch begins is then no matter of the disk's speed
                os.kill(os.getpid(), signal.SIGKILL)
    (job.folder / "end.json").write_text(json.dumps({"weights": digest(model), "steps": total}))


def ours(loader: ResumableDALILoader, job: Launch) -> Iterator[dict[str, Any]]:
    for _ in range(loader.epoch, job.epochs):
        yield from loader


def plain(paths: list[str], job: Launch) -> Iterator[dict[str, Any]]:
    """Begin with a first epoch, at whatever step the job is."""
    pipeline = ordinary(paths, batch_size=job.batch_size, seed=job.shuffle_seed)
    batches = DALIGenericIterator(
        [pipeline], OUTPUTS, reader_name="Files", last_batch_policy=LastBatchPolicy.PARTIAL,
        auto_reset=True,
    )  # fmt: skip
    while True:
        for (batch,) in batches:
            yield batch


@torch.no_grad()
def examine(model: nn.Module, images: torch.Tensor, classes: torch.Tensor) -> dict[str, float]:
    scores = model(images)
    right = (scores.argmax(1) == classes).double().mean().item()
    return {"accuracy": right, "loss": nn.functional.cross_entropy(scores, classes).item()}


def digest(model: nn.Module) -> str:
    together = hashlib.sha256()
    for value in model.state_dict().values():
        together.update(value.numpy().tobytes())
    return together.hexdigest()
