"""Jobs: tensors that say themselves what DCP saves of them, saved and loaded by several ranks."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import caught, job, reference

from dcp_checkfreq import (
    CheckFreqLoadPlanner,
    CheckFreqReader,
    CheckFreqSavePlanner,
    CheckFreqWriter,
    Checkpointer,
)

sys.path.append(str(Path(__file__).parents[1]))

from self_described_kinds import KINDS, blocks_of

WHOLE = (23, 40_000)  # 1.2 MB and more on each rank: what is guarded is copied beside training


def of_rank(kind, rank=None, world=None, start=1):
    """Return the blocks of a rank: two, of three rows, the last one of the tensor shorter."""
    world = dist.get_world_size() if world is None else world
    rank = dist.get_rank() if rank is None else rank
    rows = -(-WHOLE[0] // (2 * world))
    values = reference(WHOLE, start)
    begins = (rank * rows, (rank + world) * rows)
    return kind(WHOLE, {at: values[at : at + rows].clone() for at in begins if at < WHOLE[0]})


def change(tensor):
    for block in blocks_of(tensor).values():
        block.zero_()


def save_in_all_ways(kind, folder):
    def sync(path, state, planner):
        dcp.save(state, storage_writer=CheckFreqWriter(path), planner=planner)

    def background(path, state, planner):
        writer = CheckFreqWriter(path)
        saving = dcp.async_save(
            state, storage_writer=writer, planner=planner, process_group=dist.group.WORLD
        )
        change(state["w"])
        saving.result()

    def overlapped(path, state, planner):
        parameter = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([parameter], momentum=0.9)
        optimizer.state[parameter]["mine"] = state["w"]
        parameter.grad = torch.ones(3)
        writer = CheckFreqWriter(path, overlap=[optimizer])
        saving = dcp.async_save(
            state, storage_writer=writer, planner=planner, process_group=dist.group.WORLD
        )
        optimizer.step()  # waits for the copy
        change(state["w"])
        saving.upload_completion.result()

    kept = CheckFreqSavePlanner()
    ways = {"sync": sync, "background": background, "overlapped": overlapped}
    for name, way in ways.items():
        way(folder / f"{name}_stock", {"w": of_rank(kind)}, None)
        for number in range(3):  # the second and third by kept plans, or planned anew
            way(folder / f"{name}_{number}", {"w": of_rank(kind)}, kept)


@job
def self_described_saves(shared):
    for name, kind in KINDS.items():
        save_in_all_ways(kind, shared / f"said_{name}_{dist.get_world_size()}")


@job
def self_described_loads(shared):
    """Load each checkpoint that is there into each kind; name what is wrong."""
    wrong, count = [], 0
    for folder in sorted(shared.glob("said_*/*")):
        for name, kind in KINDS.items():
            ways = {
                "ours": (CheckFreqReader(folder), CheckFreqLoadPlanner()),
                "stock planner": (CheckFreqReader(folder), None),
                "stock": (dcp.FileSystemReader(folder), None),
            }
            for way, (reader, planner) in ways.items():
                got = {"w": of_rank(kind, start=-5)}
                dcp.load(got, storage_reader=reader, planner=planner)
                wanted = blocks_of(of_rank(kind))
                count += 1
                for row, block in blocks_of(got["w"]).items():
                    if not torch.equal(block, wanted[row]):
                        wrong.append(f"{folder.name} into {name} by {way} at {row}")
    return {"wrong": wrong, "count": count}


def with_fields(tensor):
    rank, rows = dist.get_rank(), 8 // dist.get_world_size()
    tensor.global_shape, tensor.global_offsets = (8, 4), ((rows * rank, 0),)
    tensor.local_offsets, tensor.local_sizes = ((0, 0),), ((rows, 4),)
    return tensor


def parts_with_fields(whole):
    rows = 8 // dist.get_world_size()
    mine = whole[dist.get_rank() * rows :][:rows].clone()
    model = torch.nn.Linear(3, 3)
    model.own = with_fields(torch.nn.Parameter(mine.clone()))
    return {"model": model, "value": {"x": with_fields(mine.clone()), "n": 1}}


@job
def self_described_parts(shared):
    """Save by two ranks, restore on any: a parameter and a value."""
    if not hasattr(dcp, "CheckpointableTensor"):
        return None
    torch.manual_seed(0)
    whole = torch.arange(32.0).reshape(8, 4)
    root = shared / "parts_with_fields"
    if dist.get_world_size() == 2:
        with Checkpointer(root, parts_with_fields(whole), every=1000) as ckpt:
            ckpt.step = 1
            ckpt.save(wait=True)
    parts = parts_with_fields(torch.zeros(8, 4))
    with Checkpointer(root, parts, every=1000) as ckpt:
        ckpt.restore()
    wanted = parts_with_fields(whole)
    value = parts["value"]["x"]
    return [
        torch.equal(parts["model"].own, wanted["model"].own),
        torch.equal(value, wanted["value"]["x"]) and value.global_shape == (8, 4),
    ]


@job
def self_described_replicas(shared):
    """Ranks 0 and 1 hold the same blocks, as with replicas of shards."""
    rank, world = dist.get_rank(), dist.get_world_size()
    answers = {}
    for name, kind in KINDS.items():
        for case in ("same", "differ"):
            tensor = of_rank(kind, rank=rank // 2, world=world // 2)
            if case == "differ" and rank == 1:
                blocks_of(tensor)[0][2, 7] += 1
            answers[f"{name} {case}"] = caught(
                lambda tensor=tensor, name=name, case=case: dcp.save(
                    {"w": tensor},
                    storage_writer=CheckFreqWriter(shared / f"replicas_{name}_{case}"),
                    planner=CheckFreqSavePlanner(),
                )
            )
    return answers
