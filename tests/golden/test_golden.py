"""Checkpoints of every earlier format version are read for ever, by us and by stock DCP."""

import importlib.util
import os
import pathlib
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from dcp_checkfreq import (
    CheckFreqLoadPlanner,
    CheckFreqReader,
    CheckFreqWriter,
    find_latest_valid,
)
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.recovery.scan import check_digests
from dcp_checkfreq.storage.local.tier import LocalTier

HERE = pathlib.Path(__file__).parent


def made_by(version):
    """Return the module that made the checkpoint of a format version."""
    path = HERE / f"v{version}" / "make.py"
    spec = importlib.util.spec_from_file_location(f"golden_v{version}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=[1], ids=["v1"])
def golden(request):
    return made_by(request.param)


def emptied(value):
    """Return the structure of a state with zeros for tensors and None for everything else."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: emptied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [emptied(inner) for inner in value]
    return None


def assert_same(loaded, wanted, path=""):
    if isinstance(wanted, torch.Tensor):
        assert (loaded.dtype, loaded.shape) == (wanted.dtype, wanted.shape), path
        one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (loaded, wanted))
        assert torch.equal(one, other), path
    elif isinstance(wanted, dict):
        assert list(loaded) == list(wanted), path
        for key, inner in wanted.items():
            assert_same(loaded[key], inner, f"{path}.{key}")
    elif isinstance(wanted, list):
        assert len(loaded) == len(wanted), path
        for number, inner in enumerate(wanted):
            assert_same(loaded[number], inner, f"{path}.{number}")
    else:
        assert type(loaded) is type(wanted), path
        assert loaded == wanted, path


READERS = {
    "ours": lambda folder: (CheckFreqReader(folder), CheckFreqLoadPlanner()),
    "ours, stock planner": lambda folder: (CheckFreqReader(folder), None),
    "stock": lambda folder: (FileSystemReader(folder), None),
    "stock, our planner": lambda folder: (FileSystemReader(folder), CheckFreqLoadPlanner()),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_value_is_what_it_was(golden, reader):
    wanted = golden.full_state()
    state = emptied(wanted)
    storage_reader, planner = READERS[reader](golden.FOLDER)
    dcp.load(state, storage_reader=storage_reader, planner=planner, no_dist=True)
    assert_same(state, wanted)


def test_it_is_found_as_the_latest_valid_one_with_every_digest_right(golden):
    found = find_latest_valid(golden.HERE, depth="digest")
    assert found is not None
    assert (found.step, pathlib.Path(os.fspath(found))) == (golden.STEP, golden.FOLDER)
    assert (found.run_id, found.world_size) == (golden.RUN_ID, golden.RANKS)
    assert found.rejected == ()


def test_its_record_says_what_was_put_into_it(golden):
    content = (golden.FOLDER / ".metadata").read_bytes()
    metadata, record = metadata_format.load(content, "golden")
    assert (record.step, record.world_size) == (golden.STEP, golden.RANKS)
    assert record.lineage.run_id == golden.RUN_ID
    assert record.lineage.parent_step == golden.PARENT_STEP
    assert dict(record.lineage.abandons) == golden.ABANDONS
    on_disk = {p.name: p.stat().st_size for p in golden.FOLDER.glob("*.distcp")}
    assert dict(record.files) == on_disk
    assert {info.relative_path for info in metadata.storage_data.values()} == set(on_disk)


def test_a_flipped_byte_in_any_payload_is_found(golden, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(golden.FOLDER, folder)
    content = (folder / ".metadata").read_bytes()
    metadata, record = metadata_format.load(content, "golden")
    places = zip(
        metadata.storage_data.values(),
        record.columns.payload_offset,
        record.columns.payload_bytes,
        strict=True,
    )
    for info, offset, size in places:
        if not size:
            continue
        path = folder / info.relative_path
        whole = bytearray(path.read_bytes())
        whole[offset + size // 2] ^= 0x20
        path.write_bytes(whole)
        assert "digest" in check_digests(LocalTier(folder))
        whole[offset + size // 2] ^= 0x20
        path.write_bytes(whole)
    assert check_digests(LocalTier(folder)) is None


def test_what_is_written_today_reads_back_the_same_way(golden, tmp_path):
    wanted = golden.full_state()
    dcp.save(wanted, storage_writer=CheckFreqWriter(tmp_path / "step_1"), no_dist=True)
    state = emptied(wanted)
    dcp.load(state, storage_reader=CheckFreqReader(tmp_path / "step_1"), no_dist=True)
    assert_same(state, wanted)


def test_it_is_small_enough_to_keep(golden):
    assert sum(path.stat().st_size for path in golden.FOLDER.iterdir()) < 100_000
