"""`elastic.init_process_group`: jobs of torchrun come back, whoever was killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import forked_torchrun
import pytest

from dcp_checkfreq import RankLost
from dcp_checkfreq.elastic import find_each_other
from dcp_checkfreq.testing import ManualClock

JOB = Path(__file__).with_name("elastic_job.py")
STEPS = 6
ENDS_WITHIN_S = 150


# --- how the ranks of one attempt find each other ---


class Store:
    """What torch's stores do, in one process."""

    def __init__(self):
        self.lock, self.keys = threading.Lock(), {}

    def set(self, key, value):
        with self.lock:
            self.keys[key] = value.encode()

    def get(self, key):
        return self.keys[key]

    def check(self, keys):
        return all(key in self.keys for key in keys)

    def add(self, key, amount):
        with self.lock:
            self.keys[key] = str(int(self.keys.get(key, b"0")) + amount).encode()
            return int(self.keys[key])


def attempt(store, world_size, *, timeout_s=60.0):
    """Return what every rank of one attempt was told."""
    told = {}

    def be(rank):
        told[rank] = find_each_other(store, rank, world_size, key="job", timeout_s=timeout_s)

    ranks = [threading.Thread(target=be, args=(rank,)) for rank in reversed(range(world_size))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return [told.get(rank) for rank in range(world_size)]


def test_every_attempt_has_a_name_of_its_own_that_all_its_ranks_know():
    store, names = Store(), []
    for world_size in (4, 1, 3, 5, 2):
        told = attempt(store, world_size)
        assert told == [told[0]] * world_size
        assert told[0]
        names.append(told[0])
    assert len(set(names)) == len(names)


def test_words_of_ranks_that_have_died_hold_nobody_up():
    store = Store()
    for _ in range(3):  # killed before rank 0 of its attempt came
        with pytest.raises(RankLost, match="rank 0 did not come"):
            find_each_other(store, 1, 2, key="job", timeout_s=1, clock=Impatient())
    store.add("job/words", 1)  # killed between the counter and the word
    told = attempt(store, 3)
    assert told == [told[0]] * 3


class Impatient(ManualClock):
    def sleep(self, seconds_s):
        self.advance(10.0)


def test_ranks_that_do_not_come_are_an_error_in_time():
    with pytest.raises(RankLost, match="0 of 2 other ranks came"):
        find_each_other(Store(), 0, 3, key="job", timeout_s=30, clock=Impatient())


# --- torchrun ---


def run(folder, *strikes):
    command = [
        *(sys.executable, forked_torchrun.SCRIPT),
        *("--standalone", "--nproc-per-node", "2", "--max-restarts", "3"),
        *("--monitor-interval", "0.2", str(JOB), str(folder), str(STEPS), *strikes),
    ]
    with open(folder / f"torchrun {time.monotonic_ns()}.log", "wb") as log:
        return subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def logs(folder):
    return "".join(log.read_text(errors="replace")[-3000:] for log in folder.glob("*.log"))


@contextlib.contextmanager
def ended_at_last(folder, *agents):
    """End agents and workers of a test, whatever became of it."""
    agents = list(agents)
    try:
        yield agents
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
        end_workers(folder)


def end_workers(folder):
    for pid in folder.glob("pid *"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid.name.split()[1]), signal.SIGKILL)


def ends_of(folder, agent):
    """Return what every rank says at the end of the training."""
    try:
        assert agent.wait(ENDS_WITHIN_S) == 0, logs(folder)
    except subprocess.TimeoutExpired:
        pytest.fail("it hangs: " + logs(folder))
    ends = [json.loads((folder / f"end {rank}.json").read_text()) for rank in (0, 1)]
    for end in ends:
        assert end["sum"] == [float(sum(range(STEPS + 1)))] * 3
        assert end["saved"] == STEPS
        assert end["begun_at"] >= 1, "it began anew"
    return ends


def waited_for(path, folder, agent):
    until_s = time.monotonic() + ENDS_WITHIN_S
    while not path.exists():
        assert time.monotonic() < until_s, logs(folder)
        assert agent.poll() is None, logs(folder)
        time.sleep(0.05)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "strikes",
    [
        ["worker:1@4"],
        pytest.param(["worker:0@4"], marks=pytest.mark.long),
        pytest.param(["error:1@4"], marks=pytest.mark.long),
        pytest.param(["exit:0@4"], marks=pytest.mark.long),
        pytest.param(["worker:1@4", "worker:0@5", "exit:1@6"], marks=pytest.mark.long),
    ],
)
def test_workers_that_end_are_started_again_and_the_training_goes_on(tmp_path, strikes):
    with ended_at_last(tmp_path, run(tmp_path, *strikes)) as agents:
        for end in ends_of(tmp_path, agents[0]):
            assert end["restarts"] == str(len(strikes))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("what", ["agent", "all"])
def test_a_launcher_that_is_killed_is_started_again(tmp_path, what):
    with ended_at_last(tmp_path, run(tmp_path, f"{what}:1@4")) as agents:
        waited_for(tmp_path / f"kill {what}", tmp_path, agents[0])
        agents[0].kill()
        agents[0].wait()
        if what == "all":
            end_workers(tmp_path)  # else they are still there, and wait for each other
        agents.append(run(tmp_path, f"{what}:1@4"))
        ends_of(tmp_path, agents[1])
