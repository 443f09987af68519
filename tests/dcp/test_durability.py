"""Case 03: what is made durable, in which order."""

import os
import stat

import pytest
import torch
import torch.distributed.checkpoint as dcp
from behaviour_tools import save, some_state

from dcp_checkfreq import CheckFreqWriter, Checkpointer


class Recorder:
    """Writes down the calls that make something durable or visible, and carries them out."""

    def __init__(self, monkeypatch):
        self.events = []
        for name in ("fsync", "fdatasync"):
            self._watch(monkeypatch, name, lambda fd: os.readlink(f"/proc/self/fd/{fd}"))
        for name in ("link", "rename"):
            self._watch(monkeypatch, name, lambda source, target, **_: os.fspath(target))
        for name in ("mkdir", "unlink"):
            self._watch(monkeypatch, name, lambda path, *_, **__: os.fspath(path))

        def global_sync():
            raise AssertionError("os.sync() stops the whole machine")

        monkeypatch.setattr(os, "sync", global_sync)

    def _watch(self, monkeypatch, name, describe):
        real = getattr(os, name)

        def call(*args, **options):
            about = describe(*args, **options)
            result = real(*args, **options)
            self.events.append((name, about))
            return result

        monkeypatch.setattr(os, name, call)

    def position(self, name, path, *, last=False):
        at = [n for n, event in enumerate(self.events) if event == (name, str(path))]
        assert at, f"no {name} of {path} in {self.events}"
        return at[-1 if last else 0]


def test_shards_then_folder_then_record_then_link_then_folder(tmp_path, monkeypatch):
    save(some_state(), tmp_path / "step_0")  # the mount is tried out at the first save
    folder = tmp_path / "step_1"
    seen = Recorder(monkeypatch)
    save(some_state(), folder)
    (shard,) = folder.glob("*.distcp")
    attempt = shard.stem.split("_")[-1]
    data = seen.position("fdatasync", shard)
    names = seen.position("fsync", folder)
    record = seen.position("fsync", folder / f".metadata.{attempt}.tmp")
    link = seen.position("link", folder / ".metadata")
    commit = seen.position("fsync", folder, last=True)
    assert data < names < record < link < commit


def test_new_folders_are_made_durable_in_their_parents_before_the_commit(tmp_path, monkeypatch):
    seen = Recorder(monkeypatch)
    save(some_state(), tmp_path / "a" / "run" / "step_1")
    link = seen.position("link", tmp_path / "a" / "run" / "step_1" / ".metadata")
    for parent, child in ((".", "a"), ("a", "a/run"), ("a/run", "a/run/step_1")):
        made = seen.position("mkdir", tmp_path / child)
        durable = seen.position("fsync", (tmp_path / parent).resolve(), last=True)
        assert made < durable < link, child


def test_every_shard_file_is_made_durable(tmp_path, monkeypatch):
    seen = Recorder(monkeypatch)
    state = {f"w{n}": torch.full((4 << 20,), float(n)) for n in range(5)}
    save(state, tmp_path, threads=2)
    shards = list(tmp_path.glob("*.distcp"))
    assert len(shards) == 2
    for shard in shards:
        assert seen.position("fdatasync", shard) < seen.position("link", tmp_path / ".metadata")


def test_an_overwrite_removes_old_files_only_after_the_new_record_is_durable(tmp_path, monkeypatch):
    save(some_state(1.0), tmp_path)
    (old,) = tmp_path.glob("*.distcp")
    seen = Recorder(monkeypatch)
    save(some_state(2.0), tmp_path, overwrite=True)
    renamed = seen.position("rename", tmp_path / ".metadata")
    durable = [n for n, event in enumerate(seen.events) if n > renamed and event[0] == "fsync"]
    assert seen.position("unlink", old) > durable[0]


def test_retention_makes_a_checkpoint_none_before_its_files_go(tmp_path, monkeypatch):
    state = {"w": torch.ones(10)}
    with Checkpointer(tmp_path, state, every=1, keep_last=1) as ckpt:
        ckpt.after_step()
        ckpt.wait()
        seen = Recorder(monkeypatch)
        ckpt.after_step()
    folder = tmp_path / "step_00000001"
    gone = seen.position("unlink", folder / ".metadata")
    shards = [
        n
        for n, (name, path) in enumerate(seen.events)
        if name == "unlink" and path.startswith(f"{folder}/__")
    ]
    syncs = [n for n, event in enumerate(seen.events) if event == ("fsync", str(folder))]
    assert shards
    assert any(gone < sync < min(shards) for sync in syncs)
    assert gone > seen.position("link", tmp_path / "step_00000002" / ".metadata")


@pytest.mark.parametrize("code", ["EPERM", "EOPNOTSUPP", "EMLINK"])
def test_a_file_system_without_links_gets_an_exclusive_commit_all_the_same(
    tmp_path, monkeypatch, code
):
    import errno

    from behaviour_tools import fails_with, load, same

    from dcp_checkfreq import CheckpointExists

    def no_links(source, target, **options):
        raise OSError(getattr(errno, code), "no links here", target)

    monkeypatch.setattr(os, "link", no_links)
    save(some_state(1.0), tmp_path)
    with fails_with(CheckpointExists):
        save(some_state(2.0), tmp_path)
    assert same(load(some_state(), tmp_path), some_state(1.0))
    assert not list(tmp_path.glob("*.tmp"))


def test_files_have_the_modes_of_the_users_umask(tmp_path):
    before = os.umask(0o027)
    try:
        save(some_state(), tmp_path / "step_1")
    finally:
        os.umask(before)
    for path in (tmp_path / "step_1").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o640, path


def test_a_background_save_reports_done_only_after_the_commit_is_durable(tmp_path, monkeypatch):
    seen = Recorder(monkeypatch)
    future = dcp.async_save(some_state(), storage_writer=CheckFreqWriter(tmp_path / "step_1"))
    at_done = []
    future.add_done_callback(lambda _: at_done.append(len(seen.events)))
    future.result()
    assert at_done[0] > seen.position("fsync", tmp_path / "step_1", last=True)
