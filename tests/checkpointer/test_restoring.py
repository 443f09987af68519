"""`Checkpointer.restore`: what a run goes on from, and what it refuses."""

import errno
import fnmatch
import itertools
import logging
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpointer_tools import counter, restored_from, run, steps_on
from torch import nn

from dcp_checkfreq import (
    BrokenShard,
    CheckFreqWriter,
    Checkpointer,
    NoValidCheckpoint,
    StateMismatch,
    StepNotFound,
    StepsExist,
    find_latest_valid,
)
from dcp_checkfreq.format import names
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import Fault, FaultyTier, ForwardingTier, MemoryTier


def test_a_run_that_did_not_ask_is_refused_among_the_steps_of_another(root):
    run(root, 3)
    with (
        Checkpointer(root, counter(), every=1) as ckpt,
        pytest.raises(StepsExist, match=r"\[1, 2, 3\]"),
    ):
        ckpt.after_step()
    assert steps_on(root) == [1, 2, 3]


def test_an_explicit_step_that_is_not_there_names_those_that_are(root):
    run(root, 10, every=5)
    state = counter(-1)
    with (
        Checkpointer(root, state, every=1) as ckpt,
        pytest.raises(StepNotFound, match=r"step 7.*\[5, 10\]"),
    ):
        ckpt.restore(7)
    assert state["w"].tolist() == [-1.0] * 5


def test_an_explicit_step_that_is_broken_is_an_error_and_no_other_is_taken(tmp_path):
    run(tmp_path, 3)
    (shard,) = (tmp_path / "step_00000002").glob("*.distcp")
    shard.write_bytes(b"")
    with Checkpointer(tmp_path, counter(), every=1) as ckpt, pytest.raises(StepNotFound):
        ckpt.restore(2)


def test_an_explicit_step_whose_bytes_are_damaged_is_an_error_and_no_other_is_taken(tmp_path):
    run(tmp_path, 3, state={"w": torch.zeros(50_000), "note": ""})
    (shard,) = (tmp_path / "step_00000002").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    state = {"w": torch.zeros(50_000), "note": ""}
    with Checkpointer(tmp_path, state, every=1) as ckpt:
        with pytest.raises(BrokenShard, match=r"block.*Nothing was loaded"):
            ckpt.restore(2)
        assert not state["w"].any()
        with pytest.raises(StepNotFound, match="digest"):
            ckpt.restore(2, depth="digest")
        assert ckpt.restore().step == 3


def test_checkpoints_that_are_all_damaged_are_an_error_unless_a_fresh_start_is_allowed(tmp_path):
    run(tmp_path, 2)
    for shard in tmp_path.rglob("*.distcp"):
        shard.write_bytes(b"")
    with Checkpointer(tmp_path, counter(), every=1) as ckpt:
        with pytest.raises(NoValidCheckpoint, match="step_00000002"):
            ckpt.restore()
        assert ckpt.restore(fresh_start=True) is None


@pytest.mark.parametrize("left", [0, 100])
def test_a_published_checkpoint_with_a_damaged_record_is_an_error_too(tmp_path, left):
    run(tmp_path, 1)
    os.truncate(tmp_path / "step_00000001" / ".metadata", left)
    with Checkpointer(tmp_path, counter(), every=1) as ckpt, pytest.raises(NoValidCheckpoint):
        ckpt.restore()


def test_a_folder_that_was_never_published_is_a_fresh_start_with_a_word(tmp_path, caplog):
    (tmp_path / "step_00000005").mkdir()
    (tmp_path / "step_00000005" / "__0_0_0123456789ab.distcp").write_bytes(b"part")
    with caplog.at_level(logging.WARNING), Checkpointer(tmp_path, counter(), every=1) as ckpt:
        assert ckpt.restore() is None
    assert "step_00000005" in caplog.text


def test_a_fresh_start_beside_old_steps_makes_them_an_abandoned_branch(root):
    run(root, 5)
    state = counter()
    with Checkpointer(root, state, every=1, keep_last=100) as ckpt:
        assert ckpt.restore(fresh_start=True) is None
        assert ckpt.step == 0
        state["w"].fill_(100.0)
        ckpt.after_step()
    found = find_latest_valid(root)
    assert found.step == 1
    restored, got = restored_from(root)
    assert restored.step == 1
    assert got["w"].tolist() == [100.0] * 5


