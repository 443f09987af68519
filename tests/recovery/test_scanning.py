"""Cases 07, 08: which checkpoint is the newest whole one."""

import errno
import logging
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from behaviour_tools import load, same, save, some_state

from dcp_checkfreq import CheckFreqReader, CheckFreqWriter, Checkpointer, find_latest_valid
from dcp_checkfreq.errors import StepNotFound
from dcp_checkfreq.recovery.scan import newest_whole, scan
from dcp_checkfreq.storage.open import open_tier
from dcp_checkfreq.testing import Fault, FaultyTier, ForwardingTier, GatedTier, MemoryTier


def test_names_beside_the_steps_neither_win_nor_crash_the_scan(tmp_path, caplog):
    root = tmp_path / "run [v1] é*"
    beside = "step_10-unsharded step_٣ step_-1 step_1e3 best step_13.tmp step_ Step_50 xstep_70"
    for name in ("step_9", "step_10", "step_0011", "step_12 ", *beside.split()):
        save(some_state(), root / name)
    (root / "step_12").mkdir()
    (root / "step_99").write_text("a file")
    (root / "step_100").symlink_to(root / "nowhere")
    for depth in ("size", "digest"):
        with caplog.at_level(logging.WARNING):
            found = find_latest_valid(root, depth=depth)
        assert (found.step, found.name) == (11, "step_0011")
        assert [(passed.step, passed.name) for passed in found.rejected] == [(12, "step_12")]
    assert "step_12" in caplog.text


def test_steps_are_ordered_by_number_whatever_their_spelling(tmp_path):
    for name in ("step_9999", "step_10000", "step-09998", "step_00000007"):
        save(some_state(), tmp_path / name)
    assert find_latest_valid(tmp_path).step == 10000
    save(some_state(), tmp_path / "step-20000")
    assert find_latest_valid(tmp_path).name == "step-20000"
    save(some_state(), tmp_path / f"step_{10**30}")
    assert find_latest_valid(tmp_path).step == 10**30


def test_of_two_spellings_of_one_step_the_whole_one_wins_and_the_other_is_reported(tmp_path):
    save(some_state(1.0), tmp_path / "step_10")
    (tmp_path / "step_00000010").mkdir()
    found = find_latest_valid(tmp_path)
    assert found.name == "step_10"
    assert [passed.name for passed in found.rejected] == ["step_00000010"]
    save(some_state(2.0), tmp_path / "step_0010")
    names = {find_latest_valid(tmp_path).name}
    names |= {passed.name for passed in find_latest_valid(tmp_path).rejected}
    assert names == {"step_10", "step_0010", "step_00000010"}


def test_a_root_that_is_missing_or_empty_has_no_checkpoint(tmp_path):
    assert find_latest_valid(tmp_path / "nothing") is None
    assert find_latest_valid(tmp_path) is None
    assert not (tmp_path / "nothing").exists()


def test_a_root_that_is_missing_is_told_louder_than_an_empty_one(tmp_path, caplog):
    caplog.set_level(logging.INFO, "dcp_checkfreq")
    assert find_latest_valid(tmp_path / "typo") is None
    (said,) = caplog.records
    assert (said.levelno, "typo: nothing is there" in said.getMessage()) == (logging.WARNING, True)
    caplog.clear()
    assert find_latest_valid(tmp_path) is None
    (said,) = caplog.records
    assert said.levelno == logging.INFO
    caplog.clear()
    assert find_latest_valid(MemoryTier()) is None
    assert "nothing is there" in caplog.text


def test_scanning_changes_nothing(tmp_path):
    save(some_state(), tmp_path / "step_1")
    (tmp_path / "step_2").mkdir()
    (tmp_path / "step_2" / "__0_0_0123456789ab.distcp").write_bytes(b"left over")
    os.utime(tmp_path / "step_2" / "__0_0_0123456789ab.distcp", (1, 1))

    def listing():
        return sorted((str(p), p.stat().st_mtime_ns) for p in tmp_path.rglob("*"))

    before = listing()
    find_latest_valid(tmp_path, depth="digest")
    assert listing() == before


