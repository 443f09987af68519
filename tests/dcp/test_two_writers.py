"""Cases 01, 10 and 04: one folder, several attempts; a load gives one of them, never a mix."""

import errno
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp
from behaviour_tools import blank, cause_of, fails_with, files_in, load, same, save, some_state
from forked_scripts import run_scripts
from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq import (
    CheckFreqReader,
    CheckFreqWriter,
    CheckpointExists,
    WriteFailed,
    find_latest_valid,
)
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import Fault, FaultyTier, GatedTier, MemoryTier

TIERS = {"memory": lambda path: MemoryTier(), "disk": lambda path: LocalTier(path / "root")}
tiers = pytest.mark.parametrize("make_tier", TIERS.values(), ids=TIERS.keys())
HELD = ("write_shard", "sync", "create")


def values_of(tier):
    target = blank(some_state())
    dcp.load(target, storage_reader=CheckFreqReader(tier))
    return target


def shards_in(tier):
    return sorted(entry.name for entry in tier.list() if entry.name.endswith(".distcp"))


@tiers
@pytest.mark.parametrize("verb", HELD)
def test_a_writer_that_comes_second_to_the_commit_is_refused(tmp_path, make_tier, verb):
    folder = make_tier(tmp_path).child("step_1")
    gate = GatedTier(folder, verbs=[verb])
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(save, some_state(1.0), gate)
        gate.wait_until_held()
        save(some_state(2.0), folder)
        gate.release()
        error = late.exception(60)
    assert isinstance(cause_of(error), CheckpointExists)
    assert same(values_of(folder), some_state(2.0))
    assert len(shards_in(folder)) == 1, "the refused attempt removed its own files"


@tiers
@pytest.mark.parametrize("verb", ["write_shard", "sync", "replace"])
def test_of_two_writers_that_overwrite_the_last_one_wins_whole(tmp_path, make_tier, verb):
    folder = make_tier(tmp_path).child("step_1")
    save(some_state(0.0), folder)
    gate = GatedTier(folder, verbs=[verb])
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(save, some_state(1.0), gate, overwrite=True)
        gate.wait_until_held()
        save(some_state(2.0), folder, overwrite=True)
        assert same(values_of(folder), some_state(2.0))
        gate.release()
        late.result(60)
    assert same(values_of(folder), some_state(1.0))


@tiers
@pytest.mark.parametrize("verb", ["write_shard", "sync", "replace"])
def test_the_old_checkpoint_loads_at_every_moment_of_an_overwrite(tmp_path, make_tier, verb):
    folder = make_tier(tmp_path).child("step_1")
    save(some_state(1.0), folder)
    gate = GatedTier(folder, verbs=[verb])
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(save, some_state(2.0), gate, overwrite=True)
        gate.wait_until_held()
        assert same(values_of(folder), some_state(1.0))
        gate.release()
        running.result(60)
    assert same(values_of(folder), some_state(2.0))


@tiers
@pytest.mark.parametrize("verb", ["make", "write_shard", "sync", "replace"])
def test_a_failed_overwrite_leaves_the_old_checkpoint_and_nothing_else(tmp_path, make_tier, verb):
    folder = make_tier(tmp_path).child("step_1")
    save(some_state(1.0), folder)
    before = shards_in(folder)
    faulty = FaultyTier(folder, [Fault(verb=verb, error=errno.ENOSPC)])
    with pytest.raises(CheckpointException, match="No space left"):
        save(some_state(2.0), faulty, overwrite=True)
    assert faulty.struck == 1
    assert same(values_of(folder), some_state(1.0))
    assert shards_in(folder) == before


@tiers
@pytest.mark.parametrize("verb", ["make", "write_shard", "sync", "create"])
def test_a_failed_save_cleans_up_after_itself_and_says_why(tmp_path, make_tier, verb):
    root = make_tier(tmp_path)
    faulty = FaultyTier(root.child("step_1"), [Fault(verb=verb, error=errno.ENOSPC)])
    with pytest.raises(CheckpointException, match="No space left"):
        save(some_state(2.0), faulty)
    assert not root.child("step_1").list()
    assert find_latest_valid(root) is None
    save(some_state(3.0), root.child("step_1"))
    assert same(values_of(root.child("step_1")), some_state(3.0))


