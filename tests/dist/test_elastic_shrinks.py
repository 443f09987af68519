"""`torchrun --nnodes=1:2`: a node is lost for good, and the job ends on the one that is left."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from shrinking_job import EPOCHS, ITEMS

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(200)]

JOB = Path(__file__).with_name("shrinking_job.py")
RENDEZVOUS = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=2"
WITHIN_S = 90


def node(folder, port, name, *, is_host):
    """Start the agent of one node, with one worker. Those that do not host wait for the host."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=shrinks"),
        *(
            f"--rdzv-conf={RENDEZVOUS},is_host={int(is_host)}",
            "--local-addr=127.0.0.1",
            "--max-restarts=3",
        ),
        *("--monitor-interval=0.2", str(JOB), str(folder)),
    ]
    with open(folder / f"node {name}.log", "wb") as log:
        return subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


class Attempt:
    """What the rank of one attempt has written."""

    def __init__(self, path):
        _, world_size, rank, pid = path.name.split()
        self.world_size, self.rank, self.pid = int(world_size), int(rank), int(pid)
        # the last piece is a line that the rank was killed in, or nothing
        self.lines = [line.split() for line in path.read_text().split("\n")[:-1]]

    @property
    def restored(self):
        return int(self.lines[0][0])

    @property
    def is_done(self):
        return self.lines[-1:] == [["done"]]

    def items(self, until):
        """Return (epoch, item) of the steps up to ``until``."""
        for step, epoch, *items in (line for line in self.lines[1:] if line != ["done"]):
            if int(step) <= until:
                yield from ((int(epoch), int(item)) for item in items)


def attempts(folder):
    return [Attempt(path) for path in sorted(folder.glob("[0-9]*"))]


def well_under_way(folder):
    return [one for one in attempts(folder) if one.world_size == 2 and len(one.lines) > 20]


def said(folder):
    return "\n".join(log.read_text(errors="replace")[-3000:] for log in folder.glob("*.log"))


def until(there, folder):
    end_s = time.monotonic() + WITHIN_S
    while not (found := there()):
        assert time.monotonic() < end_s, said(folder)
        time.sleep(0.05)
    return found


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_node_that_is_lost_for_good_leaves_a_job_that_trains_every_sample_once(tmp_path):
    port, agents = free_port(), []
    try:
        # At the same time: torch lets nobody join a later round, see docs/elastic.md.
        agents.append(node(tmp_path, port, "that stays", is_host=True))
        agents.append(node(tmp_path, port, "that is lost", is_host=False))
        both = until(lambda: well_under_way(tmp_path), tmp_path)
        assert both[0].restored == 0
        agents[1].kill()
        agents[1].wait()
        (lost,) = [one for one in attempts(tmp_path) if parent(one.pid) != agents[0].pid]
        os.kill(lost.pid, signal.SIGKILL)
        assert agents[0].wait(WITHIN_S) == 0, said(tmp_path)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
        for one in attempts(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
    *before, alone = attempts(tmp_path)
    assert {one.world_size for one in before} == {2}
    assert alone.world_size == 1
    assert alone.is_done
    assert alone.restored >= 18, "at most two intervals are lost"
    counted = Counter(pair for one in before for pair in one.items(alone.restored))
    counted.update(alone.items(10**9))
    assert counted == {(epoch, item): 1 for epoch in range(EPOCHS) for item in range(ITEMS)}


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
