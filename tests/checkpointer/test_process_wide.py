"""Issue 10: signal handlers, threads, forks, and several Checkpointers in one process."""

import gc
import json
import logging
import signal
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from forked_scripts import run_scripts

from dcp_checkfreq import Checkpointer, find_latest_valid
from dcp_checkfreq.testing import MemoryTier

HEAD = """
import contextlib, gc, json, logging, os, signal, sys, threading, time
import torch, torch.distributed.checkpoint as dcp
from dcp_checkfreq import Checkpointer, CheckFreqWriter, find_latest_valid
logging.basicConfig(level=logging.ERROR)
root = sys.argv[1]
before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)]

def make(name="run", every=1000, **options):
    model = torch.nn.Linear(400, 400)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optim": optim}
    return optim, Checkpointer(f"{root}/{name}", state, every=every, **options)

def train(optim, ckpt):
    for group in optim.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optim.step()
    ckpt.after_step()

def given_back():
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)] == before
    assert signal.set_wakeup_fd(-1) == -1
    names = [one.name for one in threading.enumerate() if one.name.startswith("checkfreq-pre")]
    assert names == [], names
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
    print("still alive")
"""

ORDERS = {
    "first to last": "a, b, c = pair(); a.close(); b.close(); c.close()",
    "last to first": "a, b, c = pair(); c.close(); b.close(); a.close()",
    "middle first": "a, b, c = pair(); b.close(); a.close(); c.close()",
    "dropped": "a, b, c = pair(); del a, b, c",
    "one dropped": "a, b, c = pair(); del b; c.close(); a.close()",
    "closed elsewhere": (
        "a, b, c = pair()\nfor one in (b, a, c):\n"
        "    t = threading.Thread(target=one.close); t.start(); t.join()\n"
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)"  # it gives itself back
    ),
}
PAIR = """
gc.disable()
def pair():
    made = [make(str(n)) for n in range(3)]
    for optim, ckpt in made:
        ckpt.restore()
        train(optim, ckpt)
    return [ckpt for _, ckpt in made]
"""
TOGETHER = """
(oa, a), (ob, b) = make("a"), make("b")
with a, b:
    for ckpt in RESTORED:
        ckpt.restore()
    for step in range(1, 500):
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            BODY
        except SystemExit as end:
            saved = [a.step, a.last_saved_step, b.step, b.last_saved_step]
            print("saved", json.dumps(saved), flush=True)
            raise
        time.sleep(0.05)
"""
FORKED = """
optim, ckpt = make(every=1, on_error="raise")
def child(work):
    pid = os.fork()
    if not pid:
        work()  # and on to the end of the script
        sys.exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def saves_itself():
    for p in optim.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optim.step()  # what the parent copies is not this
    state = {"x": torch.ones(6 << 20), "y": torch.ones(6 << 20)}
    dcp.save(state, storage_writer=CheckFreqWriter(root + "/own/step_1"))
    dcp.async_save(state, storage_writer=CheckFreqWriter(root + "/own/step_2")).result()
    _, own = make("child", every=1)
    with own:
        own.restore()
        own.after_step()
    try:
        ckpt.after_step()
    except Exception as error:
        print("refused", type(error).__name__, error, flush=True)
with ckpt:
    ckpt.restore()
    for work in (lambda: None, saves_itself, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        train(optim, ckpt)
        print("child", child(work), flush=True)
        assert os.path.exists(root + "/run/.checkfreq/lease.json"), "the lease is the parent's"
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    train(optim, ckpt)
print("parent", find_latest_valid(root + "/run", depth="digest").step)
print("own", find_latest_valid(root + "/own", depth="digest").step)
print("of child", find_latest_valid(root + "/child", depth="digest").step)
"""
IN_A_THREAD = """
def job():
    optim, ckpt = make(grace_s=20)
    with ckpt:
        for step in range(1, 1000):
            if step == 5:
                threading.Thread(target=ckpt.preempt).start()
            try:
                train(optim, ckpt)
            except SystemExit as end:
                print("stopped", ckpt.step == ckpt.last_saved_step < 900, end.code, flush=True)
                return
            time.sleep(0.02)
thread = threading.Thread(target=job)
thread.start()
thread.join()
"""


def together(restored, body):
    return TOGETHER.replace("RESTORED", restored).replace("BODY", body)


