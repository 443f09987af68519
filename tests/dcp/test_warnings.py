"""Issue 10: under `python -W error` our own calls work; what stock's own warn of is the user's."""

import subprocess
import sys

import pytest
from forked_scripts import run_scripts

HEAD = """
import random, sys, warnings
import numpy, torch
import torch.distributed.checkpoint as dcp
from dcp_checkfreq import (
    Checkpointer, CheckFreqLoadPlanner, CheckFreqReader, CheckFreqSavePlanner, CheckFreqWriter,
    find_latest_valid,
)
root = sys.argv[1]
model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600))
optim = torch.optim.AdamW(model.parameters())
odd = {
    "random": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state(),
    "tuple": (torch.ones(3), 1), "half": torch.ones(3).half(), "view": torch.ones(4, 5).t()[1:],
    "conjugated": torch.ones(3, dtype=torch.complex64).conj(), "none": torch.empty(0),
}
def train():
    model(torch.ones(4, 600)).sum().backward()
    optim.step()
    optim.zero_grad()
def run(**options):
    for _ in range(2):
        with Checkpointer(
            root, {"m": model, "o": optim, "odd": dict(odd)}, on_error="raise", **options
        ) as ckpt:
            restored = ckpt.restore()
            for _ in range(4):
                train()
                ckpt.after_step()
        assert all(save.error is None for save in ckpt.history)
    assert restored.step == 4 and find_latest_valid(root, depth="digest").step == 8
state = {"m": model.state_dict(), "o": optim.state_dict(), **odd}
"""
# What stock says of its own callers, in a job of one process.
STOCK = 'warnings.filterwarnings("ignore", message="torch.distributed is .*single process")\n'
SCRIPTS = {
    "overlapped": "run(every=2, snapshot='cpu')",
    "blocking": "run(every=2, snapshot='blocking')",
    "epochs": "run(every=1, steps_per_epoch=4, keep_every=2)",
    "staged": "run(every=2, staging_dir=root + '-local')",
    "shared reads": "run(every=2, share_reads=True)",
    "dcp.save, dcp.load": STOCK
    + """
dcp.save(state, storage_writer=CheckFreqWriter(root))
dcp.load(state, storage_reader=CheckFreqReader(root))
dcp.save(state, storage_writer=CheckFreqWriter(root, overwrite=True, direct_io=False),
         planner=CheckFreqSavePlanner())
dcp.load(state, storage_reader=CheckFreqReader(root, allow_pickle=True),
         planner=CheckFreqLoadPlanner())
""",
    "dcp.async_save": STOCK
    + """
train()
dcp.async_save(state, storage_writer=CheckFreqWriter(root)).result()
writer = CheckFreqWriter(root, overwrite=True, overlap=[optim])
dcp.async_save(state, storage_writer=writer).upload_completion.result()
""",
}


# A process of its own imports everything under `-W error`; those that are forked have imported it.
WHOLE = "overlapped"
ERROR = "import warnings\nwarnings.simplefilter('error')\n"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    forked = {name: ERROR + HEAD + script for name, script in SCRIPTS.items() if name != WHOLE}
    return run_scripts(forked, tmp_path_factory.mktemp("forked"), at_most_s=120)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != WHOLE])
def test_no_warning_comes_out_of_our_own_calls(ended, name):
    code, said = ended[name]
    assert code == 0, said
    assert "Warning" not in said


@pytest.mark.slow
def test_no_warning_comes_out_of_a_process_that_imports_everything(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", HEAD + SCRIPTS[WHOLE], str(tmp_path / "root")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
