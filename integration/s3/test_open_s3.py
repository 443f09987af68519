"""A checkpoint on a real S3 server is opened; a part of a tensor costs a small request."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from dcp_checkfreq import (
    CheckFreqWriter,
    export_safetensors,
    export_torch_save,
    find_latest_valid,
    import_files,
    open_checkpoint,
)

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


def test_a_model_is_exported_from_the_server_and_to_it(weed, root, stored, tmp_path):
    state = {"model": {"w": ROWS[:50].clone(), "b": torch.ones(3)}}
    saved = f"{root}/run/step_1"
    dcp.save(state, storage_writer=CheckFreqWriter(saved, storage_options=weed.options))
    found = find_latest_valid(f"{root}/run", storage_options=weed.options)
    options = {"prefix": "model.", "storage_options": weed.options}
    export_safetensors(found, tmp_path / "here", **options)
    made = export_safetensors(found, f"{root}/there", max_file_bytes=1, **options)
    assert set(stored(f"{root}/there")) == {*made.files, "model.safetensors.index.json"}
    assert len(made.files) == 2
    assert torch.equal(load_file(tmp_path / "here" / "model.safetensors")["w"], ROWS[:50])
    export_torch_save(found, tmp_path / "x.pt", **options)
    assert torch.equal(torch.load(tmp_path / "x.pt")["w"], ROWS[:50])
    import_files(tmp_path / "here", f"{root}/again", storage_options=weed.options)
    with open_checkpoint(f"{root}/again", storage_options=weed.options) as opened:
        assert torch.equal(opened["model.w"].tensor(), ROWS[:50])
