"""A local disk in front of a slow storage: what is written where, and what is read from where."""

import errno
import fnmatch
import os
import re
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp
from staged_runs import train
from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq import CheckFreqReader, CheckFreqWriter, Checkpointer, find_latest_valid
from dcp_checkfreq.errors import PublishUnknown, WriteFailed
from dcp_checkfreq.format import names
from dcp_checkfreq.staging.mount_tier import MountTier
from dcp_checkfreq.staging.staged_tier import staged_root
from dcp_checkfreq.storage.local import tier as local_tier
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.storage.open import open_tier
from dcp_checkfreq.storage.tier import StaleCredentials
from dcp_checkfreq.testing import (
    Fault,
    FaultyTier,
    ForwardingTier,
    GatedTier,
    MemoryTier,
    TierSuite,
)


def state_of(step):
    return {
        **{f"w{n}": torch.full((50, 31), step * 10.0 + n) for n in range(4)},
        "note": f"step {step}",
    }


def save(root, step, staging, **options):
    folder = root.child(names.step_folder(step))
    writer = CheckFreqWriter(folder, staging_dir=staging, **options)
    dcp.save(state_of(step), storage_writer=writer)


def load(tier, step, **options):
    state = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for key, value in state_of(step).items()
    }
    reader = CheckFreqReader(tier, **options)
    dcp.load(state, storage_reader=reader)
    for key, value in state_of(step).items():
        same = torch.equal(state[key], value) if isinstance(value, torch.Tensor) else None
        assert same or state[key] == value, key
    return reader


def below(folder):
    """Return all files below a folder, by name."""
    return sorted(
        os.path.relpath(os.path.join(path, name), folder)
        for path, _, found in os.walk(folder)
        for name in found
    )


def shards(folder):
    return [os.path.basename(name) for name in below(folder) if name.endswith(".distcp")]


def test_a_save_is_published_on_the_slow_side_and_a_copy_stays_on_the_local_disk(tmp_path):
    slow = LocalTier(tmp_path / "slow")
    save(slow, 1, tmp_path / "nvme")
    on_slow = shards(tmp_path / "slow")
    assert on_slow
    assert shards(tmp_path / "nvme") == on_slow
    assert not [n for n in below(tmp_path / "nvme") if n.endswith((".metadata", ".lock", ".tmp"))]
    load(slow.child("step_00000001"), 1)
    # stock DCP reads it, and needs nothing of the local disk
    stock = {"w0": torch.zeros(50, 31)}
    dcp.load(stock, storage_reader=dcp.FileSystemReader(tmp_path / "slow" / "step_00000001"))
    assert torch.equal(stock["w0"], state_of(1)["w0"])


def local_files(staging):
    return [name for name in below(staging) if not name.endswith(("root-id", ".up"))]


class TestStaged(TierSuite):
    """What is asked of a staged tier is asked of its remote side."""

    def make_tier(self, tmp_path):
        return staged_root(MemoryTier(), tmp_path)

    def raw_files(self, tier, tmp_path):
        return tier.remote.files()


def test_a_copy_on_the_local_disk_is_read_instead_of_the_slow_side(tmp_path):
    calls = FaultyTier(MemoryTier(), [])
    save(calls, 1, tmp_path)
    calls.calls.clear()
    load(calls.child("step_00000001"), 1, staging_dir=tmp_path)
    assert [verb for verb, name in calls.calls if name != ".metadata"] == []
    load(calls.child("step_00000001"), 1, staging_dir=tmp_path / "of another node")
    assert [verb for verb, name in calls.calls if name != ".metadata"]


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_local_copy_costs_nothing_but_time(tmp_path, damage):
    slow = MemoryTier()
    save(slow, 1, tmp_path, threads=1)
    (path,) = tmp_path.rglob("*.distcp")
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        flipped = bytes(byte ^ 255 for byte in content)
        path.write_bytes(flipped if damage == "flipped" else content[:-1])
    load(slow.child("step_00000001"), 1, staging_dir=tmp_path)