def big_state():
    """Return a state that is written as several files by several threads."""
    return {f"w{n}": torch.full((4 << 20,), float(n)) for n in range(6)}


@pytest.mark.parametrize("nth", [0, 1])
@pytest.mark.parametrize("after_bytes", [None, 5 << 20], ids=["at once", "half-way"])
def test_an_error_in_one_of_several_writer_threads_fails_the_save(tmp_path, nth, after_bytes):
    fault = Fault(verb="write_shard", nth=nth, error=errno.ENOSPC, after_bytes=after_bytes)
    root = LocalTier(tmp_path)
    faulty = FaultyTier(root.child("step_1"), [fault])
    with fails_with(WriteFailed, "rank 0"):
        save(big_state(), faulty, threads=2)
    assert len([call for call in faulty.calls if call[0] == "write_shard"]) == 2
    assert not files_in(tmp_path)


def test_files_left_by_a_larger_world_are_no_part_of_the_checkpoint(tmp_path):
    folder = tmp_path / "step_1"
    folder.mkdir()
    foreign = ["__2_0.distcp", "__3_0.distcp", "__7_1_0123456789ab.distcp", "notes.txt"]
    for name in foreign:
        (folder / name).write_bytes(b"x" * 10)
    (folder / ".metadata.0123456789ab.tmp").write_bytes(b"half a record")
    save(some_state(), folder)
    assert same(load(some_state(), folder), some_state())
    found = find_latest_valid(tmp_path, depth="digest")
    assert (found.step, found.world_size) == (1, 1)
    assert set(foreign) < set(files_in(folder)), "a writer deletes nothing that it did not make"
    save(some_state(2.0), folder, overwrite=True)
    assert set(foreign) < set(files_in(folder))
    assert same(load(some_state(), folder), some_state(2.0))


KILLED = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from dcp_checkfreq import CheckFreqWriter
from dcp_checkfreq.testing import at_disk_call
def die(name):
    os.kill(os.getpid(), signal.SIGKILL)
new = {{f"w{{n}}": torch.full((1000,), 2.0) for n in range(4)}}
with at_disk_call({n}, "after", die):
    dcp.save(new, storage_writer=CheckFreqWriter(sys.argv[1], overwrite=True))
"""
KILLED_AFTER = (1, 3, 5, 7)  # calls


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Give the old values, and of each script its folder, exit code and output."""
    folder = tmp_path_factory.mktemp("killed")
    old = {f"w{k}": torch.full((1000,), 1.0) for k in range(4)}
    for n in KILLED_AFTER:
        save(old, folder / f"after {n}")
    said = run_scripts({f"after {n}": KILLED.format(n=n) for n in KILLED_AFTER}, folder)
    return old, {name: (folder / name, *ended) for name, ended in said.items()}


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.parametrize("n", KILLED_AFTER)
def test_a_kill_while_re_saving_leaves_the_old_checkpoint_or_the_new_one(killed, n):
    old, by_name = killed
    folder, code, output = by_name[f"after {n}"]
    assert code in (0, -signal.SIGKILL), output
    got = load(old, folder)
    assert {value for tensor in got.values() for value in tensor.tolist()} in ({1.0}, {2.0})


def test_attempt_names_differ_between_saves_and_ranks(tmp_path):
    names = set()
    for step in range(20):
        save({"w": torch.ones(1)}, tmp_path / f"step_{step}")
        names.update(os.listdir(tmp_path / f"step_{step}"))
    assert len(names) == 21


def test_two_background_saves_at_once_into_two_folders_do_not_meet(tmp_path):
    root = MemoryTier()
    gate = GatedTier(root.child("step_1"))
    first = dcp.async_save(some_state(1.0), storage_writer=CheckFreqWriter(gate))
    gate.wait_until_held()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(
            dcp.async_save, some_state(2.0), storage_writer=CheckFreqWriter(root.child("step_2"))
        )
        gate.release()
        second.result(60).result(60)
    first.result(60)
    for step in (1, 2):
        assert same(values_of(root.child(f"step_{step}")), some_state(float(step)))
