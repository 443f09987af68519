"""Case 05: a signal and one process; and the ranks' talk, with all ranks in one process."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch.distributed as dist

from dcp_checkfreq.ranks.preemption import PreemptionWatch
from dcp_checkfreq.ranks.step_gate import Gate
from dcp_checkfreq.runtime.clock import SystemClock
from dcp_checkfreq.testing import ManualClock

POLL_S = 0.01
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def until(condition, what, timeout_s=30.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what}"
        time.sleep(POLL_S)


def handlers():
    return [signal.getsignal(signum) for signum in SIGNALS]


def watch_of(gate, **options):
    options = {"grace_s": 1000.0, "clock": SystemClock(), "poll_s": POLL_S} | options
    return contextlib.closing(PreemptionWatch(gate, **options))


def send(signum=signal.SIGTERM):
    os.kill(os.getpid(), signum)


@pytest.fixture(autouse=True)
def _signals_stay_as_they_were():
    before, wakeup = handlers(), signal.set_wakeup_fd(-1)
    yield
    left = signal.set_wakeup_fd(wakeup)
    assert handlers() == before
    assert left == -1


@pytest.fixture
def threads(new_threads):
    return lambda: new_threads("checkfreq-preempt")


def at_the_gate(gate, step):
    """Start a training thread that takes one step, and leave it a moment to pass."""
    training = threading.Thread(target=gate.pass_step, args=[step], daemon=True)
    training.start()
    training.join(0.3)
    return training


def passes(gate, step):
    return not at_the_gate(gate, step).is_alive()


# --- one process ---


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_stops_the_job_at_the_step_after_the_last_one(signum):
    gate, clock = Gate(), ManualClock(monotonic_s=50.0)
    gate.pass_step(6)
    with watch_of(gate, clock=clock, grace_s=30.0) as watch:
        watch.start()
        assert watch.stop_at is None
        assert watch.deadline_s is None
        send(signum)
        until(lambda: watch.stop_at is not None, "stop_at")
        assert watch.stop_at == 7
        assert watch.deadline_s == 80.0
        assert passes(gate, 7), "the gate is open again"


def test_without_a_signal_nothing_happens(threads):
    with watch_of(Gate()) as watch:
        watch.start()
        time.sleep(10 * POLL_S)
        assert watch.stop_at is None
    assert threads() == []


def test_a_second_signal_changes_nothing(caplog):
    gate, clock = Gate(), ManualClock()
    gate.pass_step(6)
    with watch_of(gate, clock=clock, grace_s=30.0) as watch:
        watch.start()
        send()
        until(lambda: watch.stop_at is not None, "stop_at")
        gate.pass_step(7)
        clock.advance(10)
        send(signal.SIGUSR1)
        until(lambda: "SIGUSR1: already stopping" in caplog.text, "a line in the log")
        assert (watch.stop_at, watch.deadline_s) == (7, 30.0)


def test_handlers_are_restored_and_starting_and_closing_twice_is_harmless(threads):
    before = handlers()
    with watch_of(Gate()) as watch:
        watch.start()
        during = handlers()
        watch.start()
        assert handlers() == during != before
        assert threads() == ["checkfreq-preempt"]
        watch.close()
        assert handlers() == before
        assert threads() == []
    watch.start()
    assert handlers() == before, "a closed watch stays closed"


def test_closing_a_watch_that_was_never_started_does_nothing():
    before = handlers()
    PreemptionWatch(Gate(), clock=SystemClock(), grace_s=30.0).close()
    assert handlers() == before


def test_a_handler_of_the_user_is_named_and_comes_back(caplog):
    heard = []

    def of_the_user(signum, frame):
        heard.append(signum)

    old = signal.signal(signal.SIGTERM, of_the_user)
    try:
        with watch_of(Gate()) as watch:
            watch.start()
            assert "of_the_user" in caplog.text
            assert "SIGUSR1" not in caplog.text, "the default is nothing to speak of"
            send()
            until(lambda: watch.stop_at is not None, "stop_at")
            assert heard == []
        send()
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, old)


def test_a_handler_that_came_after_ours_stays():
    def later(signum, frame):
        pass

    old = signal.getsignal(signal.SIGTERM)
    try:
        with watch_of(Gate()) as watch:
            watch.start()
            signal.signal(signal.SIGTERM, later)
        assert signal.getsignal(signal.SIGTERM) is later
    finally:
        signal.signal(signal.SIGTERM, old)


def test_a_handler_that_is_not_pythons_is_left_alone(caplog, monkeypatch):
    # A program that embeds Python can have one. Here only what Python says of it is imitated.
    before = handlers()
    with watch_of(Gate(), signals=[signal.SIGTERM]) as watch:
        monkeypatch.setattr(signal, "getsignal", lambda signum: None)
        watch.start()
        monkeypatch.undo()
        assert handlers() == before
        assert "SIGTERM has a handler that is not Python's" in caplog.text


def test_a_signal_that_cannot_be_handled_is_refused_and_nothing_stays_installed():
    before = handlers()
    with watch_of(Gate(), signals=[signal.SIGTERM, signal.SIGKILL]) as watch:
        with pytest.raises(OSError, match="Invalid argument"):
            watch.start()
        assert handlers() == before


def test_the_wakeup_pipe_of_an_event_loop_is_left_to_it():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    try:
        with watch_of(Gate()) as watch:
            watch.start()
            send()
            until(lambda: watch.stop_at is not None, "stop_at")
            assert os.read(reading, 10) == bytes([signal.SIGTERM])
        assert signal.set_wakeup_fd(-1) == writing
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reading)
        os.close(writing)


def test_signals_of_others_do_not_count():
    old = signal.signal(signal.SIGUSR2, lambda signum, frame: None)
    try:
        with watch_of(Gate()) as watch:
            watch.start()
            send(signal.SIGUSR2)
            time.sleep(10 * POLL_S)
            assert watch.stop_at is None
    finally:
        signal.signal(signal.SIGUSR2, old)


def test_who_has_taken_up_the_order_is_left_alone_after_the_deadline(caplog):
    clock, heard = ManualClock(), []
    old = signal.signal(signal.SIGTERM, lambda signum, frame: heard.append(signum))
    try:
        with watch_of(Gate(), clock=clock, grace_s=30.0) as watch:
            watch.start()
            send()
            until(lambda: watch.stop_at is not None, "stop_at")
            watch.taken_up()
            clock.advance(1000)
            time.sleep(10 * POLL_S)
            assert heard == []
            assert "took up" not in caplog.text
    finally:
        signal.signal(signal.SIGTERM, old)


def test_at_the_deadline_the_handler_of_the_user_gets_the_signal(caplog):
    clock, heard = ManualClock(), []
    old = signal.signal(signal.SIGTERM, lambda signum, frame: heard.append(signum))
    try:
        last = "the last published step is 40"
        with watch_of(Gate(), clock=clock, grace_s=30.0, describe=lambda: last) as watch:
            watch.start()
            send()
            until(lambda: watch.stop_at is not None, "stop_at")
            clock.advance(29.9)
            time.sleep(10 * POLL_S)
            assert heard == []
            clock.advance(0.2)
            until(lambda: heard, "the signal")
            assert "within 30 s" in caplog.text
            assert last in caplog.text
    finally:
        signal.signal(signal.SIGTERM, old)


@pytest.mark.parametrize("name", ["grace_s", "agree_timeout_s", "poll_s"])
def test_a_duration_that_is_not_positive_is_refused(name):
    with pytest.raises(ValueError, match="positive"):
        PreemptionWatch(Gate(), clock=SystemClock(), **{"grace_s": 30.0, name: 0.0})


def test_several_ranks_without_a_store_are_refused():
    with pytest.raises(ValueError, match="3 ranks"):
        PreemptionWatch(Gate(), clock=SystemClock(), grace_s=30.0, world_size=3)


# --- processes that end ---

PROLOGUE = """
import logging, os, signal, sys, threading, time
import torch.distributed as dist
from dcp_checkfreq.runtime.clock import SystemClock
from dcp_checkfreq.ranks.step_gate import Gate
from dcp_checkfreq.ranks.preemption import PreemptionWatch