def test_the_answer_is_a_path_for_reader_stock_and_os(tmp_path):
    save(some_state(), tmp_path / "step_3")
    found = find_latest_valid(tmp_path)
    assert os.fspath(found) == found.path == str(tmp_path / "step_3")
    assert os.path.isdir(found)
    target = {"weight": torch.zeros(40, 3)}
    dcp.load(target, storage_reader=CheckFreqReader(found))
    dcp.load(target, checkpoint_id=found.path)
    assert same(target["weight"], some_state()["weight"])


def test_an_unknown_depth_is_refused(tmp_path):
    with pytest.raises(ValueError, match="depth"):
        find_latest_valid(tmp_path, depth="deep")


def test_an_error_of_the_storage_is_not_taken_for_no_checkpoint():
    root = MemoryTier()
    save(some_state(), root.child("step_1"))
    for verb in ("list", "read"):
        faulty = FaultyTier(root, [Fault(verb=verb, times="forever")])
        with pytest.raises(OSError, match="injected"):
            find_latest_valid(faulty)


# --- case 06: nothing claims success before the commit ---


@pytest.mark.parametrize("verb", ["write_shard", "create"])
def test_a_save_in_flight_is_not_yet_latest(verb):
    root = MemoryTier()
    save(some_state(1.0), root.child("step_1"))
    gate = GatedTier(root.child("step_2"), verbs=[verb])
    future = dcp.async_save(some_state(2.0), storage_writer=CheckFreqWriter(gate))
    gate.wait_until_held()
    assert not future.done()
    assert find_latest_valid(root).step == 1
    gate.release()
    future.result(60)
    assert find_latest_valid(root).step == 2


# --- case 08: copies ---


@pytest.mark.parametrize("stamp_s", [0, 4_000_000_000], ids=["1970", "future"])
@pytest.mark.parametrize("written_by", ["ours", "stock"])
def test_a_copy_is_as_good_as_the_original_whatever_its_times(tmp_path, stamp_s, written_by):
    writer = CheckFreqWriter if written_by == "ours" else dcp.FileSystemWriter
    for step in (9, 10):
        dcp.save(some_state(float(step)), storage_writer=writer(tmp_path / "a" / f"step_{step}"))
    # The record comes first, as a copy in name order does it; then the rest.
    for source in sorted((tmp_path / "a").rglob("*"), key=lambda path: path.name != ".metadata"):
        target = tmp_path / "renamed é" / source.relative_to(tmp_path / "a")
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    shutil.rmtree(tmp_path / "a")
    for path in (tmp_path / "renamed é").rglob("*"):
        os.utime(path, (stamp_s, stamp_s))
    found = find_latest_valid(tmp_path / "renamed é", depth="digest")
    assert (found.step, found.rejected) == (10, ())
    assert same(load(some_state(), found), some_state(10.0))


@pytest.mark.parametrize("depth", ["size", "digest"])
def test_a_copy_under_another_steps_name_is_passed_over_with_both_numbers(tmp_path, depth):
    save(some_state(4.0), tmp_path / "step_4")
    shutil.copytree(tmp_path / "step_4", tmp_path / "step_40")
    found = find_latest_valid(tmp_path, depth=depth)
    assert found.step == 4
    assert [passed.name for passed in found.rejected] == ["step_40"]
    assert "step 4 in a folder of step 40" in found.rejected[0].reason
    with pytest.raises(StepNotFound, match="step 4 in a folder of step 40"):
        Checkpointer(tmp_path, some_state()).restore(step=40)


def test_a_copy_under_another_spelling_of_its_step_or_from_a_folder_without_one_is_whole(tmp_path):
    save(some_state(4.0), tmp_path / "step_4")
    (tmp_path / "step_4").rename(tmp_path / "step-00004")
    assert find_latest_valid(tmp_path).name == "step-00004"
    save(some_state(5.0), tmp_path / "best")
    (tmp_path / "best").rename(tmp_path / "step_5")
    assert find_latest_valid(tmp_path).step == 5


