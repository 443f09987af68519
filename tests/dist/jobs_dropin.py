"""Jobs of the drop-in: stock's own classes and calls, on several ranks."""

import threading

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import caught, job, reference
from stock_fsspec import FsspecWriter
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp_checkfreq import dropin


def sharded(add=0.0, placement=None):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(reference((64, 8)) + add, mesh, [placement or Shard(0)])


def is_ours(folder):
    return b"dcp_checkfreq" in (folder / ".metadata").read_bytes()


def weight_in(folder, reader=FileSystemReader):
    """Return what all ranks load from a checkpoint: how much ``w`` is above its reference."""
    target = {"w": sharded(-1e6), "n": None}
    dcp.load(target, storage_reader=reader(folder))
    above = target["w"].full_tensor() - reference((64, 8))
    return [above.unique().tolist(), target["n"]]


@job
def dropin_saves_and_loads(shared):
    root = shared / "dropin"
    with dropin.install():
        for value in (1.0, 2.0):  # over the one before
            dcp.save({"w": sharded(value), "n": value}, checkpoint_id=root / "id")
        dcp.save({"w": sharded(3.0), "n": 3.0}, storage_writer=FsspecWriter(str(root / "fsspec")))
        ours = [weight_in(root / name) for name in ("id", "fsspec")]
        alone = root / f"alone_{dist.get_rank()}"
        dcp.save({"r": dist.get_rank()}, checkpoint_id=alone, no_dist=True)
        target = {"r": None}
        dcp.load(target, checkpoint_id=alone, no_dist=True)
    stock = [weight_in(root / name) for name in ("id", "fsspec")]
    return {
        "ours": ours,
        "stock": stock,
        "alone": target["r"] == dist.get_rank(),
        "are_ours": [is_ours(root / "id"), is_ours(root / "fsspec"), is_ours(alone)],
        "files": len(list((root / "id").glob("*.distcp"))),
    }


@job
def dropin_refuses_on_all_ranks(shared):
    folder = shared / "dropin-exists"
    with dropin.install():
        dcp.save({"w": sharded(1.0), "n": 1}, checkpoint_id=folder)
        writer = FileSystemWriter(folder, overwrite=False)
        error = caught(lambda: dcp.save({"w": sharded(2.0), "n": 2}, storage_writer=writer))
        return [error[:2], weight_in(folder)]


@job
def dropin_async_beside_training(shared):
    """No process group is named: stock would share the default one with the training loop."""
    root, answers = shared / "dropin-async", []
    with dropin.install():
        writer = FileSystemWriter(root / "0")
        futures = []
        for step in range(4):
            where = {"checkpoint_id": root / str(step)}
            if step % 2:
                where["storage_writer"] = writer
            futures.append(dcp.async_save({"w": sharded(step), "n": step}, **where))
            for _ in range(20):  # what a training loop has going on meanwhile
                total = torch.ones(1)
                dist.all_reduce(total)
        for future in futures:
            future.result()
        answers = [weight_in(root / str(step)) for step in range(4)]
    return [answers, [is_ours(root / str(step)) for step in range(4)]]


class Failing(dcp.DefaultSavePlanner):
    def create_local_plan(self):
        if dist.get_rank() == 1:
            raise RuntimeError("of rank 1")
        return super().create_local_plan()


@job
def dropin_async_goes_on_after_a_failure(shared):
    root = shared / "dropin-failure"
    with dropin.install():
        failing = dcp.async_save(
            {"w": sharded(1.0), "n": 1}, checkpoint_id=root / "1", planner=Failing()
        )
        good = dcp.async_save({"w": sharded(2.0), "n": 2}, checkpoint_id=root / "2")
        good.result()
        return [
            caught(failing.result)[1:],
            (root / "1" / ".metadata").exists(),
            weight_in(root / "2"),
        ]


@job
def dropin_ends_with_the_group(shared):
    """`destroy_process_group` waits for a save under way, of which no future is kept."""
    folder = shared / "dropin-end"
    dropin.install()
    dcp.async_save({"w": sharded(5.0), "n": 5}, checkpoint_id=folder)
    return [thread.name for thread in threading.enumerate() if "Async" in thread.name]


@job
def dropin_process(shared):
    root = shared / "dropin-process"
    kind = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    with dropin.install():
        writer = FileSystemWriter(root / "class", thread_count=2)
        dcp.async_save({"w": sharded(1.0), "n": 1}, storage_writer=writer, **kind).result()
        dcp.async_save({"w": sharded(2.0), "n": 2}, checkpoint_id=root / "id", **kind).result()
        dcp.async_save({"w": sharded(3.0), "n": 3}, checkpoint_id=root / "id", **kind).result()
        got = [weight_in(root / name) for name in ("class", "id")]
    dcp.async_save({"w": sharded(4.0), "n": 4}, checkpoint_id=root / "after", **kind).result()
    dcp.async_save(
        {"w": sharded(4.0), "n": 4}, storage_writer=writer, checkpoint_id=root / "too", **kind
    ).result()
    names = ("class", "id", "after", "too")
    return [got, [is_ours(root / name) for name in names], weight_in(root / "after")]


@job
def dropin_kept_plans(shared):
    root = shared / "dropin-plans"
    with dropin.install():
        for step in range(3):
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            state = {"w": sharded(step), "n": step, "whole": sharded(step, Replicate())}
            dcp.save(state, checkpoint_id=root / str(step), planner=planner)
        return [weight_in(root / str(step)) for step in range(3)]
