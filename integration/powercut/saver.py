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
    """Return a state whose every value tells its step.

    Odd steps make a file that is large enough for direct I/O, even ones go through the page cache.
    """
    main = torch.arange(1_500_000 if step % 2 else 5_000, dtype=torch.float32) + step
    small = {f"small_{number}": torch.full((257,), step * 100 + number) for number in range(8)}
    return {"main": main, **small, "scalar": torch.tensor(float(step)), "step": step}


def blank_like(step: int) -> dict:
    """Return the structure of that state to load into."""
    return {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else -1
        for key, value in state_of(step).items()
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
