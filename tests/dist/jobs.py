"""What the jobs of the distributed tests share."""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

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
