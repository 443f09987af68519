"""Case 17: a failed background save is told even if nobody asks."""

import logging

import pytest
import torch
from forked_scripts import run_scripts

from dcp_checkfreq import Checkpointer, find_latest_valid
from dcp_checkfreq.testing import Fault, FaultyTier, MemoryTier


def test_a_failed_save_is_logged_when_it_happens_not_when_someone_asks(caplog):
    tier = FaultyTier(MemoryTier(), [Fault(verb="write_shard", error=28)])
    with caplog.at_level(logging.ERROR), Checkpointer(tier, {"w": torch.ones(2)}, every=1) as ckpt:
        ckpt.after_step()
        ckpt._saver._running.wait(60)
        told = caplog.text
        ckpt.wait()
    assert "step 1 was not saved" in told
    assert "No space left" in told


def test_it_is_told_once(caplog):
    tier = FaultyTier(MemoryTier(), [Fault(verb="write_shard", error=28)])
    with caplog.at_level(logging.ERROR), Checkpointer(tier, {"w": torch.ones(2)}, every=1) as ckpt:
        ckpt.after_step()
        ckpt.wait()
        ckpt.after_step()
    assert caplog.text.count("step 1 was not saved") == 1


SCRIPTS = {
    "fails": """
import sys, torch
from dcp_checkfreq import Checkpointer
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import Fault, FaultyTier
tier = FaultyTier(LocalTier(sys.argv[1]), [Fault(verb="write_shard", error=28)])
Checkpointer(tier, {"w": torch.ones(2)}, every=1).after_step()
""",
    "works": """
import sys, torch
from dcp_checkfreq import Checkpointer
Checkpointer(sys.argv[1], {"w": torch.ones(2)}, every=1).after_step()
""",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ends")
    said = run_scripts(SCRIPTS, folder)
    return {name: (*said[name], folder / name) for name in SCRIPTS}


def test_a_script_that_never_closes_does_not_end_in_silence(ended):
    _, said, _ = ended["fails"]
    assert "step 1 was not saved" in said
    assert "No space left" in said


def test_a_script_that_never_closes_still_publishes_its_last_save(ended):
    code, said, root = ended["works"]
    assert code == 0, said
    assert find_latest_valid(root, depth="digest").step == 1
