"""Jobs: shards written on some ranks and read on others."""

import itertools

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import job, reference
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp_checkfreq import (
    CheckFreqLoadPlanner,
    CheckFreqReader,
    CheckFreqSavePlanner,
    CheckFreqWriter,
)

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
    """Load what every world has saved with every sharding of this one; name what is wrong.

    Of the other ways to save, each is loaded with one sharding, in turn.
    """
    kinds = kinds_here()
    turn = itertools.cycle(kinds)
    return loaded(
        (folder, *kind)
        for folder in sorted(shared.glob("shards_*"))
        for kind in (kinds if folder.name.endswith("_sync") else [next(turn)])
    )


@job
def load_shards_every_way(shared):
    """Load every checkpoint that is there with every sharding of this world."""
    return loaded((f, *kind) for f in sorted(shared.glob("shards_*")) for kind in kinds_here())


def kinds_here():
    _, placements = shard_state(False)
    return [(mesh, kind) for mesh, of_mesh in placements.items() for kind in of_mesh]


def loaded(cases):
    meshes, placements = shard_state(False)
    wrong, count = [], 0
    for folder, mesh, kind in cases:
        saved = set(CheckFreqReader(folder).read_metadata().state_dict_metadata)
        target = {}
        for name, at, how in SAVED:
            key = f"{name}_{at}_{how}"
            if key in saved:
                target[key] = tensor_of(name, meshes[mesh], placements[mesh][kind], False)
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
                right = torch.equal(value.full_tensor(), reference(SHAPES[key.split("_")[0]]))
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