def test_targets_start_over_when_a_local_copy_is_damaged(tmp_path):
    """Strided and cast targets gather in scratch: what came before the damage counts no more."""
    slow = MemoryTier()
    state = {"w": torch.rand(3 << 20), "v": torch.rand(1000, 700)}
    folder = slow.child("step_1")
    dcp.save(state, storage_writer=CheckFreqWriter(folder, staging_dir=tmp_path, threads=1))
    (path,) = tmp_path.rglob("*.distcp")
    size_bytes = path.stat().st_size
    for at in (size_bytes // 8, size_bytes // 2, size_bytes - 100_000):
        content = bytearray(path.read_bytes())
        content[at] ^= 255
        path.write_bytes(content)
        got = {"w": torch.zeros(6 << 20)[::2], "v": torch.zeros(1000, 700, dtype=torch.float64)}
        reader = CheckFreqReader(folder, staging_dir=tmp_path, allow_dtype_cast=True)
        dcp.load(got, storage_reader=reader)
        assert torch.equal(got["w"], state["w"])
        assert torch.equal(got["v"], state["v"].double())
        content[at] ^= 255
        path.write_bytes(content)


def test_an_upload_that_fails_leaves_nothing_of_a_plain_save_on_either_side(tmp_path):
    for name, plan in {
        "write": Fault(verb="write_shard", after_bytes=5000),
        "sync": Fault(verb="sync"),
        "make": Fault(verb="make"),
    }.items():
        slow = MemoryTier()
        with pytest.raises(CheckpointException, match="injected"):
            save(FaultyTier(slow, [plan]), 1, tmp_path / name)
        assert slow.files() == {}
        assert local_files(tmp_path / name) == []


def test_a_full_local_disk_is_passed_by_with_a_warning(tmp_path, caplog):
    slow = MemoryTier()
    for number, plan in enumerate(
        [
            Fault(verb="write_shard", error=errno.ENOSPC, after_bytes=9000),
            Fault(verb="make", error=errno.EROFS),
            Fault(verb="sync", error=errno.EIO, times="forever"),
        ]
    ):
        caplog.clear()
        save(slow, number, FaultyTier(LocalTier(tmp_path / str(number)), [plan]))
        assert "straight from memory" in caplog.text
        load(slow.child(names.step_folder(number)), number)
        assert shards(tmp_path / str(number)) == []


@pytest.fixture
def small_disk(tmp_path):
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root can mount a small tmpfs")
    path = tmp_path / "small disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr}")
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("left_bytes", [0, 300_000, 1 << 20, 2 << 20])
def test_a_real_disk_that_is_full_is_passed_by(small_disk, left_bytes, tmp_path, caplog):
    state = {"w": torch.arange(300_000, dtype=torch.float32)}  # 1.2 MB
    with open(small_disk / "of others", "wb") as file:
        file.write(bytes((4 << 20) - left_bytes))
    dcp.save(
        state,
        storage_writer=CheckFreqWriter(
            tmp_path / "slow" / "step_1", staging_dir=small_disk, staging_bytes=1 << 30
        ),
    )
    assert ("straight from memory" in caplog.text) == (left_bytes < 1_300_000)
    assert bool(shards(small_disk)) == (left_bytes > 1_300_000)
    got = {"w": torch.zeros(300_000)}
    dcp.load(got, storage_reader=CheckFreqReader(tmp_path / "slow" / "step_1"))
    assert torch.equal(got["w"], state["w"])


def test_room_is_left_on_the_disk_for_others(small_disk, tmp_path, caplog):
    with open(small_disk / "of others", "wb") as file:
        file.write(bytes((4 << 20) - 100_000))  # less than 5 % are free
    save(LocalTier(tmp_path / "slow"), 1, small_disk)
    (said,) = re.findall(r"no room for (\d+) bytes: (\d+) are free, of which (\d+)", caplog.text)
    size_bytes, free_bytes, reserve_bytes = map(int, said)
    assert free_bytes < 110_000
    assert size_bytes + reserve_bytes > free_bytes
    load(LocalTier(tmp_path / "slow" / "step_00000001"), 1)


