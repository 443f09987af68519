"""Jobs: `Checkpointer` with FSDP2 and DDP, and process mode."""

import contextlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import caught, job, reference
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_checkfreq import (
    CheckFreqReader,
    CheckFreqWriter,
    Checkpointer,
    PerRank,
    find_latest_valid,
)

# --- Checkpointer with FSDP2 and DDP ---


def new_model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train(model, optimizer, first, steps):
    for step in range(first, first + steps):
        torch.manual_seed(step)
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def full(model):
    return [
        (p.full_tensor() if isinstance(p, DTensor) else p.detach()).clone()
        for p in model.parameters()
    ]


def sharded(seed):
    model = new_model(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


@job
def train_fsdp(shared):
    model, optimizer = sharded(1)
    parts = {
        "model": model,
        "optim": optimizer,
        "sched": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        "own": PerRank({"rank": dist.get_rank()}),
        "note": "n",
    }
    with Checkpointer(shared / "fsdp", parts, every=3) as ckpt:
        ckpt.restore()
        for step in range(1, 7):
            train(model, optimizer, step, 1)
            parts["sched"].step()
            ckpt.after_step()
    weights = full(model)
    if dist.get_rank() == 0:
        torch.save(weights, shared / "fsdp_at_6.pt")
    train(model, optimizer, 7, 3)
    weights = full(model)
    if dist.get_rank() == 0:
        torch.save(weights, shared / "fsdp_at_9.pt")


@job
def resume_fsdp(shared):
    model, optimizer = sharded(77)
    parts = {
        "model": model,
        "optim": optimizer,
        "sched": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        "own": PerRank({"rank": -1}),
        "note": "",
    }
    with Checkpointer(shared / "fsdp", parts, every=1000) as ckpt:
        restored = ckpt.restore()
    at_restore = all(map(torch.equal, full(model), torch.load(shared / "fsdp_at_6.pt")))
    train(model, optimizer, 7, 3)
    later = torch.load(shared / "fsdp_at_9.pt")
    close = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(full(model), later, strict=True))
    return {
        "step": restored.step,
        "world": restored.world_size,
        "bits": at_restore,
        "close": close,
        "own": parts["own"].value["rank"],
        "note": parts["note"],
        "lr": optimizer.param_groups[0]["lr"],
        "milestones": sorted(map(str, parts["sched"].milestones)),
    }


