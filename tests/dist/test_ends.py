"""Issue 10: ranks that end with a save in flight, together or one alone."""

import pytest
from forked_scripts import run_scripts

from dcp_checkfreq import find_latest_valid

pytestmark = [pytest.mark.dist, pytest.mark.slow]

HEAD = """
import logging, os, signal, sys, threading, time
import torch, torch.distributed as dist
from torch.distributed import destroy_process_group as destroy
from dcp_checkfreq import Checkpointer
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import ForwardingTier
logging.basicConfig(level=logging.WARNING)
root = sys.argv[1]
ranks = []
while len(ranks) < 2 and (not ranks or ranks[-1]):
    ranks.append(os.fork())
rank = ranks.index(0) if 0 in ranks else None
if rank is None:
    # The ranks end like scripts do; this process tells how.
    codes = []
    for pid in ranks:
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print("codes", codes, flush=True)
    os._exit(0)
dist.init_process_group("gloo", init_method=f"file://{root}.store", rank=rank, world_size=2)

class Slow(ForwardingTier):
    def child(self, name):
        return Slow(self.inner.child(name))
    def write_shard(self, *args):
        at_work.set()
        ending.wait(5)
        time.sleep(0.3)
        super().write_shard(*args)

ending, at_work = threading.Event(), threading.Event()
params = torch.nn.ParameterList([torch.full((1 << 18,), float(i)) for i in range(6)])
optim = torch.optim.SGD(params.parameters(), lr=0.1)
ckpt = Checkpointer(Slow(LocalTier(root)), {"model": params, "optim": optim}, every=2, timeout_s=20)
ckpt.restore()
def step():
    for p in params.parameters():
        p.grad = torch.ones_like(p)
        dist.all_reduce(p.grad)
    optim.step()
    ckpt.after_step()
step(); step()
at_work.wait()
"""

SCRIPTS = {
    "last line": "ending.set()",
    "destroyed": "ending.set()\ndist.destroy_process_group()",
    "destroyed by what was imported before": "ending.set()\ndestroy()",
    "one leaves": """
ending.set()
if rank == 1:
    sys.exit(5)
begun_s = time.monotonic()
while time.monotonic() < begun_s + 60:
    step()
""",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ends")
    said = run_scripts({name: HEAD + body for name, body in SCRIPTS.items()}, folder)
    newest = {name: find_latest_valid(str(folder / name), depth="digest") for name in SCRIPTS}
    return {name: (said[name][1], newest[name]) for name in SCRIPTS}


@pytest.mark.parametrize("way", ["last line", "destroyed", "destroyed by what was imported before"])
def test_ranks_that_end_together_finish_the_save_in_flight(ended, way):
    said, newest = ended[way]
    assert "codes [0, 0]" in said, said
    assert newest is not None, said
    assert newest.step == 2


def test_a_rank_that_leaves_finishes_its_part_and_the_others_fail_soon(ended):
    said, newest = ended["one leaves"]
    assert newest is not None, said
    assert newest.step == 2, "the save that was in flight is whole"
    assert "codes [1, 5]" in said, said