def test_after_an_explicit_restore_the_abandoned_branch_is_not_latest(root):
    run(root, 8)
    state = counter()
    with Checkpointer(root, state, every=1, keep_last=100) as ckpt:
        assert ckpt.restore(3).step == 3
        assert state["w"].tolist() == [3.0] * 5
        state["w"].fill_(44.0)
        ckpt.after_step()
        assert ckpt.step == 4
    found = find_latest_valid(root)
    assert found.step == 4
    assert {passed.step for passed in found.rejected} >= {5, 6, 7, 8}
    assert "abandoned branch" in found.rejected[0].reason
    restored, got = restored_from(root)
    assert restored.step == 4
    assert got["w"].tolist() == [44.0] * 5
    # A third run goes on from there, past the numbers of the abandoned steps.
    assert run(root, 5) == [5, 6, 7, 8, 9]
    restored, got = restored_from(root)
    assert restored.step == 9
    assert got["w"].tolist() == [9.0] * 5
    _, got = restored_from(root, step=6)
    assert got["w"].tolist() == [6.0] * 5


def test_a_restored_step_that_never_saved_leaves_the_history_as_it_is(root):
    run(root, 5)
    restored_from(root, step=2)
    assert find_latest_valid(root).step == 5


def test_the_older_checkpoint_is_restored_when_a_digest_fails_during_the_load(tmp_path, caplog):
    big = {"w": torch.zeros(200_000), "note": ""}
    run(tmp_path, 3, state=big)
    (shard,) = (tmp_path / "step_00000003").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert find_latest_valid(tmp_path).step == 3, "sizes alone do not show it"
    state = {"w": torch.zeros(200_000), "note": ""}
    with Checkpointer(tmp_path, state, every=1) as ckpt:
        restored = ckpt.restore()
        assert (restored.step, ckpt.step, ckpt.last_saved_step) == (2, 2, 2)
    assert "digest" in restored.passed_over[0]
    assert torch.equal(state["w"], torch.full((200_000,), 2.0))
    assert state["note"] == "at 2"
    assert "step_00000003" in caplog.text


class NotesChanges(ForwardingTier):
    """Notes the calls that change the storage, or read a shard."""

    def __init__(self, inner):
        super().__init__(inner)
        self.calls = []

    def around(self, verb, name, call):
        if verb not in ("list", "size", "read", "make", "sync"):
            self.calls.append((verb, name))
        return call()


@pytest.mark.parametrize("damaged", [0, 1, 3])
def test_a_restore_cleans_up_once_however_many_checkpoints_it_tries(tmp_path, damaged):
    big = {"w": torch.zeros(200_000), "note": ""}
    run(tmp_path, 4, keep_last=9, state=big)
    for step in range(4, 4 - damaged, -1):
        (shard,) = (tmp_path / f"step_{step:08d}").glob("*.distcp")
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    old = tmp_path / "step_00000009"  # of an attempt that died
    old.mkdir()
    (old / names.shard_file(0, 0, names.new_attempt())).write_bytes(b"x")
    os.utime(next(old.iterdir()), (0, 0))
    tier = NotesChanges(LocalTier(tmp_path))
    with Checkpointer(tier, {"w": torch.zeros(200_000), "note": ""}, every=1) as ckpt:
        tier.calls.clear()
        assert ckpt.restore().step == 4 - damaged
        changes = [call for call in tier.calls if call[0] not in ("open", "read_into")]
        first_read = min(at for at, (verb, _) in enumerate(tier.calls) if verb == "open")
        assert sorted(tier.calls[:first_read]) == sorted(changes), "first clean, then try"
        verbs = [verb for verb, _ in changes]
        assert (verbs.count("replace"), verbs.count("delete"), verbs.count("remove")) == (1, 1, 1)
    assert not old.exists()


@pytest.mark.slow
@pytest.mark.parametrize("gone", [".metadata", "*.distcp"])
def test_a_checkpoint_that_is_removed_while_a_run_restores_is_passed_over(gone):
    """Another run's retention comes in between, at any of the calls to the storage."""
    trained = MemoryTier()
    run(trained, 3)

    class Removes(ForwardingTier):
        def __init__(self, inner, at):
            super().__init__(inner)
            self.at, self.calls = at, 0

        def around(self, verb, name, call):
            self.calls += 1
            if self.calls == self.at:
                newest = self.inner.child("step_00000003")
                for entry in newest.list():
                    if fnmatch.fnmatchcase(entry.name, gone):
                        newest.delete(entry.name)
            return call()

    restored = []
    for at in itertools.count(1):
        root = Removes(MemoryTier.holding(trained.files()), at)
        state = counter(-1)
        with Checkpointer(root, state, every=1, preempt_signals=()) as ckpt:
            before = root.calls
            restored.append(ckpt.restore().step)
            assert bool((state["w"] == restored[-1]).all())
            if root.calls < at:
                break
    assert set(restored) == {2, 3}
    assert at > before + 5