@job
def train_ddp(shared):
    model = nn.parallel.DistributedDataParallel(new_model(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with Checkpointer(shared / "ddp", {"model": model, "optim": optimizer}, every=2) as ckpt:
        ckpt.restore()
        for step in range(1, 3):
            train(model, optimizer, step, 1)
            ckpt.after_step()
    if dist.get_rank() == 0:
        torch.save(full(model), shared / "ddp.pt")
    keys = set(
        CheckFreqReader(shared / "ddp" / "step_00000002").read_metadata().state_dict_metadata
    )
    return sorted(keys)[:3]


@job
def resume_ddp(shared):
    model = nn.parallel.DistributedDataParallel(new_model(9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with Checkpointer(shared / "ddp", {"model": model, "optim": optimizer}, every=2) as ckpt:
        restored = ckpt.restore()
    return [restored.step, all(map(torch.equal, full(model), torch.load(shared / "ddp.pt")))]


@job
def per_rank_values(shared):
    rank = dist.get_rank()
    root = shared / "per_rank"
    parts = {"pos": PerRank(100 + rank), "seed": PerRank({"a": torch.tensor(rank)})}
    with Checkpointer(root, parts, every=1) as ckpt:
        if (root / "step_00000001").exists():
            ckpt.restore()
        else:
            ckpt.after_step()
    return [parts["pos"].value, int(parts["seed"].value["a"])]


@job
def read_per_rank_values(shared):
    rank = dist.get_rank()
    parts = {"pos": PerRank(-rank - 1), "seed": PerRank({"a": torch.tensor(-1)})}
    with Checkpointer(shared / "per_rank", parts, every=1) as ckpt:
        ckpt.restore()
    return [parts["pos"].value, int(parts["seed"].value["a"])]


@job
def plain_value_that_differs(shared):
    parts = {"seed": 1000 + dist.get_rank()}
    with contextlib.suppress(Exception), Checkpointer(shared / "plain", parts, every=1) as ckpt:
        return caught(lambda: ckpt.save(wait=True))


@job
def replicas_that_drift_apart(shared):
    """The first save compares large tensors, later ones only when they are asked to."""
    parts = {"w": torch.ones(10_000)}  # smaller ones are part of a byte item
    said = []
    with contextlib.suppress(Exception), Checkpointer(shared / "drift", parts, every=1000) as ckpt:
        for step, options in enumerate([{}, {}, {"check_replicas": True}, {}], start=1):
            ckpt.after_step(step)
            said.append(caught(lambda options=options: ckpt.save(wait=True, **options)))
            parts["w"].fill_(dist.get_rank())
    return said


@job
def saves_beside_collectives(shared):
    """Every step does collectives on the default group while saves run in the background."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = sharded(3)
    bad = 0
    parts = {"model": model, "optim": optimizer}
    with Checkpointer(shared / "beside", parts, every=1, keep_last=2) as ckpt:
        for step in range(1, 13):
            train(model, optimizer, step, 1)
            ckpt.after_step()
            for number in range(10):
                value = torch.tensor([float(number + rank)])
                dist.all_reduce(value)
                bad += value.item() != number * world + sum(range(world))
    names = sorted(path.name for path in (shared / "beside").glob("step_*"))
    return {"bad": bad, "saved": ckpt.last_saved_step, "steps": names}


@job
def abandoned_branch(shared):
    root = shared / "branch"
    with Checkpointer(root, {"x": PerRank(0), "y": 0}, every=1, keep_last=9) as ckpt:
        ckpt.restore()
        for _ in range(5):
            ckpt.after_step()
    parts = {"x": PerRank(0), "y": 0}
    with Checkpointer(root, parts, every=1, keep_last=9) as ckpt:
        back = ckpt.restore(2).step
        parts["y"] = 33
        ckpt.after_step()
    found = find_latest_valid(root)
    parts = {"x": PerRank(0), "y": 0}
    with Checkpointer(root, parts, every=1) as ckpt:
        restored = ckpt.restore()
    return [back, found.step, restored.step, parts["y"]]


@job
def left_behind(shared):
    root = shared / "left"
    options = {"every": 1, "on_error": "raise", "preempt_signals": ()}
    answers = []
    with Checkpointer(root, {"x": PerRank(0), "y": 0}, **options) as old:
        old.restore()
        for _ in range(2):
            old.after_step()
        old.wait()
        with Checkpointer(root, {"x": PerRank(0), "y": 0}, **options) as new:
            new.restore(1)
            new.after_step()
            new.wait()
            run_ids = {old._run_history._lineage.run_id, new._run_history._lineage.run_id}
        for _ in range(2):
            old.after_step()
            answers.append(caught(old.wait))
    return [answers, sorted(run_ids)]


@job
def damage_that_one_rank_reads(shared):
    rank = dist.get_rank()
    root = shared / "damaged"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def model_of(value):
        layer = nn.Linear(64, 4096, bias=False)
        nn.init.constant_(layer.weight, value)
        fully_shard(layer, mesh=mesh)
        return layer

    for value in (1.0, 2.0):
        with Checkpointer(root, {"m": model_of(value)}, every=1) as ckpt:
            ckpt.restore()
            ckpt._state._parts["m"] = model_of(value)
            ckpt.after_step()
    dist.barrier()
    if rank == 0:
        (shard,) = (root / "step_00000002").glob("__1_*.distcp")
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    dist.barrier()
    model = model_of(-1.0)
    with Checkpointer(root, {"m": model}, every=1) as ckpt:
        restored = ckpt.restore()
    weight = model.weight.full_tensor()
    return [restored.step, len(restored.passed_over), weight.unique().tolist()]


# --- process mode ---


@job
def process_mode(shared):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(reference((64, 8)), mesh, [Shard(0)])
    right = []
    for step in (1, 2):
        future = dcp.async_save(
            {"w": weight, "v": torch.arange(1000)[10:20] * step, "note": {"step": step}},
            storage_writer=CheckFreqWriter(shared / "process" / f"step_{step}"),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        future.result()
        weight.to_local().add_(1000)
    for step in (1, 2):
        target = {
            "w": distribute_tensor(torch.zeros(64, 8), mesh, [Shard(0)]),
            "v": torch.zeros(10, dtype=torch.int64),
            "note": {"step": None},
        }
        dcp.load(target, storage_reader=CheckFreqReader(shared / "process" / f"step_{step}"))
        wanted = reference((64, 8)) + 1000 * (step - 1)
        right.append(torch.equal(target["w"].full_tensor(), wanted))
        right.append(torch.equal(target["v"], torch.arange(1000)[10:20] * step))
        right.append(target["note"] == {"step": step})
    again = caught(
        lambda: dcp.async_save(
            {"w": weight},
            storage_writer=CheckFreqWriter(shared / "process" / "step_2"),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        ).result()
    )
    return {"right": right, "again": again}
