"""The jobs of the distributed tests. Run by `launch.start`; each job is called on all ranks."""

import concurrent.futures
import contextlib
import datetime
import errno
import json
import os
import signal
import sys
import threading
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_checkfreq import (
    CheckFreqLoadPlanner,
    CheckFreqReader,
    CheckFreqSavePlanner,
    CheckFreqWriter,
    Checkpointer,
    PerRank,
    find_latest_valid,
)
from dcp_checkfreq.storage.local import LocalTier
from dcp_checkfreq.testing import Fault, FaultyTier, ForwardingTier, GatedTier

JOBS = {}
DEADLY = {"one_rank_is_killed", "checkpointer_loses_a_rank"}  # collectives fail after these


def job(function):
    JOBS[function.__name__] = function
    return function


def reference(shape, start=1):
    count = int(torch.tensor(shape).prod())
    return torch.arange(start, start + count, dtype=torch.float32).reshape(shape)


def caught(action):
    """Return class name and text of the error of ``action``, without DCP's wrapper, or None."""
    try:
        action()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        return [type(cause).__name__, str(cause), rank]
    except Exception as error:  # noqa: BLE001  the tests look at it
        return [type(error).__name__, str(error), dist.get_rank()]
    return None


# --- resharding ---

SHAPES = {"d5": (5, 3), "d1": (1, 7), "d6": (6,), "d0": (0, 4), "one": (1,), "d9": (9, 8, 3)}
BIG = (2048, 1024)  # 8 MiB


