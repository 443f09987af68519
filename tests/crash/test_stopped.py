"""A real process that is stopped in a save, while another one cleans up its root."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_checkfreq import CheckFreqReader, find_latest_valid
from dcp_checkfreq.recovery.clean import clean_root
from dcp_checkfreq.storage.local.tier import LocalTier

pytestmark = pytest.mark.crash

CHILD = Path(__file__).with_name("stopped_child.py")
MUCH_LATER_S = 1e11


@pytest.mark.parametrize("verb", ["write_shard", "list", "create"])
def test_a_save_that_was_stopped_and_cleaned_away_fails_when_it_goes_on(tmp_path, verb):
    child = subprocess.Popen(
        [sys.executable, str(CHILD), str(tmp_path), verb], stdout=subprocess.PIPE, text=True
    )
    try:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "it has ended before it came to that call"
        removed = clean_root(LocalTier(tmp_path), now_s=MUCH_LATER_S)
        assert any(path.endswith(".tmp") for path in removed), removed
        child.send_signal(signal.SIGCONT)
        said, _ = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 3, said
    assert "Failed" in said
    found = find_latest_valid(tmp_path, depth="digest")
    assert (found.step, [r.reason[:13] for r in found.rejected]) in (
        (1, []),
        (1, ["not published"]),
    )
    state = {"w": torch.zeros(1000)}
    dcp.load(state, storage_reader=CheckFreqReader(found))
    assert bool((state["w"] == 1).all())
