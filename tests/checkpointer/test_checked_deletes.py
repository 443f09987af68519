"""Retention deletes what this run published, while what it keeps is whole, and nothing else."""

import os
import shutil

import pytest
from behaviour_tools import files_in
from checkpointer_tools import counter, run, steps_on

from dcp_checkfreq import Checkpointer, SaveFailed, find_latest_valid
from dcp_checkfreq.format import metadata as metadata_format
from dcp_checkfreq.format import names
from dcp_checkfreq.recovery.clean import clean_root
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import ForwardingTier, ManualClock, MemoryTier

MUCH_LATER_S = 1e9  # after the end of the last clock in use


def steps_in(path):
    return steps_on(LocalTier(path))


class Training:
    """One that saves every step, and waits for it."""

    def __init__(self, root, **options):
        self.state = counter()
        options = {"every": 1, "keep_last": 1, "preempt_signals": ()} | options
        self.ckpt = Checkpointer(root, self.state, **options)

    def __enter__(self):
        self.ckpt.__enter__()
        self.ckpt.restore()
        return self

    def __exit__(self, *error):
        return self.ckpt.__exit__(*error)

    def step(self, times=1):
        for _ in range(times):
            self.state["w"].fill_(float(self.ckpt.step + 1))
            self.ckpt.after_step()
            self.ckpt.wait()


def test_a_step_that_was_removed_by_hand_does_not_stop_retention(tmp_path, caplog):
    with Training(tmp_path, keep_last=2) as training:
        training.step(2)
        shutil.rmtree(tmp_path / "step_00000001")
        training.step(4)
        assert steps_in(tmp_path) == [5, 6]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("damage", ["a shard is gone", "cut short", "no record"])
def test_while_what_is_kept_is_not_whole_nothing_that_is_whole_goes(tmp_path, damage, caplog):
    """Another process has damaged step 2 when step 3 is to take the place of step 1."""
    with Training(tmp_path, keep_last=2) as training:
        training.step(2)
        (shard,) = (tmp_path / "step_00000002").glob("*.distcp")
        if damage == "a shard is gone":
            shard.unlink()
        elif damage == "cut short":
            shard.write_bytes(shard.read_bytes()[:-1])
        else:
            (tmp_path / "step_00000002" / ".metadata").unlink()
        training.step()
        whole = find_latest_valid(tmp_path, depth="digest")
        assert whole.step == 3
        assert (tmp_path / "step_00000001" / ".metadata").exists(), "2 is none of the last two"
        training.step()
        assert [s for s in steps_in(tmp_path) if s != 2] == [3, 4]
    assert any("step_00000002 does not count" in r.getMessage() for r in caplog.records)


def test_a_checkpoint_that_took_the_name_meanwhile_stays(tmp_path):
    """Another run has started afresh in the root, and has saved a step of the same number."""
    with Training(tmp_path) as training:
        training.step(1)
        other = tmp_path / "other"
        run(other, 1)
        shutil.rmtree(tmp_path / "step_00000001")
        shutil.copytree(other / "step_00000001", tmp_path / "step_00000001")
        before = files_in(tmp_path / "step_00000001")
        training.step(2)
        assert steps_in(tmp_path) == [1, 3]
        assert files_in(tmp_path / "step_00000001") == before


def test_of_a_step_that_is_a_link_only_the_link_goes(tmp_path):
    archive = tmp_path / "archive"
    root = tmp_path / "run"
    with Training(root) as training:
        training.step(1)
        shutil.move(root / "step_00000001", archive)
        (root / "step_00000001").symlink_to(archive)
        before = files_in(archive)
        training.step(2)
        assert steps_in(root) == [3]
        assert not (root / "step_00000001").is_symlink()
    assert files_in(archive) == before
    # A restart cleans, and looks at the same.
    (root / "step_00000001").symlink_to(archive)
    (archive / names.shard_file(0, 0, "a" * 12)).write_bytes(b"someone else's")
    clean_root(LocalTier(root), now_s=MUCH_LATER_S * 3)
    assert names.shard_file(0, 0, "a" * 12) in files_in(archive)


class Resists(ForwardingTier):
    """Refuses to delete anything in one folder."""

    def __init__(self, inner, folder):
        super().__init__(inner)
        self.folder = folder

    def child(self, name):
        child = super().child(name)
        if name == self.folder:
            child._top = _Refusing(child.inner)
        return child


class _Refusing(ForwardingTier):
    def around(self, verb, name, call):
        if verb in ("delete", "revoke"):
            raise PermissionError(13, "this folder resists", name)
        return call()


def test_a_folder_that_resists_does_not_stop_the_others_from_going(caplog):
    inner = MemoryTier()
    with Training(Resists(inner, "step_00000002")) as training:
        training.step(5)
    assert steps_on(inner) == [2, 5]
    assert any("step_00000002 stays for now" in r.getMessage() for r in caplog.records)


