"""A job for `torchrun`: trains, and ends as it is told to, once at each of some steps.

`torchrun ... elastic_job.py FOLDER STEPS [HOW:RANK@STEP ...]`
"""

import datetime
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from dcp_checkfreq import Checkpointer, elastic

TIMEOUT_S = 20


def strike(how, folder):
    if how == "worker":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "error":
        raise ValueError("a bug in the loop")
    elif how == "exit":
        os._exit(5)
    else:  # the test kills agents, or all, when it sees this
        (folder / "paused").write_text(str(os.getpid()))
        (folder / f"kill {how}").touch()
        signal.pause()


def main():
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    strikes = [strike_.replace("@", ":").split(":") for strike_ in sys.argv[3:]]
    start = dist.init_process_group if os.environ.get("STOCK") else elastic.init_process_group
    start("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    (folder / f"pid {os.getpid()}").touch()
    state = {"sum": torch.zeros(3)}
    begun_at = []
    with Checkpointer(folder / "root", state, every=1, timeout_s=TIMEOUT_S) as ckpt:
        ckpt.restore()
        begun_at.append(ckpt.step)
        while ckpt.step < steps:
            at = ckpt.step + 1
            for how, of, step in strikes:
                struck = folder / f"struck {how} {of} {step}"
                if int(of) == rank and int(step) == at and not struck.exists():
                    struck.touch()
                    strike(how, folder)
            value = torch.tensor([float(at)])
            dist.all_reduce(value)
            state["sum"] += value / dist.get_world_size()
            ckpt.after_step()
    said = {
        "sum": state["sum"].tolist(),
        "begun_at": begun_at[0],
        "saved": ckpt.last_saved_step,
        "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"],
        "group": dist.get_world_size(),
    }
    (folder / f"end {rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
