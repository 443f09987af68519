"""Trains on ``root`` with a local disk in front of it, saving each step; prints what it did.

``run_staged.py ROOT NVME STEPS [LAST_S]``: the model has 24 MiB; with LAST_S the process is
killed so many seconds after the last save was begun, while it is uploaded.
"""

import json
import os
import signal
import sys
import time
import warnings

import torch

from dcp_checkfreq import Checkpointer


def main():
    warnings.simplefilter("ignore")
    root, nvme, steps, last_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    options = json.loads(os.environ["STORAGE_OPTIONS"])
    weight = torch.full((6 << 20,), -1.0)
    state = {"model": Holder(weight)}
    with Checkpointer(root, state, every=1, staging_dir=nvme, storage_options=options) as ckpt:
        begun_s = time.monotonic()
        restored = ckpt.restore()
        restore_s = time.monotonic() - begun_s
        step = restored.step if restored else 0
        right = restored is None or bool((weight == step).all())
        for n in range(steps):
            weight.fill_(float(ckpt.step + 1))
            ckpt.after_step()
            if last_s and n == steps - 1:
                time.sleep(float(last_s[0]))
                os.kill(os.getpid(), signal.SIGKILL)
            ckpt.wait()
        ckpt.wait()
    print(json.dumps({"restored": step, "right": right, "restore_s": round(restore_s, 2)}))


class Holder(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.register_buffer("weight", weight)


if __name__ == "__main__":
    main()
