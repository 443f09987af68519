"""Real mounts that refuse calls: saves work there, and what cannot be promised is said once."""

import contextlib
import errno
import itertools
import logging
import os
import shutil
import subprocess
import threading
from typing import ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fuse_mount import ALL_BUT_STREAMS, Unavailable, fuse_mount
from staged_runs import train

from dcp_checkfreq import CheckFreqReader, CheckFreqWriter, find_latest_valid
from dcp_checkfreq.commit.publish import publish, reserve
from dcp_checkfreq.errors import PublishUnknown, SaveFailed
from dcp_checkfreq.format import names
from dcp_checkfreq.recovery.clean import clean_root
from dcp_checkfreq.storage.local import abilities
from dcp_checkfreq.storage.local.abilities import Abilities, abilities_of, try_out
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import ManualClock, TierSuite
from dcp_checkfreq.testing.disk_calls import at_disk_call

NO_WHOLE = {"link": "EXDEV", "rename": "EPERM", "rename2": "EINVAL"}
MOUNTS = {
    "offers all": {},
    "streams only": ALL_BUT_STREAMS,
    "no link": {"link": "EPERM"},
    "no link, plain renames": {"link": "EOPNOTSUPP", "rename2": "ENOSYS"},
    "no link, no rename": NO_WHOLE,
    "no fsync": {"fsync": "EINVAL"},
    "no fsync at all": {"fsync": "EOPNOTSUPP", "fsyncdir": "ENOTSUP"},
    "no fallocate": {"fallocate": "EOPNOTSUPP", "write_inside": "EINVAL"},
    "no direct I/O": {"direct": "EINVAL"},
    "no direct reads": {"direct_read": "EOPNOTSUPP"},
}
LACKING = {
    "offers all": {},
    "streams only": dict.fromkeys(
        (
            "fsync",
            "fsync_folders",
            "link",
            "rename",
            "rename_exclusively",
            "fallocate",
            "direct_io",
        ),
        False,
    ),
    "no link": {"link": False},
    "no link, plain renames": {"link": False, "rename_exclusively": False},
    "no link, no rename": {"link": False, "rename": False, "rename_exclusively": False},
    "no fsync": {"fsync": False},
    "no fsync at all": {"fsync": False, "fsync_folders": False},
    "no fallocate": {"fallocate": False, "direct_io": False},  # nor may a block be written again
    "no direct I/O": {"direct_io": False},
    "no direct reads": {"direct_io": False},
}


@pytest.fixture(autouse=True)
def nothing_known():
    """Devices get the numbers of those that are gone."""
    abilities.forget()
    yield
    abilities.forget()


@pytest.fixture(scope="module", params=MOUNTS)
def kind_and_mount(request, tmp_path_factory):
    try:
        with fuse_mount(tmp_path_factory.mktemp("fuse") / "m", MOUNTS[request.param]) as mount:
            yield request.param, mount
    except Unavailable as why:
        pytest.skip(str(why))


@pytest.fixture
def kind(kind_and_mount):
    return kind_and_mount[0]


@pytest.fixture
def folder(kind_and_mount, request):
    path = kind_and_mount[1] / str(abs(hash(request.node.name)))
    path.mkdir()
    yield path
    shutil.rmtree(path)


def warnings_in(caplog):
    return [r.getMessage() for r in caplog.records if "this mount cannot" in r.getMessage()]


def state_of(value, size=40):
    return {"w": torch.full((size,), float(value)), "note": f"at {value}"}


def load(path, size=40):
    target = state_of(-1, size)
    dcp.load(target, storage_reader=CheckFreqReader(path))
    return target