logging.basicConfig(stream=sys.stdout)
watch = PreemptionWatch(Gate(), clock=SystemClock(), grace_s=0.3, poll_s=0.01)
me = os.getpid()
"""


def ends(body):
    """Run a script and return its exit code and what it printed."""
    script = PROLOGUE + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_a_process_that_takes_no_step_dies_by_the_signal_at_the_deadline():
    code, said = ends("""
        watch.start()
        os.kill(me, signal.SIGTERM)
        time.sleep(50)
    """)
    assert code == -signal.SIGTERM
    assert "no step took up the order to stop within 0.3 s" in said


@pytest.mark.slow
def test_a_process_that_is_stuck_outside_of_the_interpreter_ends_too():
    code, said = ends("""
        watch.start()
        threading.Timer(0.2, os.kill, [me, signal.SIGTERM]).start()
        dist.HashStore().get("what nobody ever sets")
    """)
    assert code == 128 + signal.SIGTERM
    assert "no step took up" in said


@pytest.mark.slow
def test_closed_by_another_thread_the_signal_does_what_it_did_before():
    code, said = ends("""
        watch.start()
        closing = threading.Thread(target=watch.close)
        closing.start()
        closing.join()
        os.kill(me, signal.SIGTERM)
        time.sleep(50)
    """)
    assert code == -signal.SIGTERM
    assert said == ""


@pytest.mark.slow
def test_a_forked_worker_dies_by_the_signal_and_does_not_stop_the_job():
    code, said = ends("""
        watch.start()
        worker = os.fork()
        if worker == 0:
            time.sleep(50)
            os._exit(1)
        time.sleep(0.2)
        os.kill(worker, signal.SIGTERM)
        status = os.waitpid(worker, 0)[1]
        time.sleep(0.2)
        print("worker", os.waitstatus_to_exitcode(status), "stop", watch.stop_at)
        watch.close()
    """)
    assert (code, said) == (0, "worker -15 stop None\n")


# --- several ranks in one process ---


class Ranks:
    """A gate and a watch for each rank; only rank 1 hears signals."""

    def __init__(self, stores, steps, **options):
        self.gates = [Gate() for _ in steps]
        self.watches = [
            PreemptionWatch(
                gate,
                rank=rank,
                world_size=len(steps),
                store=store,
                key="key",
                signals=SIGNALS if rank == 1 else (),
                **{"clock": SystemClock(), "poll_s": POLL_S, "grace_s": 1000.0} | options,
            )
            for rank, (gate, store) in enumerate(zip(self.gates, stores, strict=True))
        ]
        for gate, step in zip(self.gates, steps, strict=True):
            gate.start_from(step)

    def __enter__(self):
        for watch in self.watches:
            watch.start()
        return self

    def __exit__(self, *_):
        for watch in self.watches:
            watch.close()

    def stops(self):
        return [watch.stop_at for watch in self.watches]


class Stalling:
    """A store whose calls hang from `stall`, or once a key was written, until `go_on`."""

    def __init__(self, store, after=None):
        self._store, self._after = store, after
        self._goes = threading.Event()
        self._goes.set()
        self.hangs = threading.Event()

    def stall(self):
        self._goes.clear()

    def go_on(self):
        self._goes.set()

    def __getattr__(self, verb):
        def call(*args):
            if not self._goes.is_set():
                self.hangs.set()
            assert self._goes.wait(60)
            answer = getattr(self._store, verb)(*args)
            if (verb, args[0]) == ("set", self._after):
                self.stall()
            return answer

        return call


@pytest.fixture(params=["hash", "file"])
def store(request, tmp_path):
    return dist.HashStore() if request.param == "hash" else dist.FileStore(f"{tmp_path}/s", 1)


def test_all_ranks_stop_after_the_last_step_of_the_fastest(store):
    with Ranks([store] * 3, steps=[4, 7, 5]) as ranks:
        send()
        until(lambda: None not in ranks.stops(), "an agreement")
        assert ranks.stops() == [8, 8, 8]
        assert all(passes(gate, 8) for gate in ranks.gates)


def test_a_rank_without_handlers_hears_of_the_others_signal(caplog):
    store, gates = dist.HashStore(), [Gate(), Gate()]
    options = {"world_size": 2, "store": store, "key": "key"}
    with (
        watch_of(gates[0], rank=0, **options) as deaf,
        watch_of(gates[1], rank=1, **options) as hearing,
    ):
        starting = threading.Thread(target=deaf.start)
        starting.start()
        starting.join()
        assert "outside of the main thread" in caplog.text
        hearing.start()
        send()
        until(lambda: deaf.stop_at is not None, "stop_at")
        assert "SIGTERM on rank 1: this job will be ended" in caplog.text


def test_a_rank_that_only_heard_does_nothing_at_the_deadline(caplog):
    clock, heard = ManualClock(), []
    old = signal.signal(signal.SIGTERM, lambda signum, frame: heard.append(signum))
    try:
        with Ranks([dist.HashStore()] * 2, steps=[1, 1], clock=clock) as ranks:
            send()
            until(lambda: None not in ranks.stops(), "an agreement")
            ranks.watches[1].taken_up()
            clock.advance(5000)
            time.sleep(10 * POLL_S)
            assert heard == []
            assert "took up" not in caplog.text
    finally:
        signal.signal(signal.SIGTERM, old)


def test_no_rank_stops_if_one_does_not_answer(caplog):
    clock, store = ManualClock(), dist.HashStore()
    silent = Stalling(store)
    with Ranks([store, store, silent], [4, 4, 4], clock=clock, describe=lambda: "at 3") as ranks:
        silent.stall()
        silent.hangs.wait(20)
        send()
        until(lambda: store.check(["key/passed/0", "key/passed/1"]), "two answers")
        held = at_the_gate(ranks.gates[0], 5)
        assert held.is_alive(), "held while the ranks talk"
        clock.advance(10)
        until(lambda: caplog.text.count("there will be no last save") == 2, "two errors")
        assert "no answer from ranks [2] within 10 s. at 3" in caplog.text
        assert passes(ranks.gates[1], 5)
        held.join(20)
        assert not held.is_alive()
        silent.go_on()
        until(lambda: caplog.text.count("there will be no last save") == 3, "a third error")
        assert ranks.stops() == [None, None, None]
        assert passes(ranks.gates[2], 5)


class KnownClock(ManualClock):
    threads = frozenset()  # that have looked at it

    def monotonic_s(self):
        now_s = super().monotonic_s()
        self.threads |= {threading.current_thread().name}
        return now_s


@pytest.mark.parametrize(("grace_s", "timeout_s"), [(1000.0, 10.0), (12.0, 4.0)])
def test_ranks_wait_for_each_other_for_a_third_of_the_grace_at_most(caplog, grace_s, timeout_s):
    gate, clock, store = Gate(), KnownClock(), dist.HashStore()
    with watch_of(gate, world_size=2, store=store, clock=clock, grace_s=grace_s) as watch:
        watch.start()
        send()
        until(lambda: "checkfreq-preempt-ask" in clock.threads, "a deadline")
        clock.advance(timeout_s + 1)
        until(lambda: f"no answer from ranks [1] within {timeout_s:g} s" in caplog.text, "an error")
        watch.taken_up()  # nothing is to be ended here


class Overtaken:
    """A store in which another rank gives up just before rank 0 writes its decision."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, verb):
        def call(*args):
            if (verb, args[0]) == ("get", "key/passed/1"):
                self._store.compare_set("key/decision", "", "rank 1 has waited too long")
            return getattr(self._store, verb)(*args)

        return call


