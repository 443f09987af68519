"""`LocalTier` keeps the promises of a tier: on disk and in memory, with direct I/O and without."""

import errno
import os
import pathlib
import shutil
import socket
import subprocess
import uuid

import pytest

from dcp_checkfreq.storage.local.abilities import abilities_of
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import TierSuite

SHM = "/dev/shm"


class LocalSuite(TierSuite):
    direct_io: bool | None = None

    def make_tier(self, tmp_path):
        return LocalTier(tmp_path / "root", direct_io=self.direct_io)

    def raw_files(self, tier, tmp_path):
        files = {}
        for folder, _, names in os.walk(tmp_path / "root"):
            for name in names:
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    files[os.path.relpath(path, tmp_path / "root")] = file.read()
        return files


class OnShm:
    @pytest.fixture
    def tmp_path(self):
        if not os.path.isdir(SHM):
            pytest.skip(f"no {SHM} here")
        path = pathlib.Path(SHM, f"checkfreq-test-{uuid.uuid4().hex}")
        path.mkdir()
        yield path
        shutil.rmtree(path)


class TestOnDiskChoosing(LocalSuite):
    direct_io = None


class TestOnDiskDirect(LocalSuite):
    direct_io = True


class TestOnDiskBuffered(LocalSuite):
    direct_io = False


class TestOnTmpfsChoosing(OnShm, LocalSuite):
    direct_io = None


class TestOnTmpfsDirect(OnShm, LocalSuite):
    direct_io = True


class TestOnTmpfsBuffered(OnShm, LocalSuite):
    direct_io = False


@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize("given_bytes", [0, 5_000_000, 5_000_002])
def test_pieces_that_do_not_add_up_leave_no_file(tmp_path, given_bytes, direct_io):
    tier = LocalTier(tmp_path, direct_io=direct_io)
    with pytest.raises((OSError, ValueError)):
        tier.write_shard("a", [memoryview(bytes(given_bytes))], 5_000_001)
    assert os.listdir(tmp_path) == []


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 8 MiB, so that it really runs out of space."""
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small tmpfs here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("direct_io", [True, False])
def test_a_full_disk_raises_enospc_and_gives_the_space_back(full_disk, direct_io):
    tier = LocalTier(full_disk, direct_io=direct_io)
    tier.create("old", b"kept", scratch="s")
    size_bytes = 9 << 20
    with pytest.raises(OSError, match="space") as caught:
        tier.write_shard("a", (memoryview(bytes(1 << 20)) for _ in range(9)), size_bytes)
    assert caught.value.errno == errno.ENOSPC
    assert [entry.name for entry in tier.list()] == ["old"]
    with pytest.raises(OSError, match="space"):
        tier.create("b", bytes(size_bytes), scratch="s")
    assert [entry.name for entry in tier.list()] == ["old"]
    tier.write_shard("a", [memoryview(bytes(7 << 20))], 7 << 20)
    assert tier.read("old") == b"kept"


def test_a_link_to_a_folder_is_a_folder_and_a_dead_link_is_no_file(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "to folder").symlink_to("real")
    (tmp_path / "dead").symlink_to("nowhere")
    listed = {entry.name: entry.is_folder for entry in LocalTier(tmp_path).list()}
    assert listed == {"real": True, "to folder": True}


def test_a_listing_tells_links_and_special_files_from_what_the_folder_itself_holds(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "to folder").symlink_to("real")
    (tmp_path / "to file").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "below a file").symlink_to("file/below")
    (tmp_path / "too long").symlink_to("x" * 300)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "to null").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(os.fspath(tmp_path / "socket"))
    listed = {
        entry.name: (entry.is_folder, entry.size_bytes, entry.is_link, entry.is_special)
        for entry in LocalTier(tmp_path).list()
    }
    assert listed == {
        "real": (True, 0, False, False),
        "file": (False, 3, False, False),
        "to folder": (True, 0, True, False),
        "to file": (False, 3, True, False),
        "fifo": (False, 0, False, True),
        "to null": (False, 0, True, True),
        "socket": (False, 0, False, True),
    }


# --- the order of calls: a journaling file system hides most of a missing sync ----------------


@pytest.fixture
def disk_log(tmp_path, monkeypatch):
    """Real calls, written down: what was done to which path below tmp_path, in order."""
    log = []
    abilities_of(str(tmp_path))  # tried out once per mount, not part of any order

    def shown(what):
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)
        return os.path.relpath(path, tmp_path)

    def watch(name):
        real = getattr(os, name)

        def call(*args, **options):
            log.append(f"{name} {shown(args[1] if name in ('link', 'rename') else args[0])}")
            return real(*args, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("mkdir", "link", "rename", "fsync", "fdatasync"):
        watch(name)
    return log


def test_make_syncs_the_parent_of_every_folder_that_it_makes(tmp_path, disk_log):
    LocalTier(tmp_path / "a" / "b").make()
    assert disk_log == ["mkdir a", "fsync .", "mkdir a/b", "fsync a"]


def test_a_shard_is_synced_before_write_shard_returns(tmp_path, disk_log):
    tier = LocalTier(tmp_path)
    for size_bytes in (0, 5000, 5 << 20):
        tier.write_shard(f"{size_bytes}", [memoryview(bytes(size_bytes))], size_bytes)
        assert disk_log.pop() in (f"fdatasync {size_bytes}", f"fsync {size_bytes}")
    tier.sync()
    assert disk_log == ["fsync ."]


def test_create_syncs_the_content_before_the_name_and_the_name_before_it_returns(
    tmp_path, disk_log
):
    LocalTier(tmp_path).create("a", b"x", scratch="s")
    assert disk_log == ["fsync s", "link a", "fsync ."]


def test_replace_syncs_the_content_before_the_name_and_the_name_before_it_returns(
    tmp_path, disk_log
):
    LocalTier(tmp_path).replace("a", b"x", scratch="s")
    assert disk_log == ["fsync s", "rename a", "fsync ."]
