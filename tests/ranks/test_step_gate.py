"""The gate: no step passes while it is held, and no two ranks act at different steps."""

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcp_checkfreq import Checkpointer
from dcp_checkfreq.ranks.step_gate import Gate
from dcp_checkfreq.testing import MemoryTier


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def frequent_switches():
    """Let threads take turns at nearly every instruction."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_steps_pass_freely_while_nobody_holds():
    gate = Gate()
    for step in (1, 2, 7):
        gate.pass_step(step)
    assert gate.hold() == 7


def test_before_the_first_step_the_last_one_is_0_or_the_restored_one():
    gate = Gate()
    assert gate.hold() == 0
    gate.release()
    gate.start_from(41)
    assert gate.hold() == 41


def test_a_step_waits_until_the_last_hold_is_released(pool):
    gate = Gate()
    gate.pass_step(1)
    assert [gate.hold(), gate.hold()] == [1, 1]
    second = pool.submit(gate.pass_step, 2)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            second.result(0.05)
        assert gate.hold() == 1
        gate.release()
        gate.release()
    second.result(10)
    assert gate.hold() == 2


def test_no_step_ever_passes_between_a_hold_and_its_release(frequent_switches, pool):
    gate, passed, stop = Gate(), [0], threading.Event()

    def train():
        while not stop.is_set():
            gate.pass_step(passed[0] + 1)
            passed[0] += 1  # behind the gate by at most one

    def hold(seed):
        chance, seen = random.Random(seed), []
        for _ in range(300):
            last = gate.hold()
            for _ in range(chance.randrange(20)):
                assert passed[0] in (last - 1, last)
            assert gate.hold() == last
            gate.release()
            gate.release()
            seen.append(last)
        return seen

    training = pool.submit(train)
    holders = [pool.submit(hold, seed) for seed in range(4)]
    seen = [holder.result(60) for holder in holders]
    stop.set()
    training.result(10)
    assert all(steps == sorted(steps) for steps in seen)
    assert gate._holds == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_meet_at_their_gates_all_act_at_the_same_step(frequent_switches, pool, seed):
    """What `Saver` does, with threads as ranks: hold, exchange, act at the first step after all."""
    ranks, meetings = 3, 40
    chance = random.Random(seed)
    gates = [Gate() for _ in range(ranks)]
    told = [[None] * meetings for _ in range(ranks)]
    acted = [[None] * meetings for _ in range(ranks)]
    exchange = threading.Barrier(ranks)
    values = [0] * ranks
    stop = threading.Event()
    pauses = [chance.randrange(1, 400) for _ in range(ranks)]

    def train(rank):
        step = 0
        while not (stop.is_set() and None not in acted[rank]):
            for _ in range(pauses[rank]):
                pass
            step += 1
            gates[rank].pass_step(step)
            for number, at in enumerate(told[rank]):
                if at is not None and step >= at and acted[rank][number] is None:
                    acted[rank][number] = step

    def meet(rank):
        for number in range(meetings):
            exchange.wait(60)
            values[rank] = gates[rank].hold()
            exchange.wait(60)
            told[rank][number] = max(values) + 1
            gates[rank].release()

    trainings = [pool.submit(train, rank) for rank in range(ranks)]
    for meeting in [pool.submit(meet, rank) for rank in range(ranks)]:
        meeting.result(60)
    stop.set()
    for training in trainings:
        training.result(60)
    assert acted[0] == acted[1] == acted[2]


def test_a_save_that_has_ended_is_known_before_the_gate_opens(monkeypatch):
    """Else the step that all ranks were to act at could pass on one of them without it."""
    held, opened = threading.Event(), threading.Event()
    real_hold, real_release = Gate.hold, Gate.release

    def hold(self):
        passed = real_hold(self)
        held.set()
        return passed

    def slow_release(self):
        real_release(self)
        opened.wait(10)  # the saving thread is held up here while training goes on

    monkeypatch.setattr(Gate, "hold", hold)
    monkeypatch.setattr(Gate, "release", slow_release)
    with Checkpointer(MemoryTier(), {"x": 1}, every=3, preempt_signals=()) as ckpt:
        for _ in range(3):
            ckpt.after_step()
        assert held.wait(30)
        ckpt.after_step()
        assert (ckpt.step, ckpt.last_saved_step) == (4, 3)
        opened.set()
