"""Case 17: a failed background save is told even if nobody asks."""

import logging
import subprocess
import sys
import textwrap

import pytest
import torch

from dcp_checkfreq import Checkpointer
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


@pytest.mark.slow
def test_a_script_that_never_closes_does_not_end_in_silence(tmp_path):
    code = textwrap.dedent(
        f"""
        import warnings; warnings.simplefilter("ignore")
        import torch
        from dcp_checkfreq import Checkpointer
        from dcp_checkfreq.storage.local.tier import LocalTier
        from dcp_checkfreq.testing import Fault, FaultyTier
        tier = FaultyTier(LocalTier({str(tmp_path)!r}), [Fault(verb="write_shard", error=28)])
        Checkpointer(tier, {{"w": torch.ones(2)}}, every=1).after_step()
        """
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    said = (ended.stdout + ended.stderr).decode()
    assert "step 1 was not saved" in said
    assert "No space left" in said


@pytest.mark.slow
def test_a_script_that_never_closes_still_publishes_its_last_save(tmp_path):
    from dcp_checkfreq import find_latest_valid

    code = textwrap.dedent(
        f"""
        import warnings; warnings.simplefilter("ignore")
        import torch
        from dcp_checkfreq import Checkpointer
        Checkpointer({str(tmp_path)!r}, {{"w": torch.ones(2)}}, every=1).after_step()
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert find_latest_valid(tmp_path, depth="digest").step == 1
