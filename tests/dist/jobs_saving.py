"""Jobs: kept plans, failures, roots."""

import contextlib
import datetime
import errno
import os
import signal
import threading

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import caught, job, reference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_checkfreq import (
    CheckFreqReader,
    CheckFreqSavePlanner,
    CheckFreqWriter,
    Checkpointer,
    PerRank,
    find_latest_valid,
)
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import Fault, FaultyTier, ForwardingTier, GatedTier

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
        after_first = len(list(folder.glob("__*.distcp")))
        dist.barrier()
        second = caught(lambda save=save: save([]))
        left = sorted(path.name for path in folder.iterdir())
        target = {"w": distribute_tensor(torch.zeros(64, 8), mesh, [Shard(0)])}
        dcp.load(target, storage_reader=CheckFreqReader(folder))
        right = torch.equal(target["w"].full_tensor(), reference((64, 8)))
        answer[planner_name] = [first, published, second, right, after_first, left]
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
        ckpt._run_history._root = DiesWhileWriting(root) if rank == 1 else tier
        ckpt.after_step()
        error = caught(ckpt.wait)
    found = find_latest_valid(root, no_dist=True, depth="digest")
    return [error, found.step]


@job
def one_rank_cannot_copy_its_state(shared):
    """All ranks hear of it at that save, and their next saves still belong together."""
    rank = dist.get_rank()
    part = PerRank(0)
    ckpt = Checkpointer(shared / "no_copy", {"part": part}, every=1, timeout_s=10)
    part.value, ckpt.step = threading.Lock() if rank == 1 else 0, 1
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
        ckpt._saver._running.wait(20)
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
