"""Job: what is said, and not saved, when the loops of several ranks end by an error."""

import logging

import torch
import torch.distributed as dist
from jobs import job

from dcp_checkfreq import Checkpointer


@job
def the_loops_of_all_ranks_end_by_an_error(shared):
    """Return the error that came out, what was said, and the steps on storage."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("dcp_checkfreq").addHandler(handler)
    root = shared / "last_words"
    came_out = None
    try:
        with Checkpointer(root, {"w": torch.zeros(4)}, every=2, timeout_s=60) as ckpt:
            for _ in range(3):
                ckpt.after_step()
            raise ArithmeticError(f"of rank {dist.get_rank()}")
    except ArithmeticError as error:
        came_out = str(error)
    finally:
        logging.getLogger("dcp_checkfreq").removeHandler(handler)
    said = [line for line in lines if line.startswith("after ")]
    return [came_out, said, sorted(one.name for one in root.glob("step_*"))]
