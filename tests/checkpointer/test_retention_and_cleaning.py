"""`Checkpointer`: what it keeps, what it lets go, and what it cleans up."""

import json
import os
import shutil
import socket

import pytest
from behaviour_tools import files_in
from checkpointer_tools import counter, failing, restored_from, run, steps_on, train_on

from dcp_checkfreq import (
    Checkpointer,
    WriteFailed,
    find_latest_valid,
)
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import GatedTier, ManualClock, MemoryTier

# --- retention ---


def test_the_last_two_are_kept_by_default(root):
    run(root, 7, keep_last=2)
    assert steps_on(root) == [6, 7]


def test_every_nth_is_kept_as_well(root):
    run(root, 10, keep_last=1, keep_every=4)
    assert steps_on(root) == [4, 8, 10]


def test_removing_old_checkpoints_holds_up_no_step_and_is_over_after_wait():
    inner = MemoryTier()
    gate = GatedTier(inner, verbs=["delete"], name="*.distcp")
    with Checkpointer(gate, counter(), every=1, keep_last=1) as ckpt:
        for _ in range(2):
            ckpt.after_step()
            ckpt._loop.finish_in_flight()  # as the next save does
        gate.wait_until_held()  # step 1 is being removed
        ckpt.after_step()  # saves step 3 nevertheless, which is written later
        assert ckpt.last_saved_step == 2
        gate.release()
        ckpt.wait()
        assert ckpt.last_saved_step == 3
        assert steps_on(inner) == [3]


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