def test_the_first_decision_counts_also_for_rank_0(caplog):
    store = dist.HashStore()
    with Ranks([Overtaken(store), store], [4, 4]) as ranks:
        send()
        until(lambda: caplog.text.count("rank 1 has waited too long") == 2, "two errors")
        assert ranks.stops() == [None, None]


def test_a_store_that_hangs_holds_up_no_step_for_long(caplog, threads):
    server = dist.HashStore()
    stores = [Stalling(server) for _ in range(2)]
    with Ranks(stores, [4, 4], agree_timeout_s=0.4) as ranks:
        stores[1].stall()
        stores[1].hangs.wait(20)
        send()
        until(lambda: "the store does not answer" in caplog.text, "an error")
        assert passes(ranks.gates[1], 5)
        stores[1].go_on()
        until(lambda: threads().count("checkfreq-preempt-ask") == 1, "the end of a thread")
        assert ranks.stops() == [None, None]
        assert not server.check(["key/passed/1"]), "a step that does not count was not told"


@pytest.mark.slow
def test_a_rank_that_has_told_its_step_waits_for_the_decision():
    server = dist.HashStore()
    hanging = Stalling(server, after="key/passed/1")
    with Ranks([server, hanging], [4, 4], agree_timeout_s=0.4) as ranks:
        # Rank 0 hears of the signal by other means, while rank 1 hangs after its answer.
        send()
        until(hanging.hangs.is_set, "rank 1 hangs")
        server.set("key/announced", "SIGTERM on rank 1")
        until(lambda: ranks.watches[0].stop_at == 5, "a decision")
        held = at_the_gate(ranks.gates[1], 5)
        held.join(0.8)
        assert held.is_alive(), "held, though the timeout is over"
        hanging.go_on()
        held.join(20)
        assert not held.is_alive()
        assert ranks.watches[1].stop_at == 5, "known before the step passes"


