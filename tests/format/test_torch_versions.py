"""Every torch reads what any torch wrote with us: `TensorProperties` always has five fields.

torch 2.15 gives it a sixth, the strides, and no torch before reads that. Its class and the one of
2.3 to 2.14 are written out here, so that either way is tried with whatever torch is installed.
"""

import dataclasses
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.metadata as stock_metadata
from metadata_tools import small_metadata, small_record
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from dcp_checkfreq import CheckFreqReader, CheckFreqSavePlanner, CheckFreqWriter
from dcp_checkfreq.commit.assemble import assemble
from dcp_checkfreq.format import dcp_forms
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.shards.layout import RankReport

CONTIGUOUS = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT


@dataclasses.dataclass
class Five:
    """What torch 2.3 to 2.14 have: with any other number of fields they fail."""

    dtype: torch.dtype = torch.float32
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    def __getstate__(self):
        return self.dtype, self.layout, self.requires_grad, CONTIGUOUS, self.pin_memory

    def __setstate__(self, state):
        self.dtype, self.layout, self.requires_grad, _, self.pin_memory = state


@dataclasses.dataclass
class Six(Five):
    """What torch 2.15 has."""

    strides: tuple[int, ...] | None = None

    def __getstate__(self):
        return (*super().__getstate__(), self.strides)

    def __setstate__(self, state):
        super().__setstate__(state[:5])
        self.strides = None if len(state) == 5 else state[5]


for kind in (Five, Six):
    kind.__module__ = "torch.distributed.checkpoint.metadata"
    kind.__name__ = kind.__qualname__ = "TensorProperties"


@pytest.fixture(params=[Five, Six, None], ids=["five", "six", "installed"])
def written(request, monkeypatch):
    """Metadata as a torch with this class has it, and the class."""
    kind = request.param or stock_metadata.TensorProperties
    monkeypatch.setattr(stock_metadata, "TensorProperties", kind)
    monkeypatch.setattr(metadata_format, "TensorProperties", kind)
    metadata = small_metadata()
    properties = kind(dtype=torch.bfloat16, requires_grad=True)
    if hasattr(properties, "strides"):
        properties.strides = (1, 3)
    metadata.state_dict_metadata["model.weight"].properties = properties
    return metadata


def read_with(data, kind):
    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            return kind if name == "TensorProperties" else super().find_class(module, name)

    return Reader(io.BytesIO(data)).load().state_dict_metadata["model.weight"].properties


@pytest.mark.parametrize("reads", [Five, Six], ids=["five", "six"])
def test_what_any_torch_wrote_any_torch_reads(written, reads):
    got = read_with(metadata_format.dump(written, small_record()), reads)
    assert (got.dtype, got.layout, got.requires_grad) == (torch.bfloat16, torch.strided, True)
    assert getattr(got, "strides", None) is None


def test_we_read_it_and_what_stock_wrote(written):
    ours = metadata_format.dump(written, small_record())
    for data in (ours, pickle.dumps(written, protocol=4)):
        metadata, _ = metadata_format.load(data, "/runs/step_7")
        got = metadata.state_dict_metadata["model.weight"].properties
        assert (got.dtype, got.requires_grad) == (torch.bfloat16, True)


@pytest.mark.parametrize("strides", [(1, 3), (), None, [1, 3], (-1, 3), ("1", 3), (1,) * 300, 3])
def test_strides_of_stock_are_read_where_this_torch_has_them(strides, monkeypatch):
    monkeypatch.setattr(stock_metadata, "TensorProperties", Six)
    six = dataclasses.replace(dcp_forms.DCP, properties=Six, has_strides=True)
    monkeypatch.setattr(dcp_forms, "DCP", six)
    metadata = small_metadata()
    metadata.state_dict_metadata["model.weight"].properties = Six(strides=strides)
    read, _ = metadata_format.load(pickle.dumps(metadata, protocol=4), "/runs/step_7")
    wanted = strides if strides in ((1, 3), ()) else None  # the others are no strides
    assert read.state_dict_metadata["model.weight"].properties.strides == wanted


def test_what_the_installed_torch_wrote_with_us_has_five_fields(tmp_path):
    dcp.save({"w": torch.rand(4, 2).t()}, storage_writer=CheckFreqWriter(tmp_path))
    seen = []

    class Strict(Five):
        def __setstate__(self, state):
            seen.append(state)
            super().__setstate__(state)

    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            return Strict if name == "TensorProperties" else super().find_class(module, name)

    Reader(io.BytesIO((tmp_path / ".metadata").read_bytes())).load()
    assert [len(state) for state in seen] == [5]


def one_chunk(properties):
    chunk = ChunkStorageMetadata(torch.Size([4, 4]), torch.Size([4, 4]))
    return TensorStorageMetadata(properties, torch.Size([8, 8]), [chunk])


def test_properties_of_other_strides_are_not_taken_for_the_same():
    strides = {"a": (4, 1), "b": (1, 4), "c": (4, 1)}
    metadata = small_metadata()
    metadata.state_dict_metadata = {key: one_chunk(Six(strides=s)) for key, s in strides.items()}
    indices = [MetadataIndex(key, torch.Size([4, 4])) for key in strides]
    report = RankReport({"f": 3}, indices, ["f"] * 3, [0] * 3, [1] * 3, *([] for _ in range(4)))
    assemble(metadata, [report], "/runs/step_7")
    kept = {key: value.properties for key, value in metadata.state_dict_metadata.items()}
    assert {key: value.strides for key, value in kept.items()} == strides
    assert kept["a"] is kept["c"]


@pytest.mark.parametrize("planner", [lambda: None, CheckFreqSavePlanner], ids=["stock", "ours"])
def test_transposed_and_plain_tensors_come_back(tmp_path, planner):
    state = {"a": torch.rand(4, 4), "b": torch.rand(4, 4).t(), "c": torch.rand(2, 8)}
    dcp.save(state, storage_writer=CheckFreqWriter(tmp_path), planner=planner())
    for reader in (dcp.FileSystemReader, CheckFreqReader):
        got = {key: torch.zeros_like(value) for key, value in state.items()}
        dcp.load(got, storage_reader=reader(tmp_path))
        assert all(torch.equal(got[key], value) for key, value in state.items())
