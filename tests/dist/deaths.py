"""Jobs in which a rank does not live on: `python deaths.py FOLDER CELL...` writes what ranks say.

Every job gets processes of its own, which are forked: importing torch is what costs.
"""

import concurrent.futures
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import jobs_no_rank_alone as alone
import torch
import torch.distributed as dist

from dcp_checkfreq import Checkpointer, PerRank
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import ForwardingTier

AT_ONCE = 4
ENDS_WITHIN_S = 100  # a process that is there after that hangs


def dies(folder, place, rank):
    """One of two ranks ends at ``place`` as by a crash."""
    said, _ = alone.PLACES[place](folder, alone.Faults(), (place, "death", int(rank)))
    return said


def is_killed(folder):
    """Rank 1 of three is killed while the others are in a save."""
    ckpt, _ = alone.make(folder, alone.Faults())
    ckpt.restore()
    ckpt.after_step()
    ckpt.wait()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return alone.tried(lambda: (ckpt.after_step(), ckpt.wait()))


def leaves(folder):
    """Rank 2 of three leaves its loop by an error of its own, and lives; the others go on."""
    ckpt, _ = alone.make(folder, alone.Faults())
    ckpt.restore()
    with contextlib.suppress(ZeroDivisionError), ckpt:
        ckpt.after_step()
        ckpt.wait()
        if dist.get_rank() == 2:
            raise ZeroDivisionError("the loss is gone")
        said = alone.tried(lambda: (ckpt.after_step(), ckpt.wait()))
        return said | {"again": alone.tried(lambda: (ckpt.after_step(), ckpt.wait()))}
    time.sleep(8)  # it is alive: only its group is gone
    return {"seconds": 0.0}


class Fast:
    """A clock on which a minute takes a second."""

    wall_s = staticmethod(time.time)
    sleep = staticmethod(time.sleep)

    @staticmethod
    def monotonic_s():
        return 60 * time.monotonic()


class Told(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        logging.getLogger("dcp_checkfreq").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def hangs(folder):
    """Rank 1's storage does not come back from a write, for longer than rank 0 waits."""
    never, told = threading.Event(), Told()

    class Hung(ForwardingTier):
        def around(self, verb, name, call):
            if verb == "write_shard" and dist.get_rank() == 1:
                never.wait(20)
            return call()

    parts = {"x": torch.ones(3), "own": PerRank(dist.get_rank())}
    ckpt = Checkpointer(Hung(LocalTier(folder)), parts, every=1, timeout_s=6.0, clock=Fast())
    ckpt.restore()
    said = alone.tried(lambda: ckpt.save(wait=True))
    return said | {"told": told.texts}


def never_comes(folder, how):
    """Rank 1 of three dies, or does something else, while the others make their Checkpointer."""
    told = Told()
    if dist.get_rank() == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(25)
        return {}
    parts = {"x": torch.ones(3)}
    said = alone.tried(lambda: Checkpointer(folder, parts, timeout_s=4.0, clock=Fast()))
    time.sleep(3)  # the process that serves the store goes last
    return said | {"told": told.texts, "threads": [one.name for one in threading.enumerate()]}


def makes_groups_anew(folder):
    """Both ranks end their process group in the middle of a run, and begin another one."""
    ckpt, _ = alone.make(folder, alone.Faults())
    ckpt.restore()
    ckpt.after_step()
    ckpt.wait()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = f"file://{folder}-store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    said = {
        "after_step": alone.tried(ckpt.after_step),
        "again": alone.tried(lambda: (ckpt.after_step(), ckpt.wait())),
        "restore": alone.tried(ckpt.restore),
    }
    told = Told()
    said |= {"close": alone.tried(ckpt.close), "told": told.texts}
    with alone.make(folder, alone.Faults())[0] as ckpt:
        restored = ckpt.restore()
        ckpt.after_step()
        ckpt.wait()
        return said | {"anew": [restored.step, ckpt.last_saved_step]}


def forks(folder):
    """Each rank forks a child, which makes a Checkpointer, too."""
    inside, outside = os.pipe()
    child = os.fork()
    if not child:
        said = alone.tried(lambda: alone.make(folder, alone.Faults()))
        os.write(outside, json.dumps(said).encode())
        os._exit(0)
    os.close(outside)
    with open(inside) as pipe:
        said = {"child": json.loads(pipe.read())}
    os.waitpid(child, 0)
    with alone.make(folder, alone.Faults())[0] as ckpt:
        ckpt.restore()
        ckpt.after_step()
        ckpt.wait()
        return said | {"saved": ckpt.last_saved_step}


JOBS = {
    "makes_groups_anew": (makes_groups_anew, 2),
    "forks": (forks, 2),
    "never_comes": (never_comes, 3),
    "dies": (dies, 2),
    "is_killed": (is_killed, 3),
    "leaves": (leaves, 3),
    "hangs": (hangs, 2),
}


def rank_of(cell, run, rank, ranks):
    """Be one rank. Never returns."""
    log = os.open(run / f"{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    name, *arguments = cell.split("|")
    dist.init_process_group("gloo", init_method=f"file://{run}/store", rank=rank, world_size=ranks)
    said = JOBS[name][0](run / "root", *arguments)
    (run / f"{rank}.json").write_text(json.dumps(said))
    os._exit(0)


def carried_out(cell, run):
    """Return what each rank said, or None for one that did not come to it."""
    run.mkdir()
    ranks = JOBS[cell.split("|")[0]][1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            try:
                rank_of(cell, run, rank, ranks)
            finally:
                os._exit(9)
        children.append(child)
    until_s = time.monotonic() + ENDS_WITHIN_S
    for child in children:
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > until_s:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.05)
    files = [run / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def main():
    folder, *cells = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    runs = [Path(folder) / f"death-{number}" for number in range(len(cells))]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        said = dict(zip(cells, pool.map(carried_out, cells, runs), strict=True))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
