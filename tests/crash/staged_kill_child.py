"""Imports once, then forks a process for each line of stdin, which trains, staged, and dies.

A line is ``<mode> <n> <folder>``. ``save``: save steps 1 and 2, and die at the n-th call to a disk
after that, while step 3 is saved. ``upload``: the same, but die when n pieces of step 3 have gone
to the remote side. ``resume``: start again, and die at the n-th call. The answer is the exit status
and what the process was about to do.
"""

import os

from killed import serve
from staged_runs import train_in_one_thread as train

from dcp_checkfreq.staging import staged_tier
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import ForwardingTier, at_disk_call


def run_and_die(task, die):
    mode, n, folder = task.split(" ", 2)
    slow, nvme = os.path.join(folder, "slow"), os.path.join(folder, "nvme")
    if mode != "resume":
        train(slow, nvme, 2)
    if mode == "upload":
        train(DiesInUpload(LocalTier(slow), int(n), die), nvme, 1)
    else:
        with at_disk_call(int(n), "before", die):
            train(slow, nvme, 0 if mode == "resume" else 1)


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
    staged_tier.BOUNCE_BYTES = 1000  # several pieces a file
    serve(run_and_die)
