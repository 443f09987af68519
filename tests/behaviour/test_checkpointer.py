"""`Checkpointer` in one process: counting, saving, restoring, failing, cleaning up."""

import errno
import json
import logging
import os
import shutil
import socket

import pytest
import torch
from behaviour_tools import files_in, load
from torch import nn

from dcp_checkfreq import (
    BrokenShard,
    Checkpointer,
    NoValidCheckpoint,
    PerRank,
    SaveFailed,
    StateMismatch,
    StepNotFound,
    StepsExist,
    TooManyFailures,
    UnsupportedState,
    WriteFailed,
    find_latest_valid,
)
from dcp_checkfreq.storage.local import LocalTier
from dcp_checkfreq.testing import Fault, FaultyTier, GatedTier, ManualClock, MemoryTier


def counter(value=0.0):
    return {"w": torch.full((5,), float(value)), "note": f"at {value}"}


def run(root, steps, state=None, **options):
    """Train ``steps`` steps: after step n every value tells n. Return the Checkpointer's steps."""
    state = counter() if state is None else state
    options = {"every": 1, "keep_last": 100} | options
    seen = []
    with Checkpointer(root, state, **options) as ckpt:
        ckpt.restore()
        for _ in range(steps):
            at = ckpt.step + 1
            state["w"].fill_(float(at))
            state["note"] = f"at {at}"
            ckpt.after_step()
            seen.append(ckpt.step)
    return seen


def steps_on(root):
    """Return the steps whose folder holds a commit record."""
    return sorted(
        int(entry.name.removeprefix("step_"))
        for entry in root.list()
        if entry.name.startswith("step_")
        and any(inner.name == ".metadata" for inner in root.child(entry.name).list())
    )


def step_until_it_raises(ckpt, at_most=10_000):
    """A background save ends at its own time: one of the next calls tells."""
    for _ in range(at_most):
        ckpt.after_step()


def train_on(root, steps, **options):
    with Checkpointer(root, counter(), every=1, **options) as ckpt:
        ckpt.restore()
        for _ in range(steps):
            ckpt.after_step()


def train_and_crash(root):
    with Checkpointer(root, counter(), every=1) as ckpt:
        ckpt.after_step()
        raise ZeroDivisionError


def restored_from(root, **options):
    state = counter(-1)
    with Checkpointer(root, state, every=1) as ckpt:
        restored = ckpt.restore(**options)
    return restored, state


@pytest.fixture(params=["memory", "disk"])
def root(request, tmp_path):
    return MemoryTier() if request.param == "memory" else LocalTier(tmp_path / "run")


# --- counting and saving ---


def test_a_fresh_start_restores_nothing_and_counts_from_one(root):
    assert run(root, 3) == [1, 2, 3]
    assert steps_on(root) == [1, 2, 3]


def test_saves_come_every_n_steps(root):
    run(root, 10, every=4)
    assert steps_on(root) == [4, 8]


def test_counting_goes_on_from_the_restored_step(root):
    run(root, 5, every=2)
    assert steps_on(root) == [2, 4]
    assert run(root, 3, every=2) == [5, 6, 7]
    assert steps_on(root) == [2, 4, 6]
    restored, state = restored_from(root)
    assert restored.step == 6
    assert state["w"].tolist() == [6.0] * 5
    assert state["note"] == "at 6"


def test_an_explicit_step_may_be_given(root):
    with Checkpointer(root, counter(), every=10) as ckpt:
        ckpt.restore()
        for step in (5, 10, 17, 20):
            ckpt.after_step(step)
        assert ckpt.step == 20
        ckpt.after_step()
        assert ckpt.step == 21
    assert steps_on(root) == [10, 20]


def test_restored_tells_step_path_world_size_and_seconds(tmp_path):
    run(tmp_path, 3)
    restored, _ = restored_from(tmp_path)
    assert restored.step == 3
    assert restored.path == str(tmp_path / "step_00000003")
    assert restored.world_size == 1
    assert restored.seconds > 0
    assert restored.passed_over == ()


def test_seconds_are_measured_by_the_clock():
    root = MemoryTier()
    run(root, 1)
    clock = ManualClock()

    class Slow(FaultyTier):
        def around(self, verb, name, call):
            clock.advance(1.0 if verb == "read_into" else 0.0)
            return super().around(verb, name, call)

    with Checkpointer(Slow(root, []), counter(), every=1, clock=clock) as ckpt:
        assert ckpt.restore().seconds >= 1.0