def test_a_run_that_fell_back_saves_the_damaged_step_anew(tmp_path):
    run(tmp_path, 3)
    (shard,) = (tmp_path / "step_00000003").glob("*.distcp")
    shard.write_bytes(b"")
    assert run(tmp_path, 2) == [3, 4]
    restored, state = restored_from(tmp_path)
    assert restored.step == 4
    assert state["w"].tolist() == [4.0] * 5
    _, state = restored_from(tmp_path, step=3)
    assert state["w"].tolist() == [3.0] * 5


def test_restoring_twice_and_after_training_goes_back_each_time(root):
    run(root, 3)
    state = counter()
    with Checkpointer(root, state, every=100) as ckpt:
        for _ in range(2):
            assert ckpt.restore().step == 3
            assert ckpt.step == 3
            state["w"].fill_(-5.0)
            ckpt.after_step()
        assert ckpt.restore().step == 3
        assert state["w"].tolist() == [3.0] * 5


def test_stock_checkpoints_in_the_root_are_restored(tmp_path):
    model = nn.Linear(3, 2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "step_7")
    fresh = nn.Linear(3, 2)
    with Checkpointer(tmp_path, {"model": fresh}, every=1) as ckpt:
        restored = ckpt.restore()
        assert (restored.step, restored.world_size) == (7, 0)
        ckpt.after_step()
    assert torch.equal(fresh.weight, model.weight)
    assert find_latest_valid(tmp_path).step == 8


def test_a_fresh_start_says_so(root, caplog):
    caplog.set_level(logging.INFO, "dcp_checkfreq")
    with Checkpointer(root, counter(), every=1) as ckpt:
        ckpt.restore()
    assert "no checkpoint is there: a fresh start" in caplog.text
    run(root, 3)
    caplog.clear()
    with Checkpointer(root, counter(), every=1) as ckpt:
        ckpt.restore(fresh_start=True)
    assert "a fresh start, as asked; steps [1, 2, 3] are left behind" in caplog.text


def linear(value):
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def value_of(model):
    (value,) = {x for parameter in model.parameters() for x in parameter.flatten().tolist()}
    return value


def stock_save(path, value, writer=dcp.FileSystemWriter):
    dcp.save({"model": linear(value).state_dict()}, storage_writer=writer(path))


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, CheckFreqWriter])
def test_a_fresh_start_leaves_steps_behind_that_no_checkpointer_wrote(tmp_path, writer):
    stock_save(tmp_path / "step_5000", -5.0, writer)
    model = linear(1.0)
    with Checkpointer(tmp_path, {"model": model}, every=10) as ckpt:
        assert ckpt.restore(fresh_start=True) is None
        for _ in range(10):
            ckpt.after_step()
    assert find_latest_valid(tmp_path).step == 10
    with Checkpointer(tmp_path, {"model": model}, every=10) as ckpt:
        assert ckpt.restore().step == 10
    # Written after the fresh start, it is somebody's wish, and newer by its number.
    shutil.rmtree(tmp_path / "step_5000")
    stock_save(tmp_path / "step_5000", -6.0, writer)
    with Checkpointer(tmp_path, {"model": model}, every=10) as ckpt:
        assert ckpt.restore().step == 5000
    assert value_of(model) == -6.0


def test_a_run_that_comes_to_a_step_of_stock_dcp_that_it_left_behind_saves_its_own(tmp_path):
    for step in (1, 2, 3):
        stock_save(tmp_path / f"step_{step:08d}", -step)
    model = linear(0.0)
    with Checkpointer(tmp_path, {"model": model}, every=1, keep_last=9, on_error="raise") as ckpt:
        ckpt.restore(1)
        for _ in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 10
            ckpt.after_step()
            ckpt.wait_for_snapshot()
    for step, value in ((1, -1.0), (2, 9.0), (3, 19.0)):
        with Checkpointer(tmp_path, {"model": model}, every=1) as ckpt:
            ckpt.restore(step)
        assert value_of(model) == value


