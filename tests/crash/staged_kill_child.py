"""Imports once, then forks a process for each line of stdin, which trains, staged, and dies.

A line is ``<mode> <n> <folder>``. ``save``: save steps 1 and 2, and die at the n-th call to a disk
after that, while step 3 is saved. ``upload``: the same, but die when n pieces of step 3 have gone
to the slow side. ``resume``: start again, and die at the n-th call. The answer is the exit status
and what the process was about to do.
"""

import os
import signal
import sys
import tempfile
import traceback
import warnings

import torch
from staged_runs import train

from dcp_checkfreq.storage import staged
from dcp_checkfreq.storage.local import LocalTier
from dcp_checkfreq.testing import ForwardingTier, at_disk_call


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    staged.BOUNCE_BYTES = 1000  # several pieces a file
    print("ready", flush=True)
    for line in sys.stdin:
        mode, n, folder = line.rstrip("\n").split(" ", 2)
        with tempfile.TemporaryFile() as note:
            pid = os.fork()
            if pid == 0:
                run_and_die(mode, int(n), folder, note.fileno())
            _, status = os.waitpid(pid, 0)
            note.seek(0)
            print(os.waitstatus_to_exitcode(status), note.read().decode() or "-", flush=True)


def run_and_die(mode, n, folder, note):
    def die(call):
        os.write(note, call.encode())
        os.kill(os.getpid(), signal.SIGKILL)

    slow, nvme = os.path.join(folder, "slow"), os.path.join(folder, "nvme")
    try:
        if mode != "resume":
            train(slow, nvme, 2)
        if mode == "upload":
            train(DiesInUpload(LocalTier(slow), n, die), nvme, 1)
        else:
            with at_disk_call(n, "before", die):
                train(slow, nvme, 0 if mode == "resume" else 1)
    except BaseException:  # noqa: BLE001 - a forked child must not return into the loop
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class DiesInUpload(ForwardingTier):
    def __init__(self, inner, pieces, die):
        super().__init__(inner)
        self.pieces, self.die = pieces, die

    def around_pieces(self, name, pieces):
        for number, piece in enumerate(pieces):
            if number == self.pieces:
                self.die(f"piece {number} of {name}")
            yield piece


if __name__ == "__main__":
    main()
