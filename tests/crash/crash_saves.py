"""What the crash tests share: states that tell their step, saves and loads on a tier."""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq import CheckFreqReader, CheckFreqWriter, find_latest_valid
from dcp_checkfreq.testing import MemoryTier, PowerLoss


def state_of(step, rows=40):
    """Return a state whose every value tells its step."""
    tensors = {f"w{n}": torch.full((rows, 17), step * 10.0 + n) for n in range(6)}
    return {
        **tensors,
        "scalar": torch.tensor(step),
        "empty": torch.zeros(0),
        "note": f"step {step}",
    }


def blank_like(state):
    return {
        key: torch.full_like(value, -1) if isinstance(value, torch.Tensor) else None
        for key, value in state.items()
    }


def same_values(got, wanted):
    return got.keys() == wanted.keys() and all(
        torch.equal(got[key], value) if isinstance(value, torch.Tensor) else got[key] == value
        for key, value in wanted.items()
    )


def folder_name(step):
    return f"step_{step:08d}"


def save(root, step, *, into=None, **options):
    """Save the state of ``step`` into its folder of the root tier, or into that of another step."""
    tier = root.child(folder_name(step if into is None else into))
    dcp.save(state_of(step), storage_writer=CheckFreqWriter(tier, **options))


def load(root, step):
    """Return what the folder of ``step`` holds."""
    state = blank_like(state_of(step))
    dcp.load(state, storage_reader=CheckFreqReader(root.child(folder_name(step))))
    return state


def newest(root, **options):
    """Return the newest step that is found, after checking that it loads with its exact values."""
    found = find_latest_valid(root, **options)
    if found is None:
        return None
    assert same_values(load(root, found.step), state_of(found.step))
    return found.step


def root_with_step_1():
    root = MemoryTier()
    save(root, 1)
    assert newest(root) == 1
    return root


def why(error):
    """Return the error that DCP wrapped, and the chain of what it was raised from."""
    chain = []
    if isinstance(error, CheckpointException):
        (error, _) = error.failures[0]
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def survives(call, *args, **options):
    """Return True if the call returned and False if the power failed in it."""
    try:
        call(*args, **options)
    except CheckpointException as error:
        if not any(isinstance(cause, PowerLoss) for cause in why(error)):
            raise
        return False
    except PowerLoss:
        return False
    return True