def test_what_a_rank_keeps_is_bounded(tmp_path, caplog):
    slow = MemoryTier()
    save(slow, 1, tmp_path)
    one_bytes = sum(len(v) for name, v in slow.files().items() if name.endswith(".distcp"))
    # room for one: the copy of the last save goes first
    save(slow, 2, tmp_path, staging_bytes=one_bytes + 100)
    assert "straight from memory" not in caplog.text
    assert {name.split("/")[-2] for name in below(tmp_path) if name.endswith("cp")} == {
        "step_00000002"
    }
    # room for none
    save(slow, 3, tmp_path, staging_bytes=one_bytes - 100)
    limit = f"no room for {one_bytes} bytes: 0 of the {one_bytes - 100} of staging_bytes are in use"
    assert limit in caplog.text
    for step in (1, 2, 3):
        load(slow.child(names.step_folder(step)), step, staging_dir=tmp_path)


def test_buffers_are_free_again_while_the_upload_is_still_under_way(tmp_path):
    slow = GatedTier(MemoryTier())
    writer = CheckFreqWriter(slow.child("step_1"), staging_dir=tmp_path)
    snapshot = writer.stage(state_of(1))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(dcp.save, snapshot, storage_writer=writer)
        slow.wait_until_held()
        staged = []
        other = CheckFreqWriter(MemoryTier())
        thread = threading.Thread(target=lambda: staged.append(other.stage(state_of(2))))
        thread.start()
        thread.join(20)
        slow.release()
        running.result()
        thread.join()
    other.close()
    assert staged, "the pool's one slot was still held by the upload"
    load(slow.child("step_1"), 1)


def test_an_attempt_that_is_under_way_is_nobody_elses(tmp_path):
    slow = MemoryTier()
    save(slow, 1, tmp_path)
    area = staged_root(slow, tmp_path).area
    (file,) = {name for name in shards(tmp_path)}
    attempt = names.parse_shard(file)[2]
    other = staged_root(slow, tmp_path).area
    assert [folder.name for folder in area.look()] == ["step_00000001"]
    other.claim(attempt)
    assert area.look() == []
    area.clear({})
    assert shards(tmp_path) == [file]
    other.let_go(attempt)
    area.clear({})
    assert below(tmp_path) == []


# --- mounts ---


class TestMount(TierSuite):
    def make_tier(self, tmp_path):
        return MountTier(tmp_path / "root")

    def raw_files(self, tier, tmp_path):
        root = tmp_path / "root"
        return {name: (root / name).read_bytes() for name in below(root)}


class TestStreamsOnly(TestMount):
    """On a mount that refuses all but streams of whole files."""

    @pytest.fixture(autouse=True)
    def refuse(self, monkeypatch):
        refuse_all_but_streams(monkeypatch)

    # there is no atomic replacement on such a mount: a reader may find nothing for a moment
    test_readers_see_old_or_new_content_never_a_mix = None
    # nor is a file created whole: of two creators the first one wins, while it still writes
    test_an_open_file_goes_on_reading_what_it_opened = None


def refuse_all_but_streams(monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.EPERM, "this mount takes streams of whole files only")

    for call in ("link", "rename", "posix_fallocate", "pwrite", "pwritev", "lseek", "ftruncate"):
        monkeypatch.setattr(os, call, refused)
    monkeypatch.setattr(local_tier, "rename_exclusively", refused)


def test_a_save_needs_nothing_but_streams_of_the_slow_volume(tmp_path, monkeypatch):
    staging = MemoryTier()
    refuse_all_but_streams(monkeypatch)
    slow = LocalTier(tmp_path)
    for step in (1, 2):
        save(slow, step, staging)
        load(slow.child(names.step_folder(step)), step)
    save(slow, 2, staging, overwrite=True)
    load(slow.child("step_00000002"), 2)
    train(LocalTier(tmp_path / "run"), staging, 2)
    assert find_latest_valid(tmp_path / "run").step == 2


# --- Checkpointer: a process that dies and starts again ---


@pytest.fixture(autouse=True)
def _dead_processes(nothing_is_remembered):
    """`Killed` stands for the death of the process."""


class Killed(BaseException):
    """Stands for the death of the process at this call."""


class DiesAt(ForwardingTier):
    """From the first call of this kind on, every call raises as if the process were dead."""

    def __init__(self, inner, verb, name="*"):
        super().__init__(inner)
        self.verb, self.name, self.dead = verb, name, False

    def around(self, verb, name, call):
        self.dead |= verb == self.verb and fnmatch.fnmatchcase(name, self.name)
        if self.dead:
            raise Killed(verb)
        return call()


