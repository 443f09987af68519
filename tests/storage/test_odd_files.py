"""What is in a file's place but is no file is refused before it is opened or read, by name."""

import os
import socket

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_checkfreq import CheckFreqWriter, find_latest_valid
from dcp_checkfreq.policy.profile_file import ProfileFiles
from dcp_checkfreq.recovery.lease import LeaseFile
from dcp_checkfreq.recovery.root_id import read_root_id
from dcp_checkfreq.runtime.clock import SystemClock
from dcp_checkfreq.staging.mount_tier import MountTier
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.storage.tier import OddFile, read_small
from dcp_checkfreq.testing import MemoryTier
from dcp_checkfreq.testing.forwarding_tier import ForwardingTier

HUGE = 20 << 30


def make_fifo(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as door:
        # Their paths must be short.
        here = os.open(path.parent, os.O_RDONLY)
        try:
            door.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def make_sparse(path):
    with open(path, "wb") as file:
        file.truncate(HUGE)


def make_sparse_within_bounds(path):
    with open(path, "wb") as file:
        file.truncate(3 << 30)


ODD = {
    "fifo": make_fifo,
    "socket": make_socket,
    "zeros without end": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "folder": lambda path: path.mkdir(),
    "loop of links": lambda path: path.symlink_to(path.name),
    "link to a fifo": lambda path: (os.mkfifo(f"{path}.real"), path.symlink_to(f"{path}.real")),
}
SPARSE = {"sparse file": make_sparse, "sparse file within bounds": make_sparse_within_bounds}
odd_kinds = pytest.mark.parametrize("kind", ODD)
all_kinds = pytest.mark.parametrize("kind", ODD | SPARSE)


@pytest.mark.parametrize("tier_class", [LocalTier, MountTier])
@odd_kinds
def test_every_way_to_read_refuses_it(tmp_path, tier_class, kind):
    ODD[kind](tmp_path / "odd")
    tier = tier_class(tmp_path)
    for read in (tier.read, tier.open, tier.size):
        with pytest.raises(OSError, match="odd"):
            read("odd")
    with pytest.raises(OSError, match="odd"):
        read_small(tier, "odd", at_most_bytes=100)


@pytest.mark.parametrize("kind", SPARSE)
def test_a_file_is_not_read_into_memory_for_its_size_alone(tmp_path, kind):
    SPARSE[kind](tmp_path / "odd")
    with pytest.raises(OddFile, match=r"bytes.*odd"):
        LocalTier(tmp_path).read("odd")


@pytest.mark.parametrize("wrap", [lambda tier: tier, ForwardingTier], ids=["bare", "forwarded"])
@pytest.mark.parametrize("make", [MemoryTier, None], ids=["memory", "local"])
def test_a_bound_is_kept_to_the_byte(tmp_path, make, wrap):
    tier = LocalTier(tmp_path) if make is None else make()
    tier.make()
    tier.create("a", bytes(100), scratch="s")
    assert read_small(wrap(tier), "a", at_most_bytes=100) == bytes(100)
    with pytest.raises(OddFile, match="100 bytes"):
        read_small(wrap(tier), "a", at_most_bytes=99)


def save(root, step, value):
    state = {"w": torch.full((3000,), float(value))}
    dcp.save(state, storage_writer=CheckFreqWriter(root / f"step_{step:08d}"), no_dist=True)


@all_kinds
def test_a_step_with_it_for_metadata_is_passed_over_with_a_reason(tmp_path, kind, caplog):
    save(tmp_path, 1, 1.0)
    (tmp_path / "step_00000002").mkdir()
    (ODD | SPARSE)[kind](tmp_path / "step_00000002" / ".metadata")
    found = find_latest_valid(tmp_path)
    assert found is not None
    assert found.step == 1
    assert "step_00000002" in caplog.text


@pytest.mark.parametrize("kind", ODD)
def test_a_root_with_nothing_else_has_no_valid_step_and_raises_nothing(tmp_path, kind):
    (tmp_path / "step_00000002").mkdir()
    ODD[kind](tmp_path / "step_00000002" / ".metadata")
    assert find_latest_valid(tmp_path) is None


@all_kinds
def test_a_step_with_it_for_a_shard_is_passed_over(tmp_path, kind):
    save(tmp_path, 1, 1.0)
    save(tmp_path, 2, 2.0)
    (shard,) = (tmp_path / "step_00000002").glob("*.distcp")
    shard.unlink()
    (ODD | SPARSE)[kind](shard)
    assert find_latest_valid(tmp_path).step == 1
    assert find_latest_valid(tmp_path, depth="digest").step == 1


@all_kinds
def test_it_is_no_lease_no_profile_and_no_root_id(tmp_path, kind):
    folder = tmp_path / ".checkfreq"
    folder.mkdir()
    for name in ("lease.json", "profile-0123456789abcdef.json", "root-id"):
        (ODD | SPARSE)[kind](folder / name)
    root = LocalTier(tmp_path)
    lease = LeaseFile(root, "a run", SystemClock())
    assert lease.held_by_other() is None
    lease.release()
    assert read_root_id(root.child(".checkfreq")) is None
    assert ProfileFiles(root).load("0123456789abcdef" * 4) is None