def test_save_can_be_asked_for_at_any_step_and_waited_for(root):
    with Checkpointer(root, counter(), every=1000) as ckpt:
        ckpt.after_step()
        ckpt.save(wait=True)
        assert ckpt.last_saved_step == 1
        assert find_latest_valid(root).step == 1
        ckpt.after_step()
        ckpt.save()
        ckpt.wait()
        assert ckpt.last_saved_step == 2


def test_the_record_tells_the_run_its_parent_and_the_step(tmp_path):
    run(tmp_path, 2)
    first = find_latest_valid(tmp_path)
    run(tmp_path, 1)
    second = find_latest_valid(tmp_path)
    assert (first.step, second.step) == (2, 3)
    assert first.run_id
    assert second.run_id
    assert first.run_id != second.run_id
    from dcp_checkfreq.format import metadata as metadata_format

    content = (tmp_path / "step_00000003" / ".metadata").read_bytes()
    _, record = metadata_format.load(content, "here")
    assert (record.step, record.lineage.parent_step) == (3, 2)


def test_a_checkpoint_of_the_checkpointer_is_a_plain_dcp_checkpoint(tmp_path):
    import torch.distributed.checkpoint as dcp

    model = nn.Linear(3, 2)
    with Checkpointer(tmp_path, {"model": model}, every=1) as ckpt:
        ckpt.after_step()
    target = {"model": nn.Linear(3, 2).state_dict()}
    dcp.load(target, checkpoint_id=tmp_path / "step_00000001")
    assert torch.equal(target["model"]["weight"], model.weight)
    assert torch.equal(
        load({"model": model.state_dict()}, tmp_path / "step_00000001")["model"]["bias"],
        model.bias,
    )


# --- one save in flight; nothing claims success early (cases 06, 19) ---


def test_training_goes_on_while_the_save_is_written_and_nothing_is_claimed_early():
    inner = MemoryTier()
    run(inner, 1)
    gate = GatedTier(inner, verbs=["write_shard"])
    state = counter()
    with Checkpointer(gate, state, every=1) as ckpt:
        ckpt.restore()
        state["w"].fill_(2.0)
        ckpt.after_step()
        gate.wait_until_held()
        assert (ckpt.step, ckpt.last_saved_step) == (2, 1)
        assert find_latest_valid(inner).step == 1
        state["w"].fill_(-7.0)
        gate.release()
        ckpt.wait()
        assert ckpt.last_saved_step == 2
    _, got = restored_from(inner)
    assert got["w"].tolist() == [2.0] * 5


def test_a_save_that_is_due_waits_for_the_one_in_flight_and_replaces_nothing():
    from concurrent.futures import ThreadPoolExecutor

    inner = MemoryTier()
    gate = GatedTier(inner, verbs=["write_shard"])
    state = counter()
    with ThreadPoolExecutor(1) as threads, Checkpointer(gate, state, every=1) as ckpt:
        state["w"].fill_(1.0)
        ckpt.after_step()
        gate.wait_until_held()
        second = threads.submit(ckpt.after_step)
        with pytest.raises(TimeoutError):
            second.result(0.1)
        gate.release()
        second.result(60)
    assert steps_on(inner) == [1, 2]


def test_close_waits_for_the_save_in_flight():
    from concurrent.futures import ThreadPoolExecutor

    inner = MemoryTier()
    gate = GatedTier(inner, verbs=["create"])
    ckpt = Checkpointer(gate, counter(), every=1)
    ckpt.after_step()
    gate.wait_until_held()
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(ckpt.close)
        with pytest.raises(TimeoutError):
            closing.result(0.1)
        gate.release()
        closing.result(60)
    assert find_latest_valid(inner).step == 1
    ckpt.close()
    with pytest.raises(SaveFailed, match="closed"):
        ckpt.save()


# --- failures (cases 04, 14, 17) ---


def failing(inner, **fault):
    return FaultyTier(inner, [Fault(verb="write_shard", error=errno.ENOSPC, **fault)])