@pytest.mark.slow
def test_a_store_that_hangs_for_ever_holds_up_a_step_until_the_deadline(caplog):
    server, handled = dist.HashStore(), []
    hanging = Stalling(server, after="key/passed/1")
    old = signal.signal(signal.SIGTERM, lambda signum, frame: handled.append(signum))
    try:
        with Ranks([server, hanging], [4, 4], agree_timeout_s=0.2, grace_s=1.0) as ranks:
            send()
            until(lambda: "the store does not answer" in caplog.text, "an error")
            assert passes(ranks.gates[1], 5)
            assert ranks.watches[1].stop_at is None
            until(lambda: handled, "the signal does what it did before")
            hanging.go_on()
    finally:
        signal.signal(signal.SIGTERM, old)


class Failing:
    """A store whose server has gone."""

    def __getattr__(self, verb):
        def call(*args):
            raise dist.DistNetworkError("connection reset")

        return call


def test_a_store_that_fails_is_reported_once_and_holds_up_nothing(caplog):
    gate = Gate()
    with watch_of(gate, world_size=2, store=Failing()) as watch:
        watch.start()
        until(lambda: "not heard any more: connection reset" in caplog.text, "a warning")
        send()
        until(lambda: "there will be no last save" in caplog.text, "an error")
        assert watch.stop_at is None
        assert passes(gate, 1)
    assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == 1


def test_closing_while_the_ranks_talk_ends_the_threads_and_opens_the_gate(caplog, threads):
    gate, store = Gate(), dist.HashStore()
    with watch_of(gate, world_size=2, store=store) as watch:
        watch.start()
        send()
        until(lambda: store.check(["checkfreq/preemption/passed/0"]), "an answer")
        watch.close()
        assert threads() == []
        assert passes(gate, 1)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