def train_and_die(root, staging, verb="write_shard", name="__*"):
    with pytest.raises(Killed):
        train(DiesAt(root, verb, name), staging, 1)


def published(root):
    return sorted(path.split("/")[0] for path in root.files() if path.endswith("/.metadata"))


def load_model(path, step):
    state = {"model.weight": torch.zeros(27, 37)}
    dcp.load(state, storage_reader=CheckFreqReader(path))
    assert bool((state["model.weight"] == step).all())


@pytest.mark.parametrize(
    ("verb", "name"), [("write_shard", "__*"), ("sync", "step_*"), ("create", ".metadata")]
)
def test_a_run_that_dies_in_its_upload_goes_on_from_the_local_copy_and_finishes_it(
    tmp_path, verb, name
):
    slow = MemoryTier()
    train(slow, tmp_path, 2)
    train_and_die(slow, tmp_path, verb, name)
    assert published(slow) == ["step_00000001", "step_00000002"]
    assert find_latest_valid(slow).step == 2
    for depth in ("size", "digest"):
        found = find_latest_valid(slow, staging_dir=tmp_path, depth=depth)
        assert found.step == 3
        assert found.path.startswith(str(tmp_path))
        load_model(found, 3)
    assert train(slow, tmp_path, 0) == 3
    assert published(slow) == ["step_00000002", "step_00000003"]
    assert find_latest_valid(slow, depth="digest").step == 3
    load_model(slow.child("step_00000003"), 3)
    assert [n for n in below(tmp_path) if n.endswith((".metadata", ".lock", ".tmp"))] == []


def test_any_url_can_be_the_slow_side(tmp_path):
    url = f"memory://bucket-{tmp_path.name}/run"
    train(url, tmp_path, 2)
    train_and_die(open_tier(url), tmp_path)
    assert find_latest_valid(url).step == 2
    assert find_latest_valid(url, staging_dir=tmp_path, depth="digest").step == 3
    assert train(url, tmp_path, 1) == 3
    assert find_latest_valid(url, depth="digest").step == 4
    load_model(f"{url}/step_00000004", 4)
    save(open_tier(url), 5, tmp_path)
    load(f"{url}/step_00000005", 5, staging_dir=tmp_path)


def test_credentials_that_run_out_in_an_upload_are_asked_for_again(tmp_path):
    class Expires(ForwardingTier):
        times = 0

        def around(self, verb, name, call):
            if verb == "write_shard":
                self.times += 1
                if self.times == 1:
                    raise StaleCredentials(errno.EACCES, "expired")
            return call()

    slow = Expires(MemoryTier())
    save(slow, 1, tmp_path)
    load(slow.inner.child("step_00000001"), 1)


def test_on_new_nodes_the_run_goes_on_from_the_slow_side(tmp_path):
    slow = MemoryTier()
    train(slow, tmp_path / "a", 2)
    train_and_die(slow, tmp_path / "a")
    assert train(slow, tmp_path / "b", 1) == 2
    assert published(slow) == ["step_00000002", "step_00000003"]
    # and what the old node still has of step 3 is no rival of the new step 3
    found = find_latest_valid(slow, staging_dir=tmp_path / "a", depth="digest")
    assert not found.path.startswith(str(tmp_path))
    assert train(slow, tmp_path / "a", 0) == 3


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "record cut", "record gone"])
def test_a_local_copy_that_is_not_whole_is_passed_over(tmp_path, damage, caplog):
    slow = MemoryTier()
    train(slow, tmp_path, 2)
    train_and_die(slow, tmp_path)
    path = next(tmp_path.rglob("step_00000003/.metadata" if "rec" in damage else "step_*3/__*cp"))
    content = path.read_bytes()
    if damage.endswith("gone"):
        path.unlink()
    else:
        flipped = bytes(byte ^ 255 for byte in content)
        path.write_bytes(flipped if damage == "flipped" else content[:-1])
    assert find_latest_valid(slow, staging_dir=tmp_path, depth="digest").step == 2
    assert train(slow, tmp_path, 1) == 2
    assert published(slow) == ["step_00000002", "step_00000003"]
    load_model(slow.child("step_00000003"), 3)
    assert {name.split("/")[-2] for name in below(tmp_path) if ".distcp" in name} == {
        "step_00000003"
    }