def test_a_failed_save_is_logged_counted_and_training_goes_on(caplog):
    inner = MemoryTier()
    with (
        caplog.at_level(logging.ERROR),
        Checkpointer(failing(inner, nth=1), counter(), every=1) as ckpt,
    ):
        for _ in range(2):
            ckpt.after_step()
            ckpt.wait()
        assert ckpt.failures_in_a_row == 1
        assert ckpt.last_saved_step == 1
        assert "step 2 was not saved" in caplog.text
        assert "No space left" in caplog.text
        ckpt.after_step()
    assert ckpt.failures_in_a_row == 0
    assert steps_on(inner) == [1, 3]


def test_a_failed_save_is_raised_by_the_next_call_if_asked():
    tier = failing(MemoryTier())
    with Checkpointer(tier, counter(), every=2, on_error="raise") as ckpt:
        ckpt.after_step()
        ckpt.after_step()
        with pytest.raises(WriteFailed, match="No space left"):
            step_until_it_raises(ckpt)
        ckpt.save(wait=True)
    assert ckpt.failures_in_a_row == 0


def test_too_many_failures_in_a_row_are_raised_whatever_on_error_says():
    tier = failing(MemoryTier(), times="forever", nth=1)
    with Checkpointer(tier, counter(), every=1, max_failures=3) as ckpt:
        with pytest.raises(TooManyFailures, match="last 3 saves failed; last published step: 1"):
            step_until_it_raises(ckpt)
        assert ckpt.step in (4, 5), "told by the next call, or by the next save at the latest"
        assert ckpt.last_saved_step == 1


def test_leaving_the_with_block_raises_the_error_of_the_last_save():
    with (
        pytest.raises(WriteFailed, match="No space left"),
        Checkpointer(failing(MemoryTier()), counter(), every=1) as ckpt,
    ):
        ckpt.after_step()


def test_an_error_of_the_training_is_not_hidden_by_one_of_the_save(caplog):
    with pytest.raises(ZeroDivisionError):
        train_and_crash(failing(MemoryTier()))
    assert "No space left" in caplog.text


def test_save_with_wait_raises_whatever_on_error_says():
    with (
        Checkpointer(failing(MemoryTier()), counter(), every=1000) as ckpt,
        pytest.raises(WriteFailed),
    ):
        ckpt.save(wait=True)


def test_a_failed_save_leaves_no_files_and_older_checkpoints_untouched(root):
    run(root, 2)
    before = steps_on(root)
    with pytest.raises(WriteFailed):
        train_on(failing(root, times="forever"), 1)
    assert [step for step in before if not root.child(f"step_{step:08d}").list()] == []
    assert root.child("step_00000003").list() == []
    assert find_latest_valid(root, depth="digest").step == 2


def test_a_lost_answer_of_the_commit_deletes_nothing_and_the_step_is_there(root):
    tier = FaultyTier(root, [Fault(verb="create", error=errno.EIO, lost_answer=True)])
    with Checkpointer(tier, counter(4), every=1) as ckpt:
        ckpt.after_step()
        ckpt.wait()
    assert find_latest_valid(root, depth="digest").step == 1


# --- what to restore (case 09) ---


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
        with pytest.raises(BrokenShard):
            ckpt.restore(2)
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
    import torch.distributed.checkpoint as dcp

    model = nn.Linear(3, 2)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "step_7")
    fresh = nn.Linear(3, 2)
    with Checkpointer(tmp_path, {"model": fresh}, every=1) as ckpt:
        restored = ckpt.restore()
        assert (restored.step, restored.world_size) == (7, 0)
        ckpt.after_step()
    assert torch.equal(fresh.weight, model.weight)
    assert find_latest_valid(tmp_path).step == 8


def test_a_model_of_another_shape_is_an_error_that_names_the_key(tmp_path):
    with Checkpointer(tmp_path, {"model": nn.Linear(3, 2)}, every=1) as ckpt:
        ckpt.after_step()
    with (
        Checkpointer(tmp_path, {"model": nn.Linear(4, 2)}, every=1) as ckpt,
        pytest.raises(StateMismatch, match=r"model\.weight"),
    ):
        ckpt.restore()


# --- retention ---


def test_the_last_two_are_kept_by_default(root):
    run(root, 7, keep_last=2)
    assert steps_on(root) == [6, 7]


def test_every_nth_is_kept_as_well(root):
    run(root, 10, keep_last=1, keep_every=4)
    assert steps_on(root) == [4, 8, 10]


