"""Jobs: reads that ranks share."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import caught, job, reference
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_checkfreq import CheckFreqReader, CheckFreqWriter, Checkpointer


def state_of(fill):
    """Replicated tensors, a sharded one, values; ``fill`` makes a tensor of a shape."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "big": fill((700, 3001)),
        "small": fill((17,)),
        "other": fill((64, 1024)),
        "sharded": distribute_tensor(fill((64, 999)), mesh, [Shard(0)]),
        "note": "what was saved",
    }


def is_right(state):
    wanted = state_of(reference)
    sharded = torch.equal(state.pop("sharded").to_local(), wanted.pop("sharded").to_local())
    return (
        sharded
        and state.pop("note") == wanted.pop("note")
        and all(torch.equal(state[key], value) for key, value in wanted.items())
    )


def loaded(folder, **options):
    state = state_of(torch.zeros) | {"note": None}
    reader = CheckFreqReader(folder, **options)
    dcp.load(state, storage_reader=reader)
    return is_right(state), reader.bytes_read, reader.bytes_received, reader.bytes_needed


@job
def shared_reads(shared):
    folder = shared / f"sharing_{dist.get_world_size()}"
    dcp.save(state_of(reference), storage_writer=CheckFreqWriter(folder))
    return {"alone": loaded(folder), "shared": loaded(folder, share_reads=True)}


@job
def shared_reads_of_damage(shared):
    """A block of a replicated tensor is damaged: all ranks hear the same, none waits in vain."""
    folder = shared / f"sharing_damage_{dist.get_world_size()}"
    dcp.save(state_of(reference), storage_writer=CheckFreqWriter(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        path = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 255
        path.write_bytes(content)
    dist.barrier()
    return caught(lambda: loaded(folder, share_reads=True))


@job
def shared_reads_with_another_dtype(shared):
    """One rank has another dtype: all ranks hear it."""
    folder = shared / f"sharing_dtype_{dist.get_world_size()}"
    dcp.save({"w": torch.ones(9)}, storage_writer=CheckFreqWriter(folder))
    dtype = torch.float64 if dist.get_rank() == 1 else torch.float32
    state = {"w": torch.zeros(9, dtype=dtype)}
    reader = CheckFreqReader(folder, share_reads=True)
    return caught(lambda: dcp.load(state, storage_reader=reader))


@job
def shared_reads_through_damaged_copies(shared):
    """Local copies of one rank are damaged: all read the remote side together."""
    folder = shared / f"sharing_staged_{dist.get_world_size()}" / "step_1"
    node = shared / f"sharing_node_{dist.get_world_size()}_{dist.get_rank()}"
    dcp.save(state_of(reference), storage_writer=CheckFreqWriter(folder, staging_dir=node))
    dist.barrier()
    if dist.get_rank() == 1:
        for path in node.rglob("*.distcp"):
            path.write_bytes(bytes(255 ^ byte for byte in path.read_bytes()))
    return loaded(folder, staging_dir=node, share_reads=True)


@job
def checkpointer_shares_reads(shared):
    root = shared / f"sharing_run_{dist.get_world_size()}"
    model = torch.nn.Linear(512, 512)
    with torch.no_grad():
        model.weight.fill_(7.0)
        model.bias.fill_(7.0)
    with Checkpointer(root, {"model": model, "note": "x"}, every=1) as ckpt:
        ckpt.after_step()
    answers = []
    for share_reads in (False, True):
        again = torch.nn.Linear(512, 512)
        state = {"model": again, "note": ""}
        with Checkpointer(root, state, every=1, share_reads=share_reads) as ckpt:
            restored = ckpt.restore()
        right = bool((again.weight == 7).all()) and state["note"] == "x"
        answers.append([right, restored.bytes_read, restored.bytes_received])
    return answers
