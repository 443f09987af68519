"""Saves two steps with plain DCP, and stops itself (SIGSTOP) at a call of the second save.

usage: stopped_child.py ROOT VERB    VERB: of the storage call before which it stops
Exit code 0 if both saves returned, 3 if the second one failed; the error is on the last line.
"""

import os
import signal
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq import CheckFreqWriter
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import ForwardingTier


class Stops(ForwardingTier):
    def __init__(self, inner, verb):
        super().__init__(inner)
        self.verb = verb

    def around(self, verb, name, call):
        if verb == self.verb and (verb != "create" or name == ".metadata"):
            self.verb = ""
            os.kill(os.getpid(), signal.SIGSTOP)
        return call()


def main():
    root, verb = sys.argv[1:]
    for step in (1, 2):
        folder = LocalTier(root).child(f"step_0000000{step}")
        tier = Stops(folder, verb) if step == 2 else folder
        state = {"w": torch.full((1000,), float(step))}
        try:
            dcp.save(state, storage_writer=CheckFreqWriter(tier), no_dist=True)
        except CheckpointException as error:
            print(type(error.failures[0][0]).__name__, error.failures[0][0], flush=True)
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
