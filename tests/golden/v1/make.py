"""How the checkpoint beside this file was made, once, by the first release of format version 1.

    torchrun --standalone --nproc-per-node 2 tests/golden/v1/make.py

It is never made again: it stands for the checkpoints that users have, and every later version must
read it. A change of the format gets a new version and a golden checkpoint of its own.

All values come from `random.Random`, whose bytes are the same in every version of Python, so that
`full_state` gives them again without the checkpoint.
"""

from __future__ import annotations

import collections
import pathlib
import random
import sys
from typing import Any

import torch

HERE = pathlib.Path(__file__).resolve().parent
STEP = 7
FOLDER = HERE / f"step_{STEP:08d}"
RUN_ID, PARENT_STEP, ABANDONS = "golden run 1", 5, {"an older run": 6}
SEED = 20_26
RANKS = 2

SHARDED: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "f32": (torch.float32, (10, 4)),
    "bf16 uneven": (torch.bfloat16, (7, 3)),
    "int64": (torch.int64, (5,)),
    "bool": (torch.bool, (9, 2)),
    "one row for two ranks": (torch.float32, (1, 6)),
    "of several digest blocks": (torch.uint8, (2, 20_000)),
}
WHOLE: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "0-dim": (torch.float64, ()),
    "0-size": (torch.float32, (0, 3)),
    "f16": (torch.float16, (3, 5)),
    "complex": (torch.complex64, (4,)),
    "ä key / with . odd letters": (torch.int32, (2, 2)),
}


def tensor(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor of this name: any bits at all, NaNs included (bool: 0 and 1)."""
    made = torch.empty(shape, dtype=dtype)
    if made.nbytes:
        data = random.Random(f"{SEED} {name}").randbytes(made.nbytes)
        if dtype == torch.bool:
            data = bytes(byte & 1 for byte in data)
        made = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    return made


def full_state() -> dict[str, Any]:
    """Return the whole state as one process would hold it."""
    return {
        "model": {name: tensor(name, *kind) for name, kind in SHARDED.items()},
        "optim": {"state": {"w": {"exp_avg": tensor("exp_avg", torch.float32, (10, 4)).t()}}},
        "whole": {name: tensor(name, *kind) for name, kind in WHOLE.items()},
        "list": [tensor("in a list", torch.float32, (2,)), 3, {"deep": "text"}],
        "plain": {"lr": 1e-3, "none": None, "flag": True, "big": 2**70, "bytes": b"\x00\xff"},
        "tuple": (1, "ä", {1: "int key"}, collections.Counter("hello")),
        "ordered": (collections.OrderedDict([("b", 1), ("a", 2)]),),
    }


def main() -> None:
    """Write the checkpoint. Refuses if it is there."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from dcp_checkfreq import CheckFreqWriter
    from dcp_checkfreq.dcp.rank_save import OfRun
    from dcp_checkfreq.format.index import Lineage

    if FOLDER.exists():
        sys.exit(f"{FOLDER} is there already, and golden checkpoints are never made again")
    dist.init_process_group("gloo")
    dist.barrier()
    assert dist.get_world_size() == RANKS
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    state = full_state()
    for name, whole in state["model"].items():
        state["model"][name] = distribute_tensor(whole, mesh, [Shard(0)])
    state["whole"]["f16"] = distribute_tensor(state["whole"]["f16"], mesh, [Replicate()])
    lineage = Lineage(run_id=RUN_ID, parent_step=PARENT_STEP, abandons=ABANDONS)
    dcp.save(state, storage_writer=CheckFreqWriter(FOLDER, _of_run=OfRun(lineage)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
