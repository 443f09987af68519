"""The plain classes of metadata are DCP's without torch: the same kinds, fields and verdicts."""

import dataclasses
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_checkfreq import CheckFreqWriter
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.format import sealed
from dcp_checkfreq.format.dcp_forms import DCP
from dcp_checkfreq.format.forms import PLAIN

STATE = {
    "w": torch.ones(3, 4, dtype=torch.bfloat16),
    "deep": {"t": torch.zeros(2, 2).t(), "c": torch.zeros(1, 2, 3, 4)},
    "s": torch.tensor(1.5, requires_grad=True),
    "n": [1, "x"],
}


def test_every_dtype_layout_and_memory_format_of_this_torch_is_known():
    for name, kind in DCP.dtypes.items():
        assert PLAIN.dtypes[name].itemsize == kind.itemsize, name
    assert PLAIN.layouts.keys() >= DCP.layouts.keys()
    assert PLAIN.encodings.keys() == DCP.encodings.keys()


@pytest.mark.parametrize("name", ["metadata", "tensor", "value", "chunk", "index", "storage_meta"])
def test_the_classes_have_the_same_fields(name):
    ours = [field.name for field in dataclasses.fields(getattr(PLAIN, name))]
    assert ours == [field.name for field in dataclasses.fields(getattr(DCP, name))]


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_what_was_saved_is_read_alike(tmp_path, writer):
    if writer == "ours":
        dcp.save(STATE, storage_writer=CheckFreqWriter(tmp_path))
    else:
        dcp.save(STATE, checkpoint_id=tmp_path)
    content = (tmp_path / ".metadata").read_bytes()
    theirs, record = metadata_format.load(content, "here")
    plain, again = sealed.load(content, "here", PLAIN)
    assert again == record
    assert plain.planner_data == theirs.planner_data
    assert list(plain.state_dict_metadata) == list(theirs.state_dict_metadata)
    for key, kept in theirs.state_dict_metadata.items():
        one = plain.state_dict_metadata[key]
        if hasattr(kept, "chunks"):
            assert str(one.properties.dtype) == str(kept.properties.dtype)
            assert one.properties.dtype.itemsize == kept.properties.dtype.itemsize
            assert one.size == tuple(kept.size)
            assert [(c.offsets, c.sizes) for c in one.chunks] == [
                (tuple(c.offsets), tuple(c.sizes)) for c in kept.chunks
            ]
    assert [(i.fqn, i.offset, s.relative_path, s.offset, s.length) for i, s in
            plain.storage_data.items()] == [
        (i.fqn, i.offset, s.relative_path, s.offset, s.length)
        for i, s in theirs.storage_data.items()
    ]  # fmt: skip


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None  # to import them is an error
from dcp_checkfreq.recovery.scan import newest_whole
from dcp_checkfreq.storage.open import open_tier
newest, ranking, _ = newest_whole(open_tier(sys.argv[1]), "digest")
print(newest.name, [(one.name, one.reason) for one in ranking.rejected])
"""


def test_a_root_is_scanned_and_its_digests_checked_without_torch(tmp_path):
    for step in (1, 2, 3):
        dcp.save(STATE, storage_writer=CheckFreqWriter(tmp_path / f"step_{step}"))
    (shard,) = (tmp_path / "step_3").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[content.index(STATE["w"].view(torch.uint8).numpy().tobytes())] ^= 1
    shard.write_bytes(content)
    script = WITHOUT_TORCH
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("step_2 [('step_3', ")
    assert "fails its digest" in done.stdout