def shard_state(filled):
    """Return DTensors of every shape under every sharding that this world can have."""
    world = dist.get_world_size()
    meshes = {"flat": init_device_mesh("cpu", (world,))}
    placements = {
        "flat": {"s0": [Shard(0)], "s1": [Shard(1)], "rep": [Replicate()]},
    }
    if world % 2 == 0:
        meshes["grid"] = init_device_mesh("cpu", (2, world // 2))
        placements["grid"] = {
            "s01": [Shard(0), Shard(1)],
            "hsdp": [Replicate(), Shard(0)],
            "s0r": [Shard(0), Replicate()],
        }
    return meshes, placements


SAVED = [(name, "flat", kind) for name in SHAPES for kind in ("s0", "s1", "rep")]
SAVED += [(name, "grid", kind) for name in SHAPES for kind in ("s01", "hsdp", "s0r")]


def tensor_of(name, mesh, placement, filled):
    shape = SHAPES[name]
    if any(isinstance(p, Shard) and p.dim >= len(shape) for p in placement):
        placement = [Replicate()] * len(placement)
    full = reference(shape) if filled else torch.zeros(shape)
    return distribute_tensor(full, mesh, placement)


def save_shards_as(folder, planner=None, mode="sync"):
    meshes, placements = shard_state(True)
    state = {
        f"{name}_{mesh}_{kind}": tensor_of(name, meshes[mesh], placements[mesh][kind], True)
        for name, mesh, kind in SAVED
        if mesh in meshes
    }
    state["plain"] = reference((11, 3))
    state["note"] = {"a": [1, "x"]}
    writer = CheckFreqWriter(folder)
    if mode == "sync":
        dcp.save(state, storage_writer=writer, planner=planner)
    else:
        dcp.async_save(state, storage_writer=writer, planner=planner).result()


@job
def save_shards(shared):
    world = dist.get_world_size()
    save_shards_as(shared / f"shards_{world}_sync")
    save_shards_as(shared / f"shards_{world}_async", mode="async")
    save_shards_as(shared / f"shards_{world}_ours", planner=CheckFreqSavePlanner())
    caching = DefaultSavePlanner(enable_plan_caching=True)
    for number in range(2):
        save_shards_as(shared / f"shards_{world}_cached{number}", planner=caching)


@job
def load_shards(shared):
    """Load every checkpoint that is there with every sharding of this world; name what is wrong."""
    meshes, placements = shard_state(False)
    wrong, count = [], 0
    for folder in sorted(shared.glob("shards_*")):
        saved = set(CheckFreqReader(folder).read_metadata().state_dict_metadata)
        for mesh in meshes:
            for kind, placement in placements[mesh].items():
                target = {}
                for name, at, how in SAVED:
                    key = f"{name}_{at}_{how}"
                    if key in saved:
                        target[key] = tensor_of(name, meshes[mesh], placement, False)
                target |= {"plain": torch.zeros(11, 3), "note": {"a": [None, None]}}
                planner = CheckFreqLoadPlanner() if kind == "s0" else None
                dcp.load(target, storage_reader=CheckFreqReader(folder), planner=planner)
                for key, value in target.items():
                    count += 1
                    if key == "note":
                        right = value == {"a": [1, "x"]}
                    elif key == "plain":
                        right = torch.equal(value, reference((11, 3)))
                    else:
                        right = torch.equal(
                            value.full_tensor(), reference(SHAPES[key.split("_")[0]])
                        )
                    if not right:
                        wrong.append(f"{folder.name} {key} as {mesh} {kind}")
    return {"wrong": wrong, "count": count}


@job
def save_big(shared):
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    state = {
        f"w{n}": distribute_tensor(reference(BIG, start=n), mesh, [Shard(0)]) for n in range(3)
    }
    dcp.save(state, storage_writer=CheckFreqWriter(shared / f"big_{world}"))


@job
def load_big(shared):
    """Return bytes read and needed by this rank, for each world that saved."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    answer = {}
    for folder in sorted(shared.glob("big_*")):
        target = {f"w{n}": distribute_tensor(torch.zeros(BIG), mesh, [Shard(0)]) for n in range(3)}
        reader = CheckFreqReader(folder)
        dcp.load(target, storage_reader=reader)
        right = all(
            torch.equal(value.full_tensor(), reference(BIG, start=int(key[1:])))
            for key, value in target.items()
        )
        local = sum(value.to_local().nbytes for value in target.values())
        answer[folder.name] = [right, reader.bytes_read, reader.bytes_needed, local]
    return answer


@job
def replicated_is_written_once(shared):
    folder = shared / "replicated"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(reference((1024, 512)), mesh, [Replicate()])
    dcp.save({"w": weight, "p": reference((1024, 512))}, storage_writer=CheckFreqWriter(folder))
    dist.barrier()
    return sum(path.stat().st_size for path in folder.iterdir())


# --- kept plans, replicas ---


class CountsPlans(CheckFreqSavePlanner):
    """Counts plans that were really made, on this rank."""

    made = 0

    def finish_plan(self, new_plan):
        self.made += bool(new_plan.items)
        return super().finish_plan(new_plan)


@job
def kept_plans(shared):
    rank, world = dist.get_rank(), dist.get_world_size()
    planner, made, wrong = CountsPlans(), [], []

    def state(step, extra):
        own = {f"own{rank}": torch.full((rank + 2,), float(step * 10 + rank))}
        if extra and rank == 1:
            own["extra"] = torch.full((3,), float(step))
        return {"shared": torch.full((9, 4), float(step)), "note": f"step {step}", **own}

    for step, extra in enumerate([False, False, False, True, True, False], start=1):
        folder = shared / f"kept_{step}"
        dcp.save(state(step, extra), storage_writer=CheckFreqWriter(folder), planner=planner)
        made.append(planner.made)
    for step, extra in enumerate([False, False, False, True, True, False], start=1):
        target = {"shared": torch.zeros(9, 4), "note": None}
        target |= {f"own{r}": torch.zeros(r + 2) for r in range(world)}
        if extra:
            target["extra"] = torch.zeros(3)
        dcp.load(target, storage_reader=CheckFreqReader(shared / f"kept_{step}"))
        right = target["note"] == f"step {step}" and bool((target["shared"] == step).all())
        right &= all(bool((target[f"own{r}"] == step * 10 + r).all()) for r in range(world))
        right &= not extra or bool((target["extra"] == step).all())
        if not right:
            wrong.append(step)
    return {"made": made, "wrong": wrong}


@job
def replicas_differ(shared):
    rank = dist.get_rank()
    planner = CheckFreqSavePlanner()
    answer = {}

    def save(name, state):
        folder = shared / f"differ_{name}"
        error = caught(
            lambda: dcp.save(state, storage_writer=CheckFreqWriter(folder), planner=planner)
        )
        dist.barrier()
        answer[name] = [error, (folder / ".metadata").exists()]

    save("byte item", {"w": torch.ones(3), "rng": {"seed": 1000 + rank}})
    save("tensor", {"w": torch.ones(3), "pos": torch.tensor([100 + rank])})
    save("same", {"w": torch.ones(3), "rng": {"seed": 1000}})
    save("byte item later", {"w": torch.ones(3), "rng": {"seed": 1000 + rank}})
    save("same again", {"w": torch.ones(3), "rng": {"seed": 1001}})
    planner.check_tensors_once()
    save("tensor on request", {"w": torch.ones(3) * rank, "rng": {"seed": 1001}})
    save("same at last", {"w": torch.ones(3), "rng": {"seed": 1001}})
    return answer


# --- failures ---


def refuses(verb, **options):
    return Fault(verb=verb, error=errno.ENOSPC, **options)


@job
def one_rank_has_no_space(shared):
    rank = dist.get_rank()
    answer = {}
    for planner_name, planner in (("default", None), ("ours", CheckFreqSavePlanner())):
        folder = shared / f"full_{planner_name}"
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state = {"w": distribute_tensor(reference((64, 8)), mesh, [Shard(0)])}

        def save(fault, state=state, folder=folder, planner=planner):
            tier = FaultyTier(LocalTier(folder), fault if rank == 2 else [])
            dcp.save(state, storage_writer=CheckFreqWriter(tier), planner=planner)

        first = caught(lambda save=save: save([refuses("write_shard")]))
        dist.barrier()
        published = (folder / ".metadata").exists()
        dist.barrier()
        second = caught(lambda save=save: save([]))
        target = {"w": distribute_tensor(torch.zeros(64, 8), mesh, [Shard(0)])}
        dcp.load(target, storage_reader=CheckFreqReader(folder))
        right = torch.equal(target["w"].full_tensor(), reference((64, 8)))
        answer[planner_name] = [first, published, second, right]
    return answer


@job
def checkpointer_cleans_up_on_all_ranks(shared):
    rank = dist.get_rank()
    root = shared / "cleans_up"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(8, 8, bias=False)
    fully_shard(model, mesh=mesh)
    fault = [refuses("write_shard", nth=1)] if rank == 2 else []
    with Checkpointer(FaultyTier(LocalTier(root), fault), {"m": model}, every=1) as ckpt:
        ckpt.after_step()
        ckpt.wait()
        ckpt.after_step()
        ckpt.wait()
        failures = ckpt.failures_in_a_row
        dist.barrier()
        folder = root / "step_00000002"
        left = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        dist.barrier()
        ckpt.after_step()
        ckpt.wait()
        return {"failures": failures, "left": left, "last": ckpt.last_saved_step}


class DiesWhileWriting(ForwardingTier):
    def around(self, verb, name, call):
        if verb == "write_shard":
            os.kill(os.getpid(), signal.SIGKILL)
        return call()


@job
def one_rank_is_killed(shared):
    rank = dist.get_rank()
    folder = LocalTier(shared / "killed" / "step_1")
    tier = DiesWhileWriting(folder) if rank == 1 else folder
    state = {f"w{rank}": torch.ones(10)}
    error = caught(lambda: dcp.save(state, storage_writer=CheckFreqWriter(tier)))
    return [error, os.path.exists(shared / "killed" / "step_1" / ".metadata")]


@job
def checkpointer_loses_a_rank(shared):
    """Rank 1 dies in the second save. The others hear of it and publish nothing."""
    rank = dist.get_rank()
    root = LocalTier(shared / "loses")
    tier = root
    own = {"part": PerRank(torch.ones(20_000))}
    with contextlib.suppress(Exception):
        ckpt = Checkpointer(root, own, every=1, on_error="raise", timeout_s=20)
        ckpt.restore()
        ckpt.after_step()
        ckpt.wait()
        ckpt._root = DiesWhileWriting(root) if rank == 1 else tier
        ckpt.after_step()
        error = caught(ckpt.wait)
    found = find_latest_valid(root, no_dist=True, depth="digest")
    return [error, found.step]


@job
def one_rank_cannot_copy_its_state(shared):
    """All ranks hear of it at that save, and their next saves still belong together."""
    rank = dist.get_rank()
    part = PerRank(threading.Lock() if rank == 1 else 0)
    ckpt = Checkpointer(shared / "no_copy", {"part": part}, every=1, timeout_s=10)
    ckpt.step = 1
    first = caught(lambda: ckpt.save(wait=True))
    part.value, ckpt.step = 100 + rank, 2
    second = caught(lambda: ckpt.save(wait=True))
    caught(ckpt.close)
    found = find_latest_valid(shared / "no_copy", no_dist=True, depth="digest")
    return [first, second, found and found.step]


@job
def errors_come_at_the_same_step(shared):
    """A failed save must end the loop of all ranks at one step, or collectives would not pair."""
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    inner = LocalTier(shared / "same_step")
    tier = FaultyTier(inner, [refuses("write_shard")] if rank == 0 else [])
    # Rank 1 learns of the failure late: it is held while it removes its files.
    gate = GatedTier(tier, verbs=["delete"] if rank == 1 else [])
    own = {"part": PerRank(torch.ones(20_000) * rank)}
    ckpt = Checkpointer(gate, own, every=4, on_error="raise")
    ckpt.step = 3
    ckpt.after_step()
    if rank == 1:
        gate.wait_until_held()
        store.set("rank 1 is held", "yes")
    store.wait(["rank 1 is held"])
    if rank == 0:
        concurrent.futures.wait([ckpt._in_flight], 20)
    raised_at = None
    for _ in range(8):
        if rank == 1 and ckpt.step == 6:
            gate.release()
        try:
            ckpt.after_step()
        except Exception:  # noqa: BLE001
            raised_at = ckpt.step
            break
        if ckpt.step <= 6:
            # Training goes on in step, but with no collective that could hang this test.
            store.set(f"{ckpt.step}/{rank}", "done")
            with contextlib.suppress(RuntimeError):
                store.wait([f"{ckpt.step}/{1 - rank}"], datetime.timedelta(seconds=3))
    gate.release()
    with contextlib.suppress(Exception):
        ckpt.close()
    return raised_at


# --- roots and answers ---


@job
def different_roots(shared):
    mine = shared / f"root_of_{dist.get_rank()}"
    return caught(lambda: Checkpointer(mine, {"x": 1}, every=1))


@job
def one_answer_for_all(shared):
    rank = dist.get_rank()
    root = shared / "answers"
    if rank == 0:
        dcp.save(
            {"w": torch.ones(2)}, storage_writer=CheckFreqWriter(root / "step_7"), no_dist=True
        )
        (root / "step_9").mkdir()
    dist.barrier()
    found = find_latest_valid(root if rank == 0 else shared / "nothing here")
    broken = FaultyTier(LocalTier(root), [Fault(verb="list", times="forever")])
    error = caught(lambda: find_latest_valid(broken if rank == 0 else root))
    nothing = find_latest_valid(shared / "nothing here" if rank == 0 else root)
    alone = find_latest_valid(root, no_dist=True)
    return [found.step, len(found.rejected), error, nothing, alone.step]


@job
def refusals_on_all_ranks(shared):
    root = shared / "refusals"
    answer = []
    with Checkpointer(root, {"x": 1}, every=1, keep_last=9) as ckpt:
        ckpt.restore()
        for _ in range(2):
            ckpt.after_step()
    with Checkpointer(root, {"x": 1}, every=1) as ckpt:
        answer.append(caught(lambda: ckpt.restore(7)))
        answer.append(caught(ckpt.after_step))
    dist.barrier()
    if dist.get_rank() == 0:
        for shard in root.rglob("*.distcp"):
            os.truncate(shard, 0)
    dist.barrier()
    with Checkpointer(root, {"x": 1}, every=1) as ckpt:
        answer.append(caught(ckpt.restore))
    return answer


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


def main():
    run, shared, *names = sys.argv[1:]
    run, shared = Path(run), Path(shared)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{run}/store",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=30),
    )
    said = {}
    for name in names:
        try:
            said[name] = {"value": JOBS[name](shared)}
        except BaseException as error:  # noqa: BLE001  the test shows it
            said[name] = {
                "error": type(error).__name__,
                "text": str(error),
                "trace": traceback.format_exc(),
            }
        (run / f"{dist.get_rank()}.json").write_text(json.dumps(said))
        if name not in DEADLY:
            dist.barrier()
    if DEADLY.isdisjoint(names):
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