@pytest.mark.parametrize("keep_last", [1, 2, 100])
@pytest.mark.parametrize("back_to", [None, 4, "fresh"])
def test_every_restore_in_one_process_begins_a_history_of_its_own(root, back_to, keep_last):
    state = counter()
    how = {"fresh_start": True} if back_to == "fresh" else {"step": back_to}
    keep_every = None if keep_last == 100 else 4  # so that step 4 is there to go back to
    options = {"every": 1, "keep_last": keep_last, "keep_every": keep_every}
    runs = set()
    with Checkpointer(root, state, on_error="raise", **options) as ckpt:
        ckpt.restore()
        for round_ in range(4):
            if round_:
                ckpt.restore(**how)
            for _ in range(6):
                state["w"].fill_(1000.0 * round_ + ckpt.step + 1)
                ckpt.after_step()
            ckpt.wait()
            last = ckpt.last_saved_step
            found = find_latest_valid(root)
            assert (found.step, last) == (ckpt.step, ckpt.step)
            runs.add(found.run_id)
    assert len(runs) == 4
    restored, got = restored_from(root)
    assert restored.step == last
    assert got["w"].tolist() == [3000.0 + last] * 5
    if keep_last < 100:
        line = [step for step in steps_on(root) if step <= last]
        assert line[-keep_last:] == list(range(last - keep_last + 1, last + 1))


def test_retention_keeps_the_step_that_was_returned_to_and_not_the_branch_that_was_left(root):
    run(root, 8, every=2)
    with Checkpointer(root, counter(), every=1, keep_last=100) as ckpt:
        ckpt.restore(4)
        ckpt.after_step()  # step 5, of a branch that leaves 6 and 8
    with Checkpointer(root, counter(), every=10, keep_last=2) as ckpt:
        ckpt.restore(8)
        for _ in range(2):
            ckpt.after_step()
    assert steps_on(root) == [5, 8, 10]


def test_a_model_of_another_shape_is_an_error_that_names_the_key(tmp_path):
    with Checkpointer(tmp_path, {"model": nn.Linear(3, 2)}, every=1) as ckpt:
        ckpt.after_step()
    with (
        Checkpointer(tmp_path, {"model": nn.Linear(4, 2)}, every=1) as ckpt,
        pytest.raises(StateMismatch, match=r"model\.weight"),
    ):
        ckpt.restore()


# --- beside a run that is at work ---


class OnceAfterListing(ForwardingTier):
    """Lets another run go on, once, between a listing of the root and what follows."""

    def __init__(self, inner, go_on):
        super().__init__(inner)
        self.go_on = go_on

    def around(self, verb, name, call):
        result = call()
        if (verb, name) == ("list", "") and self.go_on is not None:
            go_on, self.go_on = self.go_on, None
            go_on()
        return result


def test_a_restart_beside_a_run_that_removes_old_steps_goes_on_from_the_newest():
    root = MemoryTier()
    with Checkpointer(root, counter(), every=1, keep_last=1) as other:
        other.restore()
        other.after_step(7)
        other.wait()

        def go_on():
            other.after_step(8)
            other.wait()

        seen = OnceAfterListing(root, go_on)
        restored, _ = restored_from(seen)
        assert seen.go_on is None
        assert restored.step == 8


def test_a_fresh_start_beside_a_run_that_may_be_at_work_is_a_warning(root, caplog):
    with Checkpointer(root, counter(), every=1) as other:
        other.restore()
        with caplog.at_level(logging.WARNING):
            assert restored_from(root)[0] is None
    assert "a fresh start, although run" in caplog.text


def test_a_fresh_start_alone_is_no_warning(root, caplog):
    with caplog.at_level(logging.WARNING):
        assert restored_from(root)[0] is None
    assert "fresh start" not in caplog.text


def _a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("")


def _a_link_to_a_file(folder):
    _a_file(folder)
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize("spoil", [_a_file, _a_link_to_a_file])
def test_a_root_whose_id_cannot_be_read_is_restored_from_and_not_saved_to(tmp_path, spoil, caplog):
    run(tmp_path, 2)
    spoil(tmp_path / ".checkfreq")
    state = counter(-1)
    with Checkpointer(tmp_path, state, every=1) as ckpt:
        assert ckpt.restore().step == 2
        assert state["w"].tolist() == [2.0] * 5
        assert "its id cannot be read" in caplog.text
        ckpt.after_step()
        ckpt.wait()
        assert "cannot be looked at" in ckpt.history[-1].error
    assert find_latest_valid(tmp_path).step == 2


def test_a_storage_that_refuses_the_id_is_restored_from():
    root = MemoryTier()
    run(root, 2)
    refusing = FaultyTier(
        root, [Fault(verb="read", name="root-id", times="forever", error=errno.EACCES)]
    )
    restored, _ = restored_from(refusing)
    assert restored.step == 2
    with (
        Checkpointer(refusing, counter(), every=1) as ckpt,
        pytest.raises(StepsExist, match=r"\[1, 2\]"),
    ):
        ckpt.after_step()