def test_a_failed_save_lets_nothing_go():
    inner = MemoryTier()
    with pytest.raises(WriteFailed):
        train_on(failing(inner, nth=2, times="forever"), 4)
    assert steps_on(inner) == [1, 2]
    assert find_latest_valid(inner).step == 2


def test_broken_newer_steps_do_not_count_as_kept(tmp_path):
    run(tmp_path, 2)
    for shard in (tmp_path / "step_00000002").glob("*.distcp"):
        shard.write_bytes(b"")
    shutil.copytree(tmp_path / "step_00000002", tmp_path / "step_00000009")
    run(tmp_path, 1, keep_last=2)
    assert find_latest_valid(tmp_path).step == 2
    assert find_latest_valid(tmp_path, depth="digest").step == 2
    restored_from(tmp_path, step=1)


def test_files_of_the_user_in_a_checkpoint_folder_survive_retention(tmp_path):
    run(tmp_path, 1, keep_last=1)
    (tmp_path / "step_00000001" / "notes.txt").write_text("mine")
    run(tmp_path, 2, keep_last=1)
    assert files_in(tmp_path / "step_00000001") == ["notes.txt"]
    assert find_latest_valid(tmp_path).step == 3


# --- lease and cleaning ---


def leave_behind(root_path, *, age_s=0.0, now_s=1_700_000_000.0):
    """Put what a killed save leaves into two step folders, last modified ``age_s`` ago."""
    left = [
        root_path / "step_00000001" / "__0_0_aaaaaaaaaaaa.distcp",
        root_path / "step_00000002" / "__0_0_bbbbbbbbbbbb.distcp",
        root_path / "step_00000002" / "__3_1_bbbbbbbbbbbb.distcp",
        root_path / "step_00000002" / ".metadata.bbbbbbbbbbbb.tmp",
    ]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
        os.utime(path, (now_s - age_s, now_s - age_s))
    return left


def clean_at(root_path, now_s=1_700_000_000.0):
    with Checkpointer(root_path, counter(), every=1, clock=ManualClock(wall_s=now_s)) as ckpt:
        return ckpt.restore()


def test_leftovers_of_a_dead_attempt_go_at_restore_and_the_checkpoint_stays(tmp_path):
    run(tmp_path, 1)
    left = leave_behind(tmp_path, age_s=1000.0)
    assert clean_at(tmp_path).step == 1
    assert [path for path in left if path.exists()] == []
    assert not (tmp_path / "step_00000002").exists()
    assert find_latest_valid(tmp_path, depth="digest").step == 1


def test_leftovers_stay_within_the_grace_period(tmp_path):
    run(tmp_path, 1)
    left = leave_behind(tmp_path, age_s=10.0)
    clean_at(tmp_path)
    assert all(path.exists() for path in left)


