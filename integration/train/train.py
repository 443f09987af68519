"""One rank of the main job: a byte-level GPT with AdamW and FSDP2 on CPU. Run it with torchrun.

Each rank appends what it did to ``<journal>/rank<r>.jsonl``: a line on the start, one per step
(before the step can be saved, so every saved step is in the journal of every rank), and one at the
end. The journal is how the driver knows what happened; nothing in here knows of kills.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import Position, Windows
from gpt import GPT
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcp_checkfreq import Checkpointer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True, help="where the checkpoints go")
    parser.add_argument("--journal", required=True, type=Path, help="folder for what each rank did")
    parser.add_argument("--steps", type=int, required=True, help="train up to this step")
    parser.add_argument("--every", type=int, required=True, help="save every so many steps")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--length", type=int, default=64, help="bytes in one sample")
    parser.add_argument("--samples", type=int, default=200, help="samples in one epoch")
    parser.add_argument("--batch", type=int, default=12, help="samples in one step, over all ranks")
    parser.add_argument("--rate", type=float, default=3e-4, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # its filling of new memory only helps to find bugs, and costs a sixth of a step here
    torch.utils.deterministic.fill_uninitialized_memory = False
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    model = GPT(
        layers=args.layers, width=args.width, heads=args.heads, length=args.length, seed=args.seed
    )
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine(args.steps))
    windows = Windows(args.samples, args.length)
    position = Position(args.samples, seed=args.seed)

    state = {"model": model, "optim": optimizer, "sched": schedule, "data": position}
    journal = Journal(args.journal, rank)
    with Checkpointer(args.root, state, every=args.every) as ckpt:
        restored = ckpt.restore()
        journal.write(
            ranks=ranks,
            restored=restored.step if restored else None,
            restore_s=restored.seconds if restored else 0.0,
            position=position.state_dict(),
        )
        for step in range(ckpt.step + 1, args.steps + 1):
            samples = position.take(args.batch, rank=rank, ranks=ranks)
            started_s = time.perf_counter()
            loss = train_step(model, optimizer, windows.batch(samples), args.batch)
            schedule.step()
            step_s = time.perf_counter() - started_s
            journal.write(
                step=step, loss=loss, ids=[astuple(one) for one in samples], step_s=step_s
            )
            ckpt.after_step()
        journal.write(finished=True, **digests(model, optimizer))
    journal.close()
    dist.destroy_process_group()


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    global_batch: int,
) -> float:
    """Train on one global batch and return its mean loss, the same number on every rank."""
    tokens, targets = batch
    logits = model(tokens)
    per_byte = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    share = per_byte.view_as(targets).mean(dim=1).sum() / global_batch
    # FSDP2 averages gradients over the ranks; times their number that is the sum, so the step is
    # that of the global batch, however many ranks share it
    (share * dist.get_world_size()).backward()
    optimizer.step()
    optimizer.zero_grad()
    total = share.detach().double()
    dist.all_reduce(total)
    return float(total)


def warmup_then_cosine(steps: int, warmup: int = 10) -> Any:
    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return factor


def digests(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return SHA-256 of the whole parameters and of the whole optimizer state (on rank 0 only)."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=whole)
    if dist.get_rank():
        return {}
    return {
        "parameters": sum(value.numel() for value in model_state.values()),
        "model_sha256": digest(model_state),
        "optimizer_sha256": digest(optimizer_state),
    }


def digest(tree: dict[str, Any]) -> str:
    hasher = hashlib.sha256()
    for path, value in leaves(tree):
        hasher.update(f"{path}:".encode())
        if isinstance(value, torch.Tensor):
            hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
            hasher.update(value.detach().contiguous().flatten().view(torch.uint8).numpy())
        else:
            hasher.update(repr(value).encode())
    return hasher.hexdigest()


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key in sorted(tree):
            yield from leaves(tree[key], f"{path}/{key}")
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from leaves(value, f"{path}/{number}")
    else:
        yield path, tree


class Journal:
    """JSON lines. A line that `write` has returned from outlives the process."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank{rank}.jsonl").open("a", buffering=1)
        self.write(pid=os.getpid())

    def write(self, **fields: Any) -> None:
        self._file.write(json.dumps(fields) + "\n")

    def close(self) -> None:
        self._file.close()


if __name__ == "__main__":
    main()