def below(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_what_a_mount_refuses_is_found_and_nothing_stays(kind, folder):
    assert try_out(str(folder)) == Abilities(**LACKING[kind])
    assert os.listdir(folder) == []


def test_plain_saves_work_and_what_is_lacking_is_said_once(kind, folder, caplog):
    for step in (1, 2, 3):
        dcp.save(state_of(step), storage_writer=CheckFreqWriter(folder / f"step_{step}"))
    size = 2 << 20  # large enough for direct I/O and preallocation
    dcp.save(state_of(9, size), storage_writer=CheckFreqWriter(folder / "step_9"))
    assert torch.equal(load(folder / "step_9", size)["w"], torch.full((size,), 9.0))
    with pytest.raises(BaseException, match="whole checkpoint"):
        dcp.save(state_of(7), storage_writer=CheckFreqWriter(folder / "step_2"))
    dcp.save(state_of(8), storage_writer=CheckFreqWriter(folder / "step_2", overwrite=True))
    assert load(folder / "step_2")["note"] == "at 8"
    assert find_latest_valid(folder, depth="digest").step == 9
    assert len(below(folder)) == 8, below(folder)
    lacking = Abilities(**LACKING[kind]).lacks()
    told = warnings_in(caplog)
    assert len(told) == (1 if lacking else 0)
    if lacking:
        assert lacking in told[0]
        assert "staging_dir" in told[0]
        assert str(folder.parent) in told[0]


def test_a_run_saves_keeps_and_restores_on_a_plain_path(kind, folder):
    assert train(folder / "run", None, 4, keep_last=2) is None
    assert train(folder / "run", None, 2, keep_last=2) == 4
    assert find_latest_valid(folder / "run", depth="digest").step == 6
    kept = {name.split("/")[0] for name in below(folder / "run") if name.startswith("step")}
    assert kept == {"step_00000005", "step_00000006"}
    assert not [name for name in below(folder / "run") if name.endswith(".tmp")]


class OnMount(TierSuite):
    refuse: ClassVar[dict[str, str]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def mounted(cls, tmp_path_factory):
        try:
            with fuse_mount(tmp_path_factory.mktemp("fuse") / "m", cls.refuse) as mount:
                yield mount
        except Unavailable as why:
            pytest.skip(str(why))

    @pytest.fixture
    def tmp_path(self, mounted, request):
        path = mounted / str(abs(hash(request.node.name)))
        path.mkdir()
        yield path
        shutil.rmtree(path)

    def make_tier(self, tmp_path):
        return LocalTier(tmp_path / "root")

    def raw_files(self, tier, tmp_path):
        root = tmp_path / "root"
        return {name: (root / name).read_bytes() for name in below(root)}


class TestPlainRenames(OnMount):
    refuse = MOUNTS["no link, plain renames"]
    # looking and renaming are two calls: this is what the warning says
    test_of_eight_creators_exactly_one_wins = None


class TestStreamsOnlyPlain(OnMount):
    refuse = ALL_BUT_STREAMS
    # there is no atomic replacement on such a mount: a reader may find nothing for a moment
    test_readers_see_old_or_new_content_never_a_mix = None
    # nor is a file created whole: of two creators the first one wins, while it still writes
    test_an_open_file_goes_on_reading_what_it_opened = None


# --- refusals that come only later, and what is no refusal ---


def refusing(monkeypatch, call, code):
    def refused(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, refused)


REFUSED = sorted(abilities.REFUSALS)


def commit(tier, record, *, attempt, overwrite=False, reservation=None):
    return publish(
        tier,
        record,
        reservation=reservation or reserve(tier, attempt),
        files={},
        may_replace=(lambda: True) if overwrite else None,
        clock=ManualClock(),
    )


@pytest.mark.parametrize("code", REFUSED, ids=[errno.errorcode[code] for code in REFUSED])
@pytest.mark.parametrize("calls", [("link",), ("link", "rename")], ids="+".join)
@pytest.mark.parametrize("known", [True, False], ids=["after it worked", "from the start"])
def test_a_refusal_is_never_an_unclear_answer(tmp_path, monkeypatch, code, calls, known):
    tier = LocalTier(tmp_path)
    if known:
        abilities_of(str(tmp_path))
    for call in calls:
        refusing(monkeypatch, call, code)
    commit(tier, b"one", attempt="0" * 12, overwrite=False)
    assert tier.read(".metadata") == b"one"
    commit(tier, b"two", attempt="1" * 12, overwrite=True)
    assert tier.read(".metadata") == b"two"
    assert os.listdir(tmp_path) == [".metadata"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP])
def test_fsync_that_worked_and_then_does_not_is_an_error(tmp_path, monkeypatch, code):
    tier = LocalTier(tmp_path)
    abilities_of(str(tmp_path))
    refusing(monkeypatch, "fdatasync", code)
    with pytest.raises(OSError, match=os.strerror(code)):
        tier.write_shard("a", [memoryview(b"x")], 1)
    assert os.listdir(tmp_path) == []


def test_another_mount_in_the_place_of_one_that_is_known_is_tried_out_anew(
    tmp_path, monkeypatch, caplog
):
    """Devices get the numbers of those before: the first save may fail, the next one knows."""
    tier = LocalTier(tmp_path)
    abilities_of(str(tmp_path))
    for call in ("fsync", "fdatasync", "link"):
        refusing(monkeypatch, call, errno.EOPNOTSUPP)
    with pytest.raises(OSError, match="not supported"):
        tier.write_shard("a", [memoryview(b"x")], 1)
    tier.write_shard("a", [memoryview(b"x")], 1)
    tier.create("b", b"one", scratch="s")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("call", ["link", "rename", "fsync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESTALE])
def test_what_goes_wrong_is_no_refusal_and_nothing_is_learnt_from_it(
    tmp_path, monkeypatch, call, code
):
    with monkeypatch.context() as broken:
        refusing(broken, call, code)
        with pytest.raises(OSError, match=os.strerror(code)):
            abilities_of(str(tmp_path))
        assert os.listdir(tmp_path) == []
    assert abilities_of(str(tmp_path)) == Abilities()


def test_a_full_disk_teaches_nothing(tmp_path):
    path = tmp_path / "small"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "x", path], check=False)
    if done.returncode:
        pytest.skip("cannot mount a small tmpfs here")
    try:
        (path / "all").write_bytes(bytes(8192))
        with pytest.raises(OSError, match="space"):
            abilities_of(str(path))
        assert os.listdir(path) == ["all"]
        (path / "all").unlink()
        assert abilities_of(str(path)).commits_exclusively
    finally:
        subprocess.run(["umount", path], check=True)


def test_a_close_that_fails_fails_the_shard_and_leaves_no_file(tmp_path, monkeypatch):
    tier = LocalTier(tmp_path)
    abilities_of(str(tmp_path))
    real = os.close

    def close(fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        real(fd)
        if path.endswith("shard"):
            raise OSError(errno.EDQUOT, "the upload was refused")

    monkeypatch.setattr(os, "close", close)
    with pytest.raises(OSError, match="the upload was refused"):
        tier.write_shard("shard", [memoryview(b"x")], 1)
    assert os.listdir(tmp_path) == []


def test_a_mount_that_takes_no_file_at_all_fails_the_save_clearly(tmp_path, monkeypatch):
    """Neither links nor renames, nor a second file: the commit is refused, not unclear."""
    tier = LocalTier(tmp_path)
    abilities_of(str(tmp_path))
    reservation = reserve(tier, "0" * 12)
    refusing(monkeypatch, "open", errno.EPERM)
    with pytest.raises(SaveFailed) as caught:
        commit(tier, b"one", attempt="0" * 12, reservation=reservation)
    assert not isinstance(caught.value, PublishUnknown)


# --- trying out ---


class Died(BaseException):
    """Stands for the death of the process: nothing that follows has an effect."""


def test_whoever_dies_while_trying_leaves_what_the_next_cleaning_removes(tmp_path):
    seen = 0
    for n in itertools.count():
        root = tmp_path / str(n)
        step = root / "step_00000001"
        step.mkdir(parents=True)
        died = pytest.MonkeyPatch()

        def die(call, died=died):
            died.setattr(os, "unlink", lambda path: None)
            raise Died

        with at_disk_call(n, "after", die) as calls:
            with contextlib.suppress(Died):
                try_out(str(step))
            died.undo()
        if calls.stopped_at is None:
            break
        left = os.listdir(step)
        assert all(names.parse_scratch(name) for name in left)
        seen += bool(left)
        clean_root(LocalTier(root), now_s=4e9)
        assert not step.exists() or os.listdir(step) == []
    assert seen >= 4


def test_threads_that_come_first_at_the_same_time_tell_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(abilities, "rename_exclusively", _refused)
    refusing(monkeypatch, "link", errno.EPERM)
    both = threading.Barrier(4)

    def ask():
        both.wait()
        abilities_of(str(tmp_path))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(warnings_in(caplog)) == 1
    assert os.listdir(tmp_path) == []


def test_a_staged_run_is_not_sent_to_staging_again(tmp_path, monkeypatch, caplog):
    refusing(monkeypatch, "link", errno.EPERM)
    refusing(monkeypatch, "rename", errno.EPERM)
    monkeypatch.setattr(abilities, "rename_exclusively", _refused)
    caplog.set_level(logging.WARNING)
    abilities_of(str(tmp_path), is_staged=True)
    (told,) = warnings_in(caplog)
    assert "staging_dir" not in told
    assert "cut short" in told


def _refused(*_):
    raise OSError(errno.EINVAL, "no")
