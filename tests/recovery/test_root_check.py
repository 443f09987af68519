"""A root that cannot be written to can be restored from; ranks that see other folders hear it."""

import errno
import logging

import pytest
import torch

from dcp_checkfreq import Checkpointer
from dcp_checkfreq.errors import BadLocation, RootDiffers, SaveFailed
from dcp_checkfreq.recovery.root_check import check_root
from dcp_checkfreq.testing import Fault, FaultyTier, ManualClock, MemoryTier

WRITES = ("make", "write_shard", "create", "replace", "delete")


def train(root, steps, **options):
    state = {"w": torch.zeros(3), "note": "none"}
    with Checkpointer(root, state, every=1, **options) as ckpt:
        restored = ckpt.restore()
        for _ in range(steps):
            state["note"] = f"at {ckpt.step + 1}"
            ckpt.after_step()
            ckpt.wait()
    return restored, state["note"]


def unwritable(inner, code):
    return FaultyTier(inner, [Fault(verb=verb, error=code, times="forever") for verb in WRITES])


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_reading_does_not_depend_on_writing(code, caplog):
    root = MemoryTier()
    train(root, 2)
    caplog.set_level(logging.INFO)
    assert train(unwritable(root, code), 0)[1] == "at 2"
    told = [r for r in caplog.records if "restore()" in r.getMessage()]
    assert len(told) == 1
    is_meant = code in (errno.EROFS, errno.EACCES)
    assert told[0].levelno == (logging.INFO if is_meant else logging.WARNING)
    with pytest.raises(SaveFailed):
        train(unwritable(root, code), 1, on_error="raise")
    assert train(root, 0)[1] == "at 2"


def test_a_lease_that_cannot_be_read_holds_back_cleaning_and_nothing_else(caplog):
    root = MemoryTier()
    train(root, 1)
    dead = "__0_0_0123456789ab.distcp"
    root.child("step_00000001").write_shard(dead, [memoryview(b"x")], 1)
    broken = FaultyTier(
        root, [Fault(verb="read", name="lease.json", error=errno.EIO, times="forever")]
    )
    assert train(broken, 0)[1] == "at 1"
    assert f"step_00000001/{dead}" in root.files()
    assert "the lease cannot be read" in caplog.text


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC])
def test_nothing_to_read_and_nothing_to_write_is_an_error(code):
    with pytest.raises(BadLocation, match="cannot be written to"):
        train(unwritable(MemoryTier(), code), 0)


class OtherRank:
    """Rank 1 of two, which hears what rank 0 found."""

    rank = 1

    def __init__(self, there):
        self.there = there

    def on_rank_0(self, work, *_):
        return self.there

    def all_gather(self, value, *_):
        return [True, value]


@pytest.mark.parametrize("there", [None, frozenset({"step_1", "notes"})], ids=["probe", "names"])
def test_a_rank_that_sees_another_folder_says_so(there):
    with pytest.raises(RootDiffers, match="1"):
        check_root(MemoryTier(), OtherRank(there), "run", ManualClock())


def test_a_rank_that_sees_some_of_what_rank_0_saw_is_content():
    root = MemoryTier()
    train(root, 1)
    there = frozenset({"step_00000001", "step_00000000"})
    check_root(root, OtherRank(there), "run", ManualClock())
