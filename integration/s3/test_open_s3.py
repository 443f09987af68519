"""A checkpoint on a real S3 server is opened; a part of a tensor costs a small request."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_checkfreq import CheckFreqWriter, open_checkpoint

pytestmark = pytest.mark.slow
ROWS = torch.arange(4_000_000, dtype=torch.float32).reshape(4000, 1000)


def test_a_few_rows_of_a_tensor_are_read_and_no_more(proxy, weed, root):
    url = f"{root}/step_1"
    state = {"w": ROWS, "epoch": 3}
    dcp.save(state, storage_writer=CheckFreqWriter(url, storage_options=weed.options))
    with open_checkpoint(url, storage_options=proxy.options) as opened:
        assert opened["w"].shape == ROWS.shape
        before = proxy.received_bytes
        assert torch.equal(opened["w"][100:110], ROWS[100:110])
        assert 40_000 <= proxy.received_bytes - before < 1 << 20  # of 16 MB
        assert opened["epoch"].value() == 3
        assert torch.equal(opened["w"].tensor(), ROWS)