def test_an_upload_that_fails_is_reported_and_kept_for_the_next_start(tmp_path):
    slow = MemoryTier()
    train(slow, tmp_path, 2)
    sick = FaultyTier(slow, [Fault(verb="write_shard", error=errno.EIO, times="forever")])
    with pytest.raises(WriteFailed, match=r"while uploading.*injected"):
        train(sick, tmp_path, 1)
    assert published(slow) == ["step_00000001", "step_00000002"]
    assert not [name for name in slow.files() if name.startswith("step_00000003")]
    assert train(slow, tmp_path, 0) == 3
    assert published(slow) == ["step_00000002", "step_00000003"]


def test_a_lost_answer_of_the_commit_deletes_nothing(tmp_path):
    slow = MemoryTier()
    lost = Fault(verb="create", name=".metadata", lost_answer=True, error=errno.EIO)
    with pytest.raises(PublishUnknown):
        train(FaultyTier(slow, [lost]), tmp_path, 1)
    assert published(slow) == ["step_00000001"]
    assert train(slow, tmp_path, 1) == 1
    load_model(slow.child("step_00000002"), 2)


def test_an_emptied_root_is_not_filled_again_from_the_local_disk(tmp_path):
    train(MemoryTier(), tmp_path, 2)
    slow = MemoryTier()
    train_and_die(slow, tmp_path)
    assert find_latest_valid(slow, staging_dir=tmp_path).step == 1
    emptied = MemoryTier()
    assert emptied.location == slow.location
    assert find_latest_valid(emptied, staging_dir=tmp_path) is None
    assert train(emptied, tmp_path, 1) is None
    assert published(emptied) == ["step_00000001"]


def test_an_abandoned_branch_on_the_local_disk_stays_abandoned(tmp_path):
    slow = MemoryTier()
    train(slow, tmp_path, 2)
    train_and_die(slow, tmp_path)
    # nothing is left behind until the new branch has published
    assert train(slow, tmp_path, 0, restore={"step": 1}) == 1
    assert find_latest_valid(slow, staging_dir=tmp_path).step == 3
    assert train(slow, tmp_path, 1, restore={"step": 1}) == 1
    assert find_latest_valid(slow, staging_dir=tmp_path, depth="digest").step == 2
    assert train(slow, tmp_path, 0) == 2


def test_the_local_disk_holds_two_saves_at_most(tmp_path):
    slow = MemoryTier()
    seen = []

    class Looks(ForwardingTier):
        def around(self, verb, name, call):
            folders = {n.split("/")[-2] for n in below(tmp_path) if n.endswith(".distcp")}
            seen.append(len(folders))
            return call()

    train(Looks(slow), tmp_path, 6)
    assert max(seen) == 2
    assert seen[-1] == 1
    assert len(local_files(tmp_path)) == 1


class Throttled(ForwardingTier):
    """Takes no more than so many bytes a second."""

    def __init__(self, inner, bytes_per_s):
        super().__init__(inner)
        self.bytes_per_s = bytes_per_s

    def around_pieces(self, name, pieces):
        for piece in pieces:
            time.sleep(len(piece) / self.bytes_per_s)
            yield piece


@pytest.mark.bench
def test_training_waits_no_longer_than_for_a_local_disk(tmp_path):
    """Measured and printed; only the order of things is asserted."""

    def blocked_s(root, staging):
        state = {"w": torch.rand(16 << 20)}  # 64 MiB
        with Checkpointer(root, state, every=1, staging_dir=staging) as ckpt:
            for _ in range(4):
                ckpt.after_step()
                ckpt.wait()  # as an interval that is long enough for the save would
            return [save.blocked_s for save in ckpt.history][1:], ckpt.history[-1].persist_s

    of_local, local_s = blocked_s(LocalTier(tmp_path / "fast"), None)
    slow = Throttled(LocalTier(tmp_path / "slow"), 20e6)
    of_staged, staged_s = blocked_s(slow, tmp_path / "nvme")
    print(f"blocked per save: local {of_local} s, staged in front of 20 MB/s {of_staged} s")
    print(f"published after: local {local_s:.2f} s, staged {staged_s:.2f} s")
    assert staged_s > 64 * 1.048 / 20
    assert max(of_staged) < staged_s / 2