def test_foreign_files_are_never_cleaned_away(tmp_path):
    run(tmp_path, 1)
    foreign = [
        tmp_path / "step_00000002" / "weights.bin",
        tmp_path / "step_00000002" / "__0_0.distcp",
        tmp_path / "best" / "__0_0_aaaaaaaaaaaa.distcp",
        tmp_path / "__0_0_aaaaaaaaaaaa.distcp",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
        os.utime(path, (0, 0))
    clean_at(tmp_path)
    assert all(path.exists() for path in foreign)


def put_lease(root_path, **content):
    folder = root_path / ".checkfreq"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lease.json").write_text(json.dumps(content))


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_nothing_is_cleaned_under_the_lease_of_another_live_run(tmp_path, host, caplog):
    run(tmp_path, 1)
    left = leave_behind(tmp_path, age_s=1000.0)
    name = socket.gethostname() if host == "here" else "another-node"
    put_lease(tmp_path, run_id="f" * 12, host=name, pid=os.getppid(), renewed_s=1_700_000_000.0)
    assert clean_at(tmp_path).step == 1
    assert all(path.exists() for path in left)
    assert "f" * 12 in caplog.text
    lease = json.loads((tmp_path / ".checkfreq" / "lease.json").read_text())
    assert lease["run_id"] == "f" * 12


@pytest.mark.parametrize("why", ["dead process", "expired", "unreadable"])
def test_the_lease_of_a_dead_run_holds_nothing_back(tmp_path, why):
    run(tmp_path, 1)
    left = leave_behind(tmp_path, age_s=1000.0)
    if why == "dead process":
        put_lease(tmp_path, run_id="f" * 12, host=socket.gethostname(), pid=2**22 + 1,
                  renewed_s=1_700_000_000.0)  # fmt: skip
    elif why == "expired":
        put_lease(tmp_path, run_id="f" * 12, host="another-node", pid=1,
                  renewed_s=1_700_000_000.0 - 100_000.0)  # fmt: skip
    else:
        put_lease(tmp_path)
    clean_at(tmp_path)
    assert [path for path in left if path.exists()] == []


def test_a_live_run_holds_the_lease_and_gives_it_back(tmp_path):
    lease = tmp_path / ".checkfreq" / "lease.json"
    with Checkpointer(tmp_path, counter(), every=1) as ckpt:
        ckpt.restore()
        assert json.loads(lease.read_text())["pid"] == os.getpid()
    assert not lease.exists()


def test_a_run_that_saves_without_restore_holds_the_lease_while_it_writes(tmp_path):
    gate = GatedTier(LocalTier(tmp_path), verbs=["write_shard"])
    with Checkpointer(gate, counter(), every=1) as ckpt:
        ckpt.after_step()
        gate.wait_until_held()
        held = (tmp_path / ".checkfreq" / "lease.json").exists()
        gate.release()
    assert held


def test_the_probe_of_the_root_leaves_nothing_behind(tmp_path):
    with Checkpointer(tmp_path, counter(), every=1):
        pass
    assert files_in(tmp_path) == []


# --- arguments ---


@pytest.mark.parametrize(
    "options",
    [{"every": 0}, {"every": 1, "keep_last": 0}, {"every": 1, "on_error": "shrug"},
     {"every": 1, "keep_every": 0}],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=r"every|keep_last|on_error"):
        Checkpointer(tmp_path, counter(), **options)


@pytest.mark.parametrize("name", ["", "a.b", "a/b"])
def test_part_names_that_could_collide_are_refused(tmp_path, name):
    with pytest.raises(UnsupportedState, match="names are"):
        Checkpointer(tmp_path, {name: 1}, every=1)


def test_an_empty_state_is_refused(tmp_path):
    with pytest.raises(ValueError, match="empty"):
        Checkpointer(tmp_path, {}, every=1)


def test_all_kinds_of_parts_round_trip(tmp_path):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Linear(4, 4)
        optim = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
        return {
            "model": model,
            "optim": optim,
            "sched": torch.optim.lr_scheduler.CosineAnnealingLR(optim, 100),
            "rng": PerRank(torch.get_rng_state()),
            "number": seed,
            "text": f"seed {seed}",
            "large": torch.full((100, 100), float(seed)),
            "nothing": None,
            "list": [seed, torch.full((3,), seed), {"a": (seed,)}],
        }

    def train(parts, steps):
        for _ in range(steps):
            parts["model"](torch.ones(2, 4)).sum().backward()
            parts["optim"].step()
            parts["sched"].step()
            parts["optim"].zero_grad()

    first = make(1)
    train(first, 3)
    with Checkpointer(tmp_path, first, every=1) as ckpt:
        ckpt.after_step()
    second = make(2)
    with Checkpointer(tmp_path, second, every=1) as ckpt:
        assert ckpt.restore().step == 1
    assert torch.equal(second["rng"].value, first["rng"].value)
    assert torch.equal(second["large"], first["large"])
    assert (second["number"], second["text"], second["nothing"]) == (1, "seed 1", None)
    assert str(second["list"]) == str(first["list"])
    train(first, 4)
    train(second, 4)
    for ours, theirs in zip(second["model"].parameters(), first["model"].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert second["sched"].get_last_lr() == first["sched"].get_last_lr()


def test_small_states_make_small_files(tmp_path):
    parts = {
        "model": nn.Linear(1000, 1000),
        "rng": PerRank(torch.get_rng_state()),
        "counters": {"seen": torch.arange(10), "step": torch.tensor(3)},
        "few": torch.ones(3),
    }
    with Checkpointer(tmp_path, parts, every=1) as ckpt:
        ckpt.after_step()
    (shard,) = tmp_path.rglob("*.distcp")
    assert shard.stat().st_size < 4_004_000 + 50_000
