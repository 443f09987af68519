"""The process that saves while its disk is cut off. Obeys one line at a time from stdin.

    ours <folder> <step>     dcp.save through CheckFreqWriter
    stock <folder> <step>    dcp.save through FileSystemWriter

Answers ``saving`` when it starts and ``saved`` or ``failed <why>`` when it is done.
"""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException


def state_of(step: int) -> dict:
    """Return a state whose every value tells its step: one large, some small, one plain item."""
    large = torch.arange(1_500_000, dtype=torch.float32) + step  # over the limit for direct I/O
    small = {f"small_{number}": torch.full((257,), step * 100 + number) for number in range(8)}
    return {"large": large, **small, "scalar": torch.tensor(float(step)), "step": step}


def zeros_like_it() -> dict:
    """Return the same structure to load into."""
    return {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else -1
        for key, value in state_of(0).items()
    }


def is_state_of(state: dict, step: int) -> bool:
    """Tell whether every value is exactly the one saved at ``step``."""
    wanted = state_of(step)
    return state.keys() == wanted.keys() and all(
        torch.equal(state[key], value) if isinstance(value, torch.Tensor) else state[key] == value
        for key, value in wanted.items()
    )


def main() -> None:
    from dcp_checkfreq import CheckFreqWriter

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        kind, step, folder = line.rstrip("\n").split(" ", 2)
        state = state_of(int(step))
        writer = CheckFreqWriter(folder) if kind == "ours" else dcp.FileSystemWriter(folder)
        print("saving", flush=True)
        try:
            dcp.save(state, storage_writer=writer)
        except (CheckpointException, OSError) as error:
            print("failed", repr(error).replace("\n", " ")[:300], flush=True)
        else:
            print("saved", flush=True)


if __name__ == "__main__":
    main()
