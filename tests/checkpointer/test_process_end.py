"""Issue 10: whatever way a process ends, a save in flight is finished, or loudly not.

Every script is a process of its own. Its save is held until the interpreter has begun to shut
down; from then on executors refuse work and new threads are refused, as Python 3.12 does it.
"""

import errno
import os

import pytest
from forked_scripts import run_scripts

from dcp_checkfreq import find_latest_valid

HEAD = """
import concurrent.futures.thread as executors, errno, logging, os, signal, sys, threading, time
import torch, torch.distributed.checkpoint as dcp
from dcp_checkfreq import Checkpointer, CheckFreqWriter
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import ForwardingTier
logging.basicConfig(level=logging.WARNING)
torch.set_num_threads(1)
root = sys.argv[1]
ending, begun = threading.Event(), threading.Event()

class Held(ForwardingTier):
    error = None
    def child(self, name):
        return Held(self.inner.child(name))
    def write_shard(self, name, pieces, size_bytes):
        begun.set()
        assert ending.wait(100)
        if Held.error is not None:
            raise OSError(Held.error, os.strerror(Held.error))
        super().write_shard(name, pieces, size_bytes)

def no_thread(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def end():
    executors._shutdown = True
    threading.Thread.start = no_thread
    ending.set()

def hook(at_end):  # after ours, so that it comes first
    threading._register_atexit(at_end)

def as_parameter(tensor):
    return torch.nn.Parameter(tensor)

tier = Held(LocalTier(root))
state = {str(i): torch.full((3 << 20,), float(i)) for i in range(6)}  # 72 MiB: copied in threads

def live(at_end=end, **options):
    params = torch.nn.ParameterList(state.values())
    optim = torch.optim.SGD(params.parameters(), lr=0.1)
    ckpt = Checkpointer(tier, {"model": params, "optim": optim}, every=1, **options)
    ckpt.restore()
    for p in params.parameters():
        p.grad = torch.ones_like(p)
    optim.step()
    ckpt.after_step()
    hook(at_end)
    return ckpt

def plain(**options):
    writer = CheckFreqWriter(tier.child("step_1"), **options)
    future = dcp.async_save(dict(state), storage_writer=writer)
    hook(end)
    return future
"""


def newest(root):
    found = find_latest_valid(str(root), depth="digest")
    return None if found is None else found.step


WAYS = {
    "last line": "ckpt = live()",
    "last line blocking": "ckpt = live(snapshot='blocking')",
    "last line staged": "ckpt = live(staging_dir=root + '-local')",
    "dropped": "def main(): live()\nmain()",
    "async_save": "plain()",
    "async_save overlap": "plain(overlap=[torch.optim.SGD(map(as_parameter, state.values()))])",
    "async_save staged": "plain(staging_dir=root + '-local')",
}
FAILING = ["last line", "dropped", "async_save"]
FAILS = "Held.error = errno.EDQUOT\n"
WITHOUT_HOOK = """
import dcp_checkfreq.runtime.process_end as leaving
del leaving.threading._register_atexit
threading._register_atexit = __import__("atexit").register
ckpt = live()
"""
HEARD = """
ending.set()
Held.error = errno.ENOSPC
writer = CheckFreqWriter(tier.child("step_1"))
try:
    dcp.async_save(dict(state), storage_writer=writer).result()
except BaseException as error:
    print("heard", type(error).__name__)
Held.error = None
dcp.async_save(dict(state), storage_writer=writer).result()
"""
CHILDREN = """
import multiprocessing
def child(error):
    global tier, kept
    Held.error = error
    tier = Held(LocalTier(f"{root}/{error}"))
    kept = live()
for error in (None, errno.ENOSPC):
    process = multiprocessing.get_context("fork").Process(target=child, args=(error,))
    process.start()
    process.join()
    print("code", error, process.exitcode)
"""
IMPATIENT = """
held, end = ending, threading.Event()  # the save is never let go
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell has begun with &
def press():
    begun.wait()
    end.wait()
    for _ in range(100):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
threading.Thread(target=press, daemon=True).start()
ckpt = live(at_end=end.set)
"""
LOG_BREAKS = """
class Breaks(logging.Handler):
    def emit(self, record):
        raise ValueError("the log server is gone")
    flush = close = lambda self: 1 / 0
logging.getLogger("dcp_checkfreq").addHandler(Breaks())
class NoOutput:
    def write(self, text): pass
    def flush(self): raise KeyError("no output")
Held.error = errno.EDQUOT
ckpt = live()
sys.stdout = NoOutput()
"""
SCRIPTS = {
    "log breaks": LOG_BREAKS,
    **WAYS,
    **{f"{way} fails": FAILS + WAYS[way] for way in FAILING},
    "without hook": WITHOUT_HOOK,
    "exception": "ckpt = live()\nraise ZeroDivisionError",
    "sys.exit": "ckpt = live()\nsys.exit(3)",
    "heard": HEARD,
    "children": CHILDREN,
    "impatient": IMPATIENT,
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Give each script's exit code, what it said, and its newest whole checkpoint."""
    folder = tmp_path_factory.mktemp("ends")
    said = run_scripts({name: HEAD + body for name, body in SCRIPTS.items()}, folder)
    return {name: (*said[name], newest(folder / name)) for name in SCRIPTS}


@pytest.mark.parametrize("way", WAYS)
def test_a_save_in_flight_at_the_end_of_a_script_is_published(ended, way):
    code, said, step = ended[way]
    assert (code, step) == (0, 1), said


def test_it_is_published_without_the_hook_that_python_keeps_private(ended):
    code, said, step = ended["without hook"]
    assert (code, step) == (0, 1), said


@pytest.mark.parametrize(("way", "expected"), [("exception", 1), ("sys.exit", 3)])
def test_it_is_published_when_the_script_fails_and_the_exit_code_stays(ended, way, expected):
    code, said, step = ended[way]
    assert (code, step) == (expected, 1), said


@pytest.mark.parametrize("way", FAILING)
def test_a_save_that_fails_at_the_end_is_told_and_the_exit_code_is_not_0(ended, way):
    code, said, step = ended[f"{way} fails"]
    assert (code, step) == (22, None), said
    assert "this process ends, and something was not saved" in said
    assert os.strerror(errno.EDQUOT) in said


def test_a_log_that_breaks_changes_neither_the_end_nor_the_exit_code(ended):
    code, said, step = ended["log breaks"]
    assert (code, step) == (22, None), said
    for error in ("the log server is gone", "ZeroDivisionError", "no output"):
        assert error in said, said


def test_a_failure_that_somebody_has_heard_of_is_no_failure_of_the_process(ended):
    code, said, step = ended["heard"]
    assert (code, step) == (0, 1), said
    assert "heard" in said


def test_a_child_of_multiprocessing_finishes_its_save_and_fails_if_it_fails(ended):
    code, said, _ = ended["children"]
    assert code == 0, said
    assert "code None 0" in said, said
    assert f"code {errno.ENOSPC} 22" in said, said


def test_an_impatient_user_is_told_that_the_save_is_lost(ended):
    code, said, step = ended["impatient"]
    assert code not in (0, None), said
    assert "something was not saved: KeyboardInterrupt" in said, said
    assert step is None
