"""The ranks of the preemption tests: `python jobs_preemption.py JOB FOLDER [OPTIONS]`.

Not run by `worker.py`: they end by signals, and a real `torchrun` starts some of them. Each rank
writes its pid to ``FOLDER/RANK.pid``, its log to ``RANK.log`` and its answer to ``RANK.json``.
"""

import json
import logging
import os
import random
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dcp_checkfreq import Checkpointer, PerRank
from dcp_checkfreq.format.torch_private import default_store
from dcp_checkfreq.ranks.preemption import PreemptionWatch
from dcp_checkfreq.ranks.step_gate import Gate
from dcp_checkfreq.runtime.clock import SystemClock
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import ForwardingTier

STEPS = 2000


def watched(gate, *, key="test", **options):
    return PreemptionWatch(
        gate,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        store=default_store(),
        key=key,
        clock=SystemClock(),
        **{"grace_s": 60.0, "poll_s": 0.05} | options,
    )


def train(gate, watch, *, step_s, steps=STEPS, at=lambda step, moment: None):
    """Step, with a collective in each, until told to stop; return the last step."""
    for step in range(1, steps + 1):
        at(step, "before the collective")
        time.sleep(step_s())
        dist.all_reduce(torch.ones(1))
        at(step, "after the collective")
        gate.pass_step(step)
        at(step, "after the gate")
        if watch.stop_at is not None and step >= watch.stop_at:
            watch.taken_up()
            return step
    return None


def until_told(folder, *, agree_timeout_s=10.0, steps=STEPS, step_s=0.01):
    """Train until the test sends signals. Ranks differ in speed."""
    gate, rank = Gate(), dist.get_rank()
    watch = watched(gate, agree_timeout_s=agree_timeout_s)
    watch.start()
    (folder / f"{rank}.pid").write_text(str(os.getpid()))

    def at(step, moment):
        if step == 3:
            (folder / f"{rank}.running").touch()

    stopped = train(gate, watch, step_s=lambda: step_s * (rank + 1), steps=steps, at=at)
    said = {"stopped": stopped, "stop_at": watch.stop_at}
    dist.barrier()
    watch.close()
    return said


def many_rounds(folder, *, rounds):
    """Signals at random times to random ranks; return where this rank stopped in each round."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = random.Random(f"rank {rank}")
    shared = random.Random("all ranks")
    stopped = []
    for number in range(rounds):
        gate = Gate()
        watch = watched(gate, key=f"round {number}", poll_s=0.02)
        watch.start()
        hit = shared.sample(range(world), shared.randint(1, world))
        for _ in range(shared.randint(1, 2) if rank in hit else 0):
            to = (os.getpid(), shared.choice([signal.SIGTERM, signal.SIGUSR1]))
            threading.Timer(own.uniform(0.0, 0.2), os.kill, to).start()
        slow = own.choice([0.0, 0.001, 0.01])
        stopped.append(train(gate, watch, step_s=lambda slow=slow: own.uniform(0, slow)))
        time.sleep(0.3)  # late signals still find the watch
        dist.barrier()
        watch.close()
        shared = random.Random(f"all ranks, {number}")
    return stopped


def at_a_moment(folder, *, moment):
    """Rank 1 gets the signal in step 5, just there."""
    gate = Gate()
    watch = watched(gate)
    watch.start()

    def at(step, now):
        if (step, now) == (5, moment) and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = train(gate, watch, step_s=lambda: 0.005, at=at)
    dist.barrier()
    watch.close()
    return stopped


def while_one_sleeps(folder):
    """Rank 1 does not come to step 5 for long. Rank 0 waits in the collective, and is told."""
    gate, rank = Gate(), dist.get_rank()
    watch = watched(gate)
    watch.start()
    times = {}

    def at(step, moment):
        if step == 5 and moment == "before the collective":
            if rank == 0:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            else:
                time.sleep(3.0)
                times["awake"] = time.monotonic()

    def note():
        while watch.stop_at is None:
            time.sleep(0.01)
        times["agreed"] = time.monotonic()

    noting = threading.Thread(target=note)
    noting.start()
    stopped = train(gate, watch, step_s=lambda: 0.001, at=at)
    noting.join()
    dist.barrier()
    watch.close()
    return {"stopped": stopped, **times}


class SlowShards(ForwardingTier):
    """A storage on which a shard takes so long."""

    seconds_s = 0.0

    def around(self, verb, name, call):
        if verb == "write_shard":
            time.sleep(SlowShards.seconds_s)
        return call()


def with_checkpointer(folder, *, step_s=0.02, shard_s=0.0, **options):
    """Train with a `Checkpointer` until the test sends signals; it ends the process."""
    SlowShards.seconds_s = shard_s
    root = SlowShards(LocalTier(folder / "root"))
    rank, value = dist.get_rank(), torch.zeros(1000)
    parts = {"shared": {"value": value}, "own": PerRank(torch.zeros(20_000))}
    with Checkpointer(root, parts, **options) as ckpt:
        ckpt.restore()
        first = ckpt.step + 1
        (folder / f"{rank}.pid").write_text(str(os.getpid()))
        try:
            for step in range(first, STEPS + 1):
                time.sleep(step_s * (rank + 1))
                dist.all_reduce(torch.ones(1))
                value.fill_(step)
                parts["own"].value = torch.full((20_000,), float(step * 10 + rank))
                if step == first + 3:
                    (folder / f"{rank}.running").touch()
                ckpt.after_step()
        except SystemExit as leaving:
            said = {"first": first, "stopped": ckpt.step, "saved": ckpt.last_saved_step}
            (folder / f"{rank}.json").write_text(json.dumps(said | {"code": leaving.code}))
            raise
    return {"first": first, "stopped": None}


JOBS = {
    job.__name__: job
    for job in (until_told, many_rounds, at_a_moment, while_one_sleeps, with_checkpointer)
}


def main():
    name, folder, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    rank = int(os.environ["RANK"])
    logging.basicConfig(filename=folder / f"{rank}.log", level=logging.INFO)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=os.environ.get("TEST_INIT_METHOD"),
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=60),
    )
    (folder / f"{rank}.json").write_text(json.dumps(JOBS[name](folder, **options)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
