import errno
import os
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from behaviour_tools import blank, fails_with, files_in, load, same, save, some_state
from fsspec.implementations.memory import MemoryFileSystem

from dcp_checkfreq import (
    BadLocation,
    CheckFreqReader,
    CheckFreqWriter,
    Checkpointer,
    WriteFailed,
    find_latest_valid,
)
from dcp_checkfreq.data import FileCache
from dcp_checkfreq.format import names
from dcp_checkfreq.testing import Fault, FaultyTier, MemoryTier

SPELLINGS = {
    "str": "{root}/step_1",
    "trailing slash": "{root}/step_1/",
    "spaces and unicode": "{root}/run 1/学习 é/step_1",
    "brackets": "{root}/run[v1]*/step_1",
    "hash and question mark": "{root}/a#b?c=1/step_1",
    "percent": "{root}/p%205/step_1",
    "file url": "file://{root}/step_1",
    "file url with spaces": "file://{root}/p 4/step_1",
    "file url with percent": "file://{root}/p%205/step_1",
    "file url with hash": "file://{root}/a#b?c/step_1",
    "file url with trailing slash": "file://{root}/step_1/",
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_every_spelling_of_a_path_round_trips(tmp_path, spelling):
    path = spelling.format(root=tmp_path)
    save(some_state(), path)
    assert same(load(some_state(), path), some_state())


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_writer_reader_scanner_and_stock_mean_the_same_folder(tmp_path, spelling):
    path = spelling.format(root=tmp_path)
    save(some_state(), path)
    plain = path.removeprefix("file://")
    assert (Path(plain) / ".metadata").is_file()
    root = path.rstrip("/").removesuffix("/step_1")
    found = find_latest_valid(root)
    assert found.step == 1
    assert same(load(some_state(), found), some_state())
    target = blank(some_state())
    dcp.load(target, storage_reader=dcp.FileSystemReader(plain))
    assert same(target, some_state())


def test_path_objects_and_relative_paths_round_trip(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(some_state(1.0), tmp_path / "a")
    save(some_state(2.0), "relative/b")
    save(some_state(3.0), Path("c"))
    (tmp_path / "d").mkdir()
    monkeypatch.chdir(tmp_path / "d")
    save(some_state(4.0), ".")
    monkeypatch.chdir(tmp_path)
    for number, path in enumerate(["a", tmp_path / "relative" / "b", "c/", "d"], start=1):
        assert same(load(some_state(), path), some_state(float(number)))


def test_a_relative_path_means_the_folder_at_the_time_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = CheckFreqWriter("here")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    dcp.save(some_state(), storage_writer=writer)
    assert (tmp_path / "here" / ".metadata").is_file()


@pytest.mark.parametrize("location", [Path("s3://bucket/run"), Path("gs://b/x"), "s3:/bucket/run"])
@pytest.mark.parametrize("user", [CheckFreqWriter, CheckFreqReader, find_latest_valid])
def test_a_url_that_went_through_path_is_refused_and_says_what_to_pass(
    tmp_path, monkeypatch, user, location
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadLocation, match="pass a str"):
        user(location)
    assert not files_in(tmp_path)


def test_a_reused_writer_refuses_a_path_made_of_a_url_before_anything_is_written(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    writer = CheckFreqWriter(tmp_path / "step_1")
    with fails_with(BadLocation, "pass a str"):
        dcp.save(
            some_state(), storage_writer=writer, checkpoint_id=Path("s3://my-bucket/run/step_1")
        )
    assert not files_in(tmp_path)


def test_a_url_of_a_kind_that_nobody_knows_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for user in (CheckFreqWriter, CheckFreqReader, find_latest_valid):
        with pytest.raises(BadLocation, match="fsspec knows no s4://"):
            user("s4://bucket/run")
    with pytest.raises(BadLocation):
        Checkpointer("s4://bucket/run", {"w": torch.ones(1)}, every=1)
    assert not CheckFreqWriter.validate_checkpoint_id("s4://bucket/run")
    assert not CheckFreqReader.validate_checkpoint_id("s4://bucket/run")
    assert not files_in(tmp_path)


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://b/x", "memory://b", "S3://b/x"])
def test_urls_of_other_storages_are_taken_and_nothing_is_asked_of_them_yet(url):
    assert CheckFreqWriter.validate_checkpoint_id(url)
    assert CheckFreqWriter(url).checkpoint_id == url.replace("S3", "s3")
    assert CheckFreqReader(url).checkpoint_id == url.replace("S3", "s3")


def test_a_url_with_a_password_in_it_is_refused_without_showing_it():
    with pytest.raises(BadLocation, match="storage_options") as caught:
        CheckFreqWriter("s3://me:hunter2@bucket/run")
    assert "hunter2" not in str(caught.value)


def test_options_for_a_local_folder_are_refused_rather_than_ignored(tmp_path):
    with pytest.raises(BadLocation, match="storage_options"):
        CheckFreqWriter(tmp_path, storage_options={"key": "x"})


@pytest.mark.parametrize("location", ["", b"bytes", 7, None, "file://relative/path"])
def test_what_is_no_path_is_refused(location):
    with pytest.raises(BadLocation):
        CheckFreqWriter(location)


def test_a_tier_is_taken_as_it_is():
    root = MemoryTier()
    save(some_state(), root.child("step_1"))
    assert find_latest_valid(root).step == 1
    assert same(load(some_state(), root.child("step_1")), some_state())


def test_new_folders_are_reached_through_a_symbolic_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    save(some_state(), tmp_path / "link" / "step_1")
    assert find_latest_valid(tmp_path / "disk").step == 1


def test_a_file_in_the_place_of_the_folder_is_an_error_that_names_it(tmp_path):
    (tmp_path / "step_1").write_text("not a folder")
    with pytest.raises(BaseException, match="step_1"):
        save(some_state(), tmp_path / "step_1")
    assert (tmp_path / "step_1").read_text() == "not a folder"


# --- case 15: a reused writer keeps its options ---


def test_a_reused_writer_saves_into_each_checkpoint_id(tmp_path):
    writer = CheckFreqWriter(tmp_path / "step_1")
    for step in (1, 2, 3):
        dcp.save(
            some_state(float(step)), storage_writer=writer, checkpoint_id=tmp_path / f"step_{step}"
        )
    for step in (1, 2, 3):
        assert same(load(some_state(), tmp_path / f"step_{step}"), some_state(float(step)))
    attempts = {name.split("_")[-1] for name in files_in(tmp_path) if name.endswith(".distcp")}
    assert len(attempts) == 3


def test_a_reused_writer_saves_in_the_background_into_each_checkpoint_id(tmp_path):
    writer = CheckFreqWriter(tmp_path / "step_1")
    for step in (1, 2, 3):
        dcp.async_save(
            some_state(float(step)), storage_writer=writer, checkpoint_id=tmp_path / f"step_{step}"
        ).result()
    for step in (1, 2, 3):
        assert same(load(some_state(), tmp_path / f"step_{step}"), some_state(float(step)))


def test_a_new_writer_for_every_save_works_as_well(tmp_path):
    for step in (1, 2, 3):
        dcp.async_save(
            some_state(float(step)), storage_writer=CheckFreqWriter(tmp_path / f"step_{step}")
        ).result()
    assert find_latest_valid(tmp_path).step == 3
    assert same(load(some_state(), tmp_path / "step_1"), some_state(1.0))


def test_options_of_a_writer_survive_reset(tmp_path):
    save(some_state(1.0), tmp_path / "b")
    writer = CheckFreqWriter(tmp_path / "a", overwrite=True)
    dcp.save(some_state(2.0), storage_writer=writer, checkpoint_id=tmp_path / "b")
    assert same(load(some_state(), tmp_path / "b"), some_state(2.0))


def test_options_of_a_reader_survive_reset(tmp_path):
    state = {"w": torch.tensor([1.2345678, 3.9])}
    save(state, tmp_path / "a")
    save(state, tmp_path / "b")
    reader = CheckFreqReader(tmp_path / "a", allow_dtype_cast=True)
    target = {"w": torch.zeros(2, dtype=torch.float64)}
    dcp.load(target, storage_reader=reader, checkpoint_id=tmp_path / "b")
    assert torch.equal(target["w"], state["w"].double())


def test_direct_io_off_survives_reset(tmp_path, monkeypatch):
    state = {"w": torch.arange(2 << 20, dtype=torch.float32)}
    flags = []
    real = os.open

    def watched(path, how, *args, **options):
        flags.append(how & os.O_DIRECT)
        return real(path, how, *args, **options)

    writer = CheckFreqWriter(tmp_path / "a", direct_io=False)
    dcp.save(state, storage_writer=writer, checkpoint_id=tmp_path / "b")
    reader = CheckFreqReader(tmp_path / "a", direct_io=False)
    monkeypatch.setattr(os, "open", watched)
    target = {"w": torch.zeros(2 << 20)}
    dcp.load(target, storage_reader=reader, checkpoint_id=tmp_path / "b")
    assert torch.equal(target["w"], state["w"])
    assert not any(flags)


def test_a_reused_writer_works_again_after_a_failed_save(tmp_path):
    root = MemoryTier()
    full = Fault(verb="write_shard", error=errno.ENOSPC)
    writer = CheckFreqWriter(FaultyTier(root.child("step_1"), [full]))
    with fails_with(WriteFailed, "No space"):
        dcp.save(some_state(1.0), storage_writer=writer)
    assert not root.files()
    dcp.save(some_state(2.0), storage_writer=writer)
    assert same(load(some_state(), root.child("step_1")), some_state(2.0))


# --- home folders ---


@pytest.fixture
def home(tmp_path, monkeypatch):
    home = tmp_path / "home of me"
    (tmp_path / "elsewhere").mkdir()
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("RUN", "run")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return home


@pytest.mark.parametrize("kind", [str, Path])
def test_a_tilde_is_the_home_folder_at_every_entrance(home, tmp_path, kind):
    save(some_state(1.0), kind("~/run/step_1"), staging_dir=kind("~/nvme"))
    assert (home / "run" / "step_1" / ".metadata").is_file()
    assert list((home / "nvme").iterdir())
    assert same(load(some_state(), kind("~/run/step_1"), staging_dir=kind("~/nvme")), some_state())
    assert find_latest_valid(kind("~/run"), staging_dir=kind("~/nvme")).step == 1
    state = {"w": torch.ones(1)}
    with Checkpointer(kind("~/other"), state, every=1, staging_dir=kind("~/nvme")) as ckpt:
        ckpt.restore()
        ckpt.after_step()
    assert find_latest_valid(home / "other").step == 1
    writer = CheckFreqWriter(kind("~/a"))
    dcp.save(some_state(), storage_writer=writer, checkpoint_id=kind("~/b"))
    assert (home / "b" / ".metadata").is_file()
    cache = FileCache(kind("~/cache"), 1 << 20)
    (home / "data.bin").write_bytes(b"data")
    with cache.pin(kind("~/data.bin")) as path:
        assert Path(path).read_bytes() == b"data"
        assert path.startswith(str(home / "cache"))
    assert not files_in(tmp_path / "elsewhere")


def test_a_users_home_is_found_and_an_unknown_one_is_refused(home, tmp_path):
    assert CheckFreqWriter("~root/run").checkpoint_id == os.path.expanduser("~root") + "/run"
    for user in (CheckFreqWriter, CheckFreqReader, find_latest_valid):
        with pytest.raises(BadLocation, match="no home folder ~nobody-has-this-name"):
            user("~nobody-has-this-name/run")
    with pytest.raises(BadLocation, match="no home folder"):
        FileCache("~nobody-has-this-name/cache", 1 << 20)
    with pytest.raises(BadLocation, match="no home folder"):
        CheckFreqWriter(tmp_path / "a", staging_dir="~nobody-has-this-name")
    assert not CheckFreqWriter.validate_checkpoint_id("~nobody-has-this-name/run")


def test_a_tilde_elsewhere_and_variables_are_plain_text(home, tmp_path):
    for name in ("./~/a", "$RUN/b", "c~/~d"):
        save(some_state(), name)
        assert (tmp_path / "elsewhere" / name / ".metadata").is_file()
    assert not files_in(home)


# --- file systems that somebody has registered ---


class Mine(MemoryFileSystem):
    """Its own files, under a name of its own."""

    protocol: ClassVar = ("mineclass", "minename")
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.split("://")[-1].strip("/")


@pytest.mark.parametrize("how", ["class", "name"])
def test_a_file_system_that_was_registered_is_taken(how, monkeypatch):
    name = f"mine{how}"
    monkeypatch.setattr(Mine, "store", {})
    monkeypatch.setattr(Mine, "pseudo_dirs", [""])
    fsspec.register_implementation(name, Mine if how == "class" else f"{__name__}.Mine")
    url = f"{name}://bucket/run"
    save(some_state(2.0), f"{url}/step_1")
    assert same(load(some_state(), f"{url}/step_1"), some_state(2.0))
    assert find_latest_valid(url).step == 1
    with Checkpointer(url, {"w": torch.ones(1)}, every=1) as ckpt:
        ckpt.restore(fresh_start=True)
        ckpt.after_step()
    assert any(path.endswith("/.metadata") for path in Mine.store)
    assert CheckFreqReader.validate_checkpoint_id(url)


# --- names that are too long ---


def long_path(tmp_path, size):
    """Return a path of so many bytes, in parts that are short enough."""
    path = str(tmp_path)
    while len(path) < size - 200:
        path += "/" + "x" * 150
    return path + "/" + "y" * (size - len(path) - 1)


def test_a_local_name_or_path_that_is_too_long_is_refused_before_anything_is_made(tmp_path):
    state = {"w": torch.ones(1)}
    for path, limit in (
        (tmp_path / ("n" * 256) / "run", "255"),
        (tmp_path / ("é" * 128) / "run", "256 bytes"),
        (long_path(tmp_path, 4096 - 20), "4095"),
    ):
        for work in (
            lambda path=path: CheckFreqWriter(path),
            lambda path=path: Checkpointer(path, state, every=1),
            lambda path=path: CheckFreqWriter(tmp_path / "ok").reset(path),
            lambda path=path: CheckFreqWriter(tmp_path / "ok", staging_dir=path),
        ):
            with pytest.raises(BadLocation, match=limit) as caught:
                work()
            assert "Nothing was written" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_longest_local_path_that_is_taken_works(tmp_path):
    longest = len(names.longest_in_step()) + 1
    path = long_path(tmp_path, 4095 - longest)
    save(some_state(), path)
    assert same(load(some_state(), path), some_state())
    with pytest.raises(BadLocation, match=f"longest has 4096 bytes.*{4095}"):
        CheckFreqWriter(path + "y")


@pytest.mark.parametrize("letter", ["k", "鍵"], ids=["ascii", "utf-8"])
def test_a_key_that_is_too_long_is_refused_before_anything_is_sent(letter):
    room = 1024 - len(names.longest_in_step()) - 1
    size = len(letter.encode())
    fits = letter * (room // size) + "k" * (room % size)
    CheckFreqWriter(f"s3://bucket/{fits}")
    for protocol in ("s3", "s3a", "gs"):
        with pytest.raises(BadLocation, match="1025 bytes of UTF-8, 1024 are allowed"):
            CheckFreqWriter(f"{protocol}://bucket/{fits}k")
    with pytest.raises(BadLocation, match=r"checkfreq.* 1024 are allowed"):
        Checkpointer(f"s3://bucket/{fits}", {"w": torch.ones(1)}, every=1)


def test_the_longest_names_are_longer_than_any_that_is_given():
    attempt = names.new_attempt()
    step = names.longest_in_step()
    assert names.parse_shard(step)
    for name in (
        names.shard_file(100_000, 99, attempt),
        names.METADATA,
        names.scratch_metadata(attempt),
    ):
        assert len(name) <= len(step)
    assert len(f"{names.RUN_FOLDER}/{names.LEASE}.{attempt}.tmp") <= len(
        names.longest_in_root(step)
    )
