"""A run that was forgotten and still saves: it hears of it, and does nobody any harm."""

import json
import os
import shutil
import subprocess

import pytest
import torch.distributed.checkpoint as dcp
from checkpointer_tools import counter, restored_from, run, steps_on

from dcp_checkfreq import (
    CheckFreqWriter,
    Checkpointer,
    CheckpointExists,
    LeftBehind,
    TooManyFailures,
    find_latest_valid,
)
from dcp_checkfreq.dcp.rank_save import OfRun
from dcp_checkfreq.format.names import step_folder
from dcp_checkfreq.recovery.plan import begin_history
from dcp_checkfreq.recovery.scan import scan
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import GatedTier


def job(root, **options):
    state = counter()
    return Checkpointer(root, state, every=1, preempt_signals=(), **({"keep_last": 3} | options))


def advance(ckpt, steps=1):
    for _ in range(steps):
        ckpt.after_step()
        ckpt.wait()


@pytest.mark.parametrize("restore", [{"step": 1}, {"step": 2}, {"fresh_start": True}])
def test_a_run_that_another_one_left_behind_cannot_save_any_more(root, restore):
    with job(root, on_error="raise") as old:
        old.restore()
        advance(old, 3)
        with job(root) as new:
            new.restore(**restore)
            advance(old)  # nothing is saved yet by the other: it may still change its mind
            advance(new, 2)
            saved = new.step
            before = steps_on(root)
            for _ in range(2):
                with pytest.raises(LeftBehind, match=r"went on from step|started afresh"):
                    advance(old)
            assert steps_on(root) == before
            assert find_latest_valid(root).step == saved
            advance(new)
        old._saver.wait_result()
    restored, _ = restored_from(root)
    assert restored.step == saved + 1


def test_by_default_it_ends_after_so_many_failures(root):
    with job(root, max_failures=2) as old:
        old.restore()
        advance(old, 2)
        with job(root) as new:
            new.restore(1)
            advance(new)
        advance(old)
        with pytest.raises(TooManyFailures, match="another run"):
            advance(old)


def test_who_restores_again_goes_on(root):
    with job(root, on_error="raise") as old:
        old.restore()
        advance(old, 3)
        with job(root) as new:
            new.restore(1)
            advance(new)
        with pytest.raises(LeftBehind):
            advance(old)
        assert old.restore(3).step == 3
        advance(old)
        assert find_latest_valid(root).step == 4
    restored, _ = restored_from(root)
    assert restored.step == 4


def test_a_run_that_was_left_while_its_save_was_being_written_does_not_publish_it(root):
    run(root, 2)
    gate = GatedTier(root, verbs=["write_shard"])
    with job(gate, on_error="raise") as old:
        old.restore()
        old.after_step()
        gate.wait_until_held()
        records = scan(root)
        (first,) = (record for record in records if record.step == 1)
        lease = json.loads(root.child(".checkfreq").read("lease.json"))
        lineage = begin_history("the other one", first, records, others=[lease["run_id"]])
        folder = root.child(step_folder(2))
        dcp.save(
            {},
            storage_writer=CheckFreqWriter(
                folder, _of_run=OfRun(lineage, may_replace=lambda: True)
            ),
        )
        gate.release()
        with pytest.raises(LeftBehind, match=r"the other one\) went on from step 1"):
            old.wait()
    assert steps_on(root) == [1, 2]
    assert find_latest_valid(root).step == 2
    assert [e.name for e in root.child("step_00000003").list()] == []


def test_who_only_looks_leaves_nobody(root):
    with job(root, on_error="raise") as ckpt:
        ckpt.restore()
        advance(ckpt, 3)
        restored_from(root, step=1)
        with job(root) as other:
            other.restore(fresh_start=True)
            advance(ckpt)
        assert find_latest_valid(root).step == 4


