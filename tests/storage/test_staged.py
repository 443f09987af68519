"""A local disk in front of a slow storage: what is written where, and what is read from where."""

import os

import torch
import torch.distributed.checkpoint as dcp

from dcp_checkfreq import CheckFreqReader, CheckFreqWriter
from dcp_checkfreq.format import names
from dcp_checkfreq.storage.local import LocalTier


def state_of(step):
    return {
        **{f"w{n}": torch.full((50, 31), step * 10.0 + n) for n in range(4)},
        "note": f"step {step}",
    }


def save(root, step, staging, **options):
    folder = root.child(names.step_folder(step))
    writer = CheckFreqWriter(folder, staging_dir=staging, **options)
    dcp.save(state_of(step), storage_writer=writer)


def load(tier, step, **options):
    state = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for key, value in state_of(step).items()
    }
    reader = CheckFreqReader(tier, **options)
    dcp.load(state, storage_reader=reader)
    for key, value in state_of(step).items():
        same = torch.equal(state[key], value) if isinstance(value, torch.Tensor) else None
        assert same or state[key] == value, key
    return reader


def below(folder):
    """Return all files below a folder, by name."""
    return sorted(
        os.path.relpath(os.path.join(path, name), folder)
        for path, _, found in os.walk(folder)
        for name in found
    )


def shards(folder):
    return [os.path.basename(name) for name in below(folder) if name.endswith(".distcp")]


def test_a_save_is_published_on_the_slow_side_and_a_copy_stays_on_the_local_disk(tmp_path):
    slow = LocalTier(tmp_path / "slow")
    save(slow, 1, tmp_path / "nvme")
    on_slow = shards(tmp_path / "slow")
    assert on_slow
    assert shards(tmp_path / "nvme") == on_slow
    assert not [n for n in below(tmp_path / "nvme") if n.endswith((".metadata", ".lock", ".tmp"))]
    load(slow.child("step_00000001"), 1)
    # stock DCP reads it, and needs nothing of the local disk
    stock = {"w0": torch.zeros(50, 31)}
    dcp.load(stock, storage_reader=dcp.FileSystemReader(tmp_path / "slow" / "step_00000001"))
    assert torch.equal(stock["w0"], state_of(1)["w0"])