def test_a_scan_tells_commit_records_apart_by_their_bytes(tmp_path):
    dcp.save(some_state(1.0), storage_writer=dcp.FileSystemWriter(tmp_path / "step_1"))
    save(some_state(1.0), tmp_path / "step_2")
    shutil.copytree(tmp_path / "step_1", tmp_path / "step_3")
    (tmp_path / "step_4").mkdir()
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_5" / ".metadata").write_bytes(b"no pickle")
    records = {record.step: record for record in scan(open_tier(tmp_path))}
    ids = {step: record.identity for step, record in records.items()}
    content = (tmp_path / "step_2" / ".metadata").read_bytes()
    assert ids[2] == xxhash.xxh3_128_hexdigest(content)
    assert ids[4] == ""
    assert ids[1] == ids[3]
    assert len({ids[1], ids[2], ids[5]}) == 3
    assert records[5].published
    assert records[5].problem is not None


def test_a_copy_can_be_gone_on_from_and_old_files_are_not_cleaned_away(tmp_path):
    state = {"w": torch.full((10,), 1.0)}
    with Checkpointer(tmp_path / "a", state, every=1) as ckpt:
        for _ in range(3):
            ckpt.after_step()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for path in (tmp_path / "b").rglob("*"):
        os.utime(path, (0, 0))
    state = {"w": torch.zeros(10)}
    with Checkpointer(tmp_path / "b", state, every=1) as ckpt:
        assert ckpt.restore().step == 3
        ckpt.after_step()
    assert find_latest_valid(tmp_path / "b", depth="digest").step == 4


# --- case 16: files that a node sees late ---


def test_a_file_that_is_seen_late_is_looked_for_again():
    root = MemoryTier()
    save(some_state(), root.child("step_1"))
    late = FaultyTier(root.child("step_1"), [Fault(verb="open", error=2)])
    assert same(load(some_state(), late), some_state())
    assert late.struck == 1


# --- another run saves while a root is looked at ---


class BesideARun(ForwardingTier):
    """At the given calls of whoever looks, another run publishes a step and lets one go."""

    def __init__(self, inner, at, keep=1, left=()):
        super().__init__(inner)
        self.at, self.calls, self.newest, self.keep = at, 0, keep, keep
        for step in range(1, keep + 1):
            save(some_state(float(step)), inner.child(f"step_{step:08d}"))
        for name in left:
            inner.child(name).make()
            inner.child(name).write_shard("s.distcp", [memoryview(b"x")], 1)

    def around(self, verb, name, call):
        self.calls += 1
        if self.calls in self.at:
            self.newest += 1
            save(some_state(), self.inner.child(f"step_{self.newest:08d}"))
            old = self.inner.child(f"step_{self.newest - self.keep:08d}")
            for file in sorted(entry.name for entry in old.list()):  # .metadata comes first
                old.delete(file)
            old.remove()
        return call()


@pytest.mark.parametrize("left", [(), ("step_00000900",)])
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("together", [1, 2, 3])
def test_a_scan_beside_a_run_that_saves_finds_what_is_there_then(keep, together, left):
    for first in range(1, 13):
        root = BesideARun(MemoryTier(), range(first, first + together), keep, left)
        whole = [record for record in scan(root) if record.problem is None]
        assert whole, first
        assert root.newest == keep + together or root.calls < first + together


@pytest.mark.slow  # what has gone is looked for several times
@pytest.mark.parametrize("first", range(1, 16))
def test_digests_beside_a_run_that_saves_are_compared_of_what_is_there_then(first):
    root = BesideARun(MemoryTier(), [first])
    newest, _, _ = newest_whole(root, "digest")
    assert newest is not None


def test_a_scan_beside_a_run_that_never_stands_still_is_an_error_and_no_empty_root():
    root = BesideARun(MemoryTier(), range(1, 10_000))
    with pytest.raises(OSError, match="come and go") as caught:
        scan(root)
    assert caught.value.errno == errno.EBUSY
    assert root.calls < 100


def test_a_quiet_root_with_whole_steps_is_listed_once():
    root = BesideARun(MemoryTier(), (), keep=3)
    listed = []
    root.around = lambda verb, name, call: (listed.append((verb, name)), call())[1]
    assert len(scan(root)) == 3
    assert listed.count(("list", "")) == 1