def test_cleaning_goes_on_behind_a_folder_that_resists():
    inner = MemoryTier(clock=ManualClock(wall_s=0.0))
    for step in (1, 2, 3):
        inner.poke(f"step_0000000{step}/{names.shard_file(0, 0, 'a' * 12)}", b"x")
    removed = clean_root(Resists(inner, "step_00000002"), now_s=MUCH_LATER_S)
    assert sorted({path.split("/")[0] for path in removed}) == ["step_00000001", "step_00000003"]


def test_what_killed_runs_left_in_the_run_folder_goes(tmp_path):
    run(tmp_path, 1)
    folder = tmp_path / ".checkfreq"
    kept = set(files_in(folder))
    attempt = "0123456789ab"
    dead = {
        f"lease.json.{attempt}.tmp",
        f"root-id.{attempt}",
        f"profile-00112233445566aa.json.{attempt}",
        f"probe-{attempt}",
        f"probe-{attempt}.tmp",
    }
    for name in [*dead, "notes.txt", "lease.json.tmp"]:
        (folder / name).write_bytes(b"")
    clean_root(LocalTier(tmp_path), now_s=0.0)
    assert dead <= set(files_in(folder)), "they are young"
    clean_root(LocalTier(tmp_path), now_s=MUCH_LATER_S * 3)
    assert set(files_in(folder)) == kept | {"notes.txt", "lease.json.tmp"}


def test_a_file_that_only_the_record_names_belongs_to_the_checkpoint(tmp_path):
    """A planner let two ranks write the same items: the file of the second holds none of them."""
    run(tmp_path, 1)
    folder = LocalTier(tmp_path).child("step_00000001")
    metadata, record = metadata_format.load(folder.read(".metadata"), "here")
    spare = names.shard_file(1, 0, "b" * 12)
    folder.write_shard(spare, [memoryview(b"spare")], 5)
    record.files[spare] = 5
    folder.replace(".metadata", metadata_format.dump(metadata, record), scratch="s")
    clean_root(LocalTier(tmp_path), now_s=MUCH_LATER_S * 3)
    assert spare in files_in(tmp_path / "step_00000001")
    assert find_latest_valid(tmp_path, depth="digest").step == 1


def test_a_step_that_is_a_link_and_was_left_behind_is_saved_anew_beside_what_it_leads_to(tmp_path):
    root, archive = tmp_path / "run", tmp_path / "archive"
    run(root, 3)
    shutil.move(root / "step_00000003", archive)
    (root / "step_00000003").symlink_to(archive)
    before = {name: (archive / name).read_bytes() for name in files_in(archive)}
    with Training(root, keep_last=9) as training:
        training.ckpt.restore(step=2)
        training.step()
        assert training.ckpt.last_saved_step == 3
    assert {name: (archive / name).read_bytes() for name in files_in(archive)} == before
    assert not (root / "step_00000003").is_symlink()
    assert find_latest_valid(root, depth="digest").step == 3


def test_nothing_is_written_through_a_link_to_what_is_not_this_runs(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    root = tmp_path / "run"
    with Training(root, on_error="raise") as training:
        training.step(1)
        (root / "step_00000002").symlink_to(elsewhere)
        with pytest.raises(SaveFailed, match="it is a link"):
            training.step(1)
        training.step(1)
    assert files_in(elsewhere) == ["precious"]
    assert find_latest_valid(root).step == 3


def test_a_run_folder_that_is_a_link_is_left_alone_and_the_root_can_be_restored(tmp_path):
    run(tmp_path / "run", 2)
    other = tmp_path / "other"
    shutil.move(tmp_path / "run" / ".checkfreq", other)
    for name in ("lease.json", "root-id"):
        (other / name).write_text("another run's")
    (tmp_path / "run" / ".checkfreq").symlink_to(other)
    before = {name: (other / name).read_bytes() for name in files_in(other)}
    with Training(tmp_path / "run", on_error="raise") as training:
        assert training.ckpt.last_saved_step == 2
        with pytest.raises(SaveFailed, match="is a link"):
            training.step(1)
    assert {name: (other / name).read_bytes() for name in files_in(other)} == before


def test_a_root_whose_name_is_not_utf_8_can_be_restored(tmp_path):
    root = os.path.join(tmp_path, os.fsdecode(b"run \xff\xfe"))
    run(root, 2)
    assert find_latest_valid(root, depth="digest").step == 2
    state = counter()
    with Checkpointer(root, state, preempt_signals=()) as ckpt:
        assert ckpt.restore().step == 2
    assert bool((state["w"] == 2).all())