def test_a_job_that_goes_on_from_the_newest_step_replaces_what_an_orphan_saves_beside_it(root):
    with job(root, on_error="raise") as orphan:
        orphan.restore()
        advance(orphan, 2)
        with job(root, on_error="raise") as new:
            new.restore()
            advance(orphan)
            advance(new)  # the same step
            with pytest.raises(LeftBehind):
                advance(orphan)
            advance(new, 2)
            assert new.last_saved_step == 5


@pytest.mark.parametrize("restore", [{}, {"step": 1}, {"fresh_start": True}])
def test_a_run_that_woke_up_before_its_first_save_is_not_in_the_way_of_the_one_that_took_over(
    root, restore
):
    run(root, 2)
    with job(root, on_error="raise") as hung:
        hung.restore()
        with job(root, on_error="raise") as new:
            new.restore(**restore)
            advance(hung)  # step 3
            advance(new, 4)
            assert find_latest_valid(root).step == new.step
            with pytest.raises(LeftBehind):
                advance(hung)
    restored, _ = restored_from(root)
    assert restored.step == new.step


def test_in_a_root_that_was_made_anew_nothing_of_the_old_run_is_saved(tmp_path):
    root = tmp_path / "run"
    with job(root, on_error="raise") as old:
        old.restore()
        advance(old, 3)
        shutil.rmtree(root)
        with job(root) as new:
            assert new.restore() is None
            advance(new, 2)
            before = sorted(root.rglob("*.distcp"))
            with pytest.raises(LeftBehind, match="made a new one in its place"):
                advance(old)
            assert sorted(root.rglob("*.distcp")) == before
            assert find_latest_valid(root).step == 2
            assert not (root / "step_00000004").exists()


def test_a_root_that_was_emptied_is_saved_into_with_a_word(tmp_path, caplog):
    root = tmp_path / "run"
    with job(root, on_error="raise") as ckpt:
        ckpt.restore()
        advance(ckpt, 2)
        was = (root / ".checkfreq" / "root-id").read_bytes()
        shutil.rmtree(root)
        advance(ckpt)
        assert find_latest_valid(root).step == 3
        assert (root / ".checkfreq" / "root-id").read_bytes() == was
    assert "root-id is gone" in caplog.text


def mount(source, folder):
    command = ["mount", *source, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr}")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="only root can mount a disk"
)
@pytest.mark.parametrize("below", ["", "run"])
def test_nothing_is_saved_below_a_mount_that_is_gone(tmp_path, below):
    point, disk = tmp_path / "mounted", tmp_path / "disk"
    point.mkdir()
    disk.mkdir()
    mount(["-t", "tmpfs", "-o", "size=8m", "x"], disk)
    try:
        mount(["--bind", str(disk)], point)
        with job(point / below, max_failures=9, keep_last=2) as ckpt:
            ckpt.restore()
            advance(ckpt, 3)
            subprocess.run(["umount", "-l", point], check=True)
            advance(ckpt, 2)
            assert [path for path in point.rglob("*") if path.name.startswith("step_")] == []
            mount(["--bind", str(disk)], point)
            advance(ckpt, 2)
            assert steps_on(LocalTier(point / below)) == [6, 7]
            failed = [(record.step, record.error) for record in ckpt.history if record.error]
        assert [step for step, _ in failed] == [4, 5]
        assert all("another disk than before" in str(error) for _, error in failed)
        assert find_latest_valid(point / below).step == 7
    finally:
        subprocess.run(["umount", "-l", point], check=False)
        subprocess.run(["umount", "-l", disk], check=False)


def test_a_whole_step_that_is_in_the_way_and_was_not_left_is_still_an_error(root):
    with job(root, on_error="raise") as first, job(root, on_error="raise") as second:
        first.restore()
        second.restore()
        advance(second)
        with pytest.raises((LeftBehind, CheckpointExists)):
            advance(first)
    with job(root, on_error="raise") as ckpt:
        ckpt.restore()
        dcp.save({}, storage_writer=CheckFreqWriter(root.child(step_folder(2))))
        with pytest.raises(CheckpointExists):
            advance(ckpt)
