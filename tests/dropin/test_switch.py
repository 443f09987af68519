"""On and off: whoever has imported stock's classes when, and in whatever order it ends."""

import logging
import pickle
import threading
import unittest.mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from behaviour_tools import blank, same, some_state
from stock_fsspec import FsspecReader, FsspecWriter
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import save as save_of_before
from torch.distributed.checkpoint.filesystem import FileSystemWriter as AnotherName
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from dcp_checkfreq import dropin
from dcp_checkfreq.format.torch_private import ProcessExecutor, ThreadExecutor

PATCHED = [FileSystemWriter, FileSystemReader, FsspecWriter, FsspecReader]
PATCHED += [ProcessExecutor, ThreadExecutor, StorageWriter, StorageReader, AsyncStager]


def is_ours(folder):
    return b"dcp_checkfreq" in (folder / ".metadata").read_bytes()


def contents():
    return [dict(vars(kind)) for kind in PATCHED]


def test_what_was_imported_before_saves_and_loads_by_ours_and_then_as_before(tmp_path):
    before = contents()
    state = some_state(3.0)
    with dropin.install():
        save_of_before(state, checkpoint_id=tmp_path / "by-id")
        save_of_before(state, storage_writer=AnotherName(tmp_path / "by-class"))
        save_of_before(state, storage_writer=FsspecWriter(str(tmp_path / "by-fsspec")))
        for name in ("by-id", "by-class", "by-fsspec"):
            assert is_ours(tmp_path / name)
            target = blank(state)
            dcp.load(target, storage_reader=FsspecReader(str(tmp_path / name)))
            assert same(target, state)
    assert contents() == before
    save_of_before(state, checkpoint_id=tmp_path / "after")
    assert not is_ours(tmp_path / "after")
    for name in ("by-id", "by-class", "by-fsspec"):  # stock reads what ours has written
        target = blank(state)
        dcp.load(target, checkpoint_id=tmp_path / name)
        assert same(target, state)


def test_a_writer_made_before_is_ours_while_it_is_on_and_stocks_after(tmp_path):
    writer = FileSystemWriter(tmp_path / "0")
    with dropin.install():
        dcp.save({"a": 1}, storage_writer=writer)
    dcp.save({"a": 1}, storage_writer=writer, checkpoint_id=tmp_path / "1")
    assert is_ours(tmp_path / "0")
    assert not is_ours(tmp_path / "1")


def test_objects_are_what_they_were():
    with dropin.install():
        writer, reader = FileSystemWriter("x"), FileSystemReader("x")
    assert type(writer) is FileSystemWriter
    assert isinstance(writer, StorageWriter)
    assert isinstance(writer, AsyncStager)
    assert type(reader) is FileSystemReader


def test_installs_are_counted_and_an_uninstall_too_many_does_nothing(tmp_path):
    before = contents()
    dropin.install()
    with dropin.install(), dropin.install() as inner:
        inner.__exit__(None, None, None)  # then its own end counts no more
        dcp.save({"a": 1}, checkpoint_id=tmp_path / "inside")
    dcp.save({"a": 1}, checkpoint_id=tmp_path / "outside")
    dropin.uninstall()
    dropin.uninstall()
    assert contents() == before
    assert is_ours(tmp_path / "inside")
    assert is_ours(tmp_path / "outside")
    with dropin.install():
        dcp.save({"a": 1}, checkpoint_id=tmp_path / "again")
    assert is_ours(tmp_path / "again")


def test_an_error_in_the_block_ends_it_too():
    before = contents()
    with pytest.raises(KeyError), dropin.install():
        raise KeyError
    assert contents() == before


def test_one_line_says_that_it_is_on_and_what_it_has_replaced(caplog):
    with caplog.at_level(logging.INFO, "dcp_checkfreq.dropin"), dropin.install(), dropin.install():
        pass
    (line,) = [text for text in caplog.messages if "is on" in text]
    for name in ("FileSystemWriter", "FsspecReader", "CheckFreqWriter", torch.__version__):
        assert name in line
    assert sum("is off" in text for text in caplog.messages) == 1


def test_a_method_that_others_have_replaced_on_top_of_ours_stays(caplog):
    before = FileSystemWriter.__dict__.get("finish")
    with unittest.mock.patch.object(FileSystemWriter, "finish", autospec=True):
        theirs = FileSystemWriter.finish
        with dropin.install():
            FileSystemWriter.finish, ours = theirs, FileSystemWriter.finish
        assert FileSystemWriter.finish is theirs
        assert ours is not theirs
        assert "replaced by others" in caplog.text
    assert FileSystemWriter.__dict__.get("finish") is before


def test_what_a_test_puts_in_place_before_is_called_for_what_stays_stock(tmp_path):
    with unittest.mock.patch.object(FileSystemWriter, "finish", autospec=True) as theirs:
        with dropin.install():
            dcp.save({"a": 1}, storage_writer=FileSystemWriter(tmp_path), use_collectives=False)
        assert theirs.call_count == 1


class Slow(dcp.DefaultSavePlanner):
    """Holds a save up when everything is planned."""

    def __init__(self):
        super().__init__()
        self.is_there, self.go_on = threading.Event(), threading.Event()

    def finish_plan(self, plan):
        self.is_there.set()
        assert self.go_on.wait(30)
        return super().finish_plan(plan)


def test_a_save_under_way_in_a_thread_of_the_users_ends_as_it_began(tmp_path, monkeypatch):
    monkeypatch.setattr("dcp_checkfreq.dropin.switch._JOIN_S", 0.01)
    before, planner = contents(), Slow()
    saving = threading.Thread(
        target=dcp.save, args=[{"a": 1}], kwargs={"checkpoint_id": tmp_path, "planner": planner}
    )
    with dropin.install():
        saving.start()
        assert planner.is_there.wait(30)
    dcp.save({"a": 1}, checkpoint_id=tmp_path / "other")
    planner.go_on.set()
    saving.join(30)
    assert is_ours(tmp_path)
    assert not is_ours(tmp_path / "other")
    with dropin.install():
        pass
    assert contents() == before


def test_the_end_waits_for_saves_in_dcps_threads(tmp_path):
    planner = Slow()
    with dropin.install():
        future = dcp.async_save(
            {"a": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path), planner=planner
        )
        assert planner.is_there.wait(30)
        threading.Timer(0.1, planner.go_on.set).start()
    assert future.done()
    assert is_ours(tmp_path)


def test_a_pickle_or_a_copy_of_a_writer_has_nothing_of_ours(tmp_path):
    writer = FileSystemWriter(tmp_path / "0")
    with dropin.install():
        dcp.save({"a": 1}, storage_writer=writer)
    again = pickle.loads(pickle.dumps(writer))
    assert type(again) is FileSystemWriter
    dcp.save({"a": 1}, storage_writer=again, checkpoint_id=tmp_path / "1")
    assert not is_ours(tmp_path / "1")


def test_plans_that_were_kept_while_it_was_on_are_stocks_too(tmp_path):
    caches = [name for name in vars(SavePlanner) if name.startswith("_cached")]
    try:
        for number in range(3):
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            state = {"a": torch.full((5,), float(number)), "b": number}
            if number == 2:
                dcp.save(state, checkpoint_id=tmp_path / "2", planner=planner)
            else:
                with dropin.install():
                    dcp.save(state, checkpoint_id=tmp_path / str(number), planner=planner)
            target = blank(state)
            dcp.load(target, checkpoint_id=tmp_path / str(number))
            assert same(target, state)
            assert is_ours(tmp_path / str(number)) == (number < 2)
    finally:
        for name in caches:
            getattr(SavePlanner, name).clear()