SCRIPTS = {
    **{name: PAIR + body + "\ngiven_back()" for name, body in ORDERS.items()},
    "same order": together("(a, b)", "train(oa, a); train(ob, b)"),
    "other order": together("(a, b)", "train(ob, b); train(oa, a)"),
    "one is slow": together("(b, a)", "train(oa, a)\n            if step % 6 == 0: train(ob, b)"),
    "forked": FORKED,
    "in a thread": IN_A_THREAD,
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ends")
    said = run_scripts({name: HEAD + body for name, body in SCRIPTS.items()}, folder)
    return {name: (*said[name], folder / name) for name in SCRIPTS}


@pytest.mark.parametrize("order", ORDERS)
def test_signals_are_given_back_in_any_order_of_closing(ended, order):
    code, said, _ = ended[order]
    assert code == -signal.SIGTERM, said
    assert "still alive" not in said


@pytest.mark.parametrize("way", ["same order", "other order"])
def test_two_that_step_together_stop_at_the_same_step(ended, way):
    code, said, folder = ended[way]
    assert code == 0, said
    a_step, a_saved, b_step, b_saved = json.loads(said.partition("saved ")[2].splitlines()[0])
    assert a_step == a_saved == b_step == b_saved >= 7
    assert find_latest_valid(str(folder / "a")).step == find_latest_valid(str(folder / "b")).step


def test_none_ends_the_process_before_a_slower_one_has_saved(ended):
    code, said, _ = ended["one is slow"]
    assert code == 0, said
    a_step, a_saved, b_step, b_saved = json.loads(said.partition("saved ")[2].splitlines()[0])
    assert b_step == b_saved >= 2
    assert a_step == a_saved == 6 * b_step, "the fast one is saved again until the other comes"


def test_a_forked_child_harms_nothing_and_can_save(ended):
    code, said, _ = ended["forked"]
    assert code == 0, said
    assert [line for line in said.splitlines() if line.startswith("child")] == [
        "child 7",
        "child 7",
        f"child {-signal.SIGTERM}",
    ], said
    assert "refused SaveFailed" in said
    assert "parent 4" in said
    assert "own 2" in said
    assert "of child 1" in said


def test_a_job_in_a_thread_is_told_to_stop_by_a_call(ended):
    code, said, _ = ended["in a thread"]
    assert code == 0, said
    assert "stopped True 0" in said


@pytest.mark.slow
def test_a_dropped_checkpointer_is_collected_at_once_with_all_it_had():
    before = set(threading.enumerate())
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)]
    root = MemoryTier()
    gc.collect()
    gc.disable()
    try:
        model = torch.nn.Linear(50, 50)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        ckpt = Checkpointer(root, {"model": model, "optim": optim}, every=1)
        ckpt.restore()
        for _ in range(3):
            model(torch.ones(50)).sum().backward()
            optim.step()
            ckpt.after_step()
        started = set(threading.enumerate()) - before
        gone = [weakref.ref(one) for one in (ckpt, model, optim)]
        saver = ckpt._saver
        del ckpt
        assert gone[0]() is None
        assert not optim._optimizer_step_pre_hooks
        assert not optim._optimizer_step_post_hooks
        saver.wait_at_exit()
        del saver, model, optim
        gc.collect()  # torch's own get_state_dict, asked once, leaves a cycle
        assert [ref() for ref in gone] == [None] * 3
        for thread in started:
            if thread.name.startswith(("checkfreq-save", "checkfreq-preempt")):
                thread.join(10)
                assert not thread.is_alive()
        assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)] == handlers
        names = [entry.name for entry in root.child(".checkfreq").list()]
        assert "lease.json" not in names
        assert find_latest_valid(root).step == 3
    finally:
        gc.enable()


def test_a_second_one_on_the_same_root_says_so(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    with Checkpointer(tmp_path / "a", {"x": 1}), Checkpointer(tmp_path / "b", {"x": 1}):
        assert "another Checkpointer" not in caplog.text
        with Checkpointer(tmp_path / "a", {"x": 1}):
            assert "another Checkpointer of this process saves there" in caplog.text
        caplog.clear()
    with Checkpointer(tmp_path / "a", {"x": 1}):
        assert "another Checkpointer" not in caplog.text


CLOSES_ALL = """
import os, sys, time
import torch
from dcp_checkfreq import Checkpointer

ckpt = Checkpointer(sys.argv[1] + "/run", {"w": torch.zeros(3)}, every=1000)
ckpt.restore()
ckpt.after_step()  # the watch begins
for fd in range(3, 100):  # what daemons do
    try:
        os.close(fd)
    except OSError:
        pass
path = sys.argv[1] + "/users"
open(path, "wb").write(b"x" * 1000)
users = [os.open(path, os.O_RDWR) for _ in range(40)]  # the pipe's numbers are among them
time.sleep(1)  # the watch has looked
ckpt.close()
assert [os.lseek(fd, 0, os.SEEK_CUR) for fd in users] == [0] * 40, "somebody has read from them"
for fd in users:
    os.close(fd)  # and nobody has closed them
"""


@pytest.mark.slow
def test_files_of_the_user_that_have_taken_the_numbers_of_closed_ones_are_let_be(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CLOSES_ALL, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
