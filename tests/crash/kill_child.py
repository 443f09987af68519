"""Imports once, then forks a process for each line of stdin, which saves and kills itself.

A line is ``<n> <before|after> <overwrite 0|1> <folder> <step>``; the answer is the exit status
and what the process was about to do, or had done, when it was killed.
"""

import os

import torch.distributed.checkpoint as dcp
from crash_saves import folder_name, state_of
from killed import serve

from dcp_checkfreq import CheckFreqWriter
from dcp_checkfreq.shards import assign
from dcp_checkfreq.testing import at_disk_call


def save(folder, step, overwrite):
    """Save in one thread, so that the n-th call is the same one every time."""
    assign.MIN_FILE_BYTES = 4096
    writer = CheckFreqWriter(
        os.path.join(folder, folder_name(1 if overwrite else step)), overwrite=overwrite, threads=1
    )
    dcp.save(state_of(step), storage_writer=writer)


def save_and_die(task, die):
    n, when, overwrite, step, folder = task.split(" ", 4)
    with at_disk_call(int(n), when, lambda call: die(f"{when} os.{call}")):
        save(folder, int(step), overwrite == "1")


if __name__ == "__main__":
    serve(save_and_die)
