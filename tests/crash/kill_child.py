"""Imports once, then forks a process for each line of stdin, which saves and kills itself.

A line is ``<n> <before|after> <overwrite 0|1> <folder> <step>``; the answer is the exit status
and what the process was about to do, or had done, when it was killed.
"""

import os
import signal
import sys
import tempfile
import traceback
import warnings

import torch
import torch.distributed.checkpoint as dcp
from crash_saves import folder_name, state_of

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


def save_and_die(n, when, note, folder, step, overwrite):
    def die(call):
        os.write(note, f"{when} os.{call}".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        with at_disk_call(n, when, die):
            save(folder, step, overwrite)
    except BaseException:  # noqa: BLE001 - a forked child must not return into the loop
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        n, when, overwrite, step, folder = line.rstrip("\n").split(" ", 4)
        with tempfile.TemporaryFile() as note:
            pid = os.fork()
            if pid == 0:
                save_and_die(int(n), when, note.fileno(), folder, int(step), overwrite == "1")
            _, status = os.waitpid(pid, 0)
            note.seek(0)
            print(os.waitstatus_to_exitcode(status), note.read().decode() or "-", flush=True)


if __name__ == "__main__":
    main()
