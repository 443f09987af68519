"""Stock's own meanings: what a script could do before, it can do by the drop-in."""

import io
import logging
import os
import pickle
import signal
import warnings

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from behaviour_tools import blank, cause_of, same, some_state
from forked_scripts import run_scripts
from stock_fsspec import FsspecReader, FsspecWriter
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat

from dcp_checkfreq import dropin
from dcp_checkfreq.dropin import fitting
from dcp_checkfreq.errors import BrokenMetadata, BrokenShard


class Code:
    """A value whose pickle needs code."""

    def __init__(self, number):
        self.number = number


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(fitting, "_told", set())
    with dropin.install():
        yield


def is_ours(folder):
    return b"dcp_checkfreq" in (folder / ".metadata").read_bytes()


def shards(folder):
    return sorted(path.name for path in folder.glob("*.distcp"))


def loaded(state, reader):
    target = blank(state)
    dcp.load(target, storage_reader=reader)
    return target


# --- options ---


def test_a_checkpoint_that_is_there_is_replaced_with_all_its_files(tmp_path):
    dropin.uninstall()
    dcp.save(some_state(1.0), checkpoint_id=tmp_path)
    dropin.install()
    stocks = shards(tmp_path)
    dcp.save(some_state(2.0), checkpoint_id=tmp_path)
    first = shards(tmp_path)
    dcp.save(some_state(3.0), checkpoint_id=tmp_path)
    assert not set(first) & {*stocks, *shards(tmp_path)}
    assert same(loaded(some_state(0.0), FileSystemReader(tmp_path)), some_state(3.0))


def test_overwrite_false_is_refused_in_stocks_words(tmp_path):
    dcp.save({"a": 1}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match="Checkpoint already exists"):
        dcp.save({"a": 2}, storage_writer=FileSystemWriter(tmp_path, overwrite=False))


KILLED = """
import os, signal
import torch.distributed.checkpoint as dcp
from dcp_checkfreq import dropin
from dcp_checkfreq.testing import at_disk_call
with dropin.install():
    dcp.save({{"w": torch.full((5000,), 1.0), "n": 1}}, checkpoint_id=sys.argv[1])
    with at_disk_call({n}, "after", lambda call: os.kill(os.getpid(), signal.SIGKILL)):
        dcp.save({{"w": torch.full((5000,), 2.0), "n": 2}}, checkpoint_id=sys.argv[1])
os._exit(0)  # the end of an interpreter takes seconds
"""


@pytest.mark.crash
@pytest.mark.slow
def test_killed_in_the_middle_of_an_overwrite_there_is_the_old_one_or_the_new_one(tmp_path):
    scripts = {f"at{n}": KILLED.format(n=n) for n in range(24)}
    seen = set()
    for name, (code, output) in run_scripts(scripts, tmp_path).items():
        assert code in (0, -signal.SIGKILL), output
        target = {"w": torch.zeros(5000), "n": 0}
        dcp.load(target, checkpoint_id=tmp_path / name)
        assert target["w"].unique().tolist() == [target["n"]]
        seen.add((code == 0, target["n"]))
    assert seen == {(False, 1), (False, 2), (True, 2)}


def test_values_that_need_code_are_saved_and_loaded(tmp_path):
    state = {"code": Code(3), "bytes": io.BytesIO(b"x")}
    dcp.save(state, checkpoint_id=tmp_path)
    target = {"code": None, "bytes": None}
    dcp.load(target, checkpoint_id=tmp_path)
    assert target["code"].number == 3
    assert target["bytes"].getvalue() == b"x"
    assert is_ours(tmp_path)


def test_tensors_are_cast_to_what_the_target_has(tmp_path):
    dcp.save({"a": torch.tensor([1.5, 2.5])}, checkpoint_id=tmp_path)
    target = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    dcp.load(target, checkpoint_id=tmp_path)
    assert target["a"].tolist() == [1.5, 2.5]


def test_single_file_per_rank_and_thread_count_decide_about_files(tmp_path):
    tied = torch.ones(4)
    state = {"a": torch.ones(3), "b": tied, "same": tied, "c": 1}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "1", thread_count=3))
    each = FileSystemWriter(tmp_path / "4", single_file_per_rank=False, thread_count=2)
    dcp.save(state, storage_writer=each)
    assert len(shards(tmp_path / "1")) == 1
    assert len(shards(tmp_path / "4")) == 3  # what is the same memory is written once
    big = {str(n): torch.ones(9 << 20) for n in range(2)}
    dcp.save(big, storage_writer=FileSystemWriter(tmp_path / "2", thread_count=2))
    assert len(shards(tmp_path / "2")) == 2
    for name in ("1", "4"):
        assert same(loaded(state, FileSystemReader(tmp_path / name)), state)


@pytest.mark.parametrize("cached", [False, True])
def test_what_is_changed_after_async_save_has_returned_is_not_in_it(tmp_path, cached):
    writer = FileSystemWriter(tmp_path, cache_staged_state_dict=cached)
    state = {"a": torch.zeros(1000), "n": [0]}
    futures = []
    for step in range(3):
        state["a"].fill_(step)
        state["n"][0] = step
        where = {"storage_writer": writer, "checkpoint_id": tmp_path / str(step)}
        futures.append(dcp.async_save(state, **where))
        state["a"].fill_(-1)
        state["n"][0] = -1
        futures[-1].result()
    for step in range(3):
        got = loaded({"a": torch.zeros(1000), "n": [0]}, FileSystemReader(tmp_path / str(step)))
        assert got["a"].unique().tolist() == [step]
        assert got["n"] == [step]
        assert is_ours(tmp_path / str(step))


def test_async_save_by_checkpoint_id_alone(tmp_path):
    dcp.async_save(some_state(4.0), checkpoint_id=tmp_path).result()
    assert is_ours(tmp_path)
    assert same(loaded(some_state(0.0), FileSystemReader(tmp_path)), some_state(4.0))


def test_what_a_writer_is_told_later_counts(tmp_path):
    writer = FileSystemWriter(tmp_path / "0")
    dcp.save({"a": 1}, storage_writer=writer)
    writer.path, writer.overwrite = tmp_path / "1", False
    dcp.save({"a": 1}, storage_writer=writer)
    assert is_ours(tmp_path / "1")
    with pytest.raises(CheckpointException, match="already exists"):
        dcp.save({"a": 1}, storage_writer=writer)


def test_a_local_path_is_what_it_is_to_stock(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~").mkdir()
    for path in ("~/x", "s3:/bucket/x", "rel"):
        dcp.save({"a": 1}, storage_writer=FileSystemWriter(path))
        assert is_ours(tmp_path / path)
        assert loaded({"a": 0}, FileSystemReader(path)) == {"a": 1}


def test_a_url_goes_to_ours_with_the_options_of_its_file_system():
    fs = fsspec.filesystem("memory")
    dcp.save(some_state(5.0), checkpoint_id="memory://bucket/step_1")
    assert b"dcp_checkfreq" in fs.cat("/bucket/step_1/.metadata")
    got = loaded(some_state(0.0), FsspecReader("memory://bucket/step_1"))
    assert same(got, some_state(5.0))
    writer = FsspecWriter("memory://bucket/step_2", overwrite=True)
    for value in (1.0, 2.0):
        dcp.save(some_state(value), storage_writer=writer)
    assert same(loaded(some_state(0.0), FsspecReader("memory://bucket/step_2")), some_state(2.0))


def test_ids_of_saves_and_loads_are_where_stock_has_them(tmp_path):
    writer, reader = FileSystemWriter(tmp_path), FileSystemReader(tmp_path)
    dcp.save({"a": 1}, storage_writer=writer)
    meta = reader.read_metadata().storage_meta
    assert str(meta.checkpoint_id) == str(tmp_path)
    assert meta.save_id == writer.save_id
    assert meta.load_id == reader.load_id
    assert writer.checkpoint_id == tmp_path


# --- loads ---


def test_what_stock_has_written_is_loaded(tmp_path):
    dropin.uninstall()
    dcp.save(some_state(6.0), checkpoint_id=tmp_path)
    dropin.install()
    assert same(loaded(some_state(0.0), FileSystemReader(tmp_path)), some_state(6.0))


def test_no_checkpoint_is_stocks_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        FileSystemReader(tmp_path).read_metadata()
    with pytest.raises(CheckpointException):
        dcp.load({"a": 1}, checkpoint_id=tmp_path)


def test_damage_is_refused(tmp_path):
    dcp.save(some_state(1.0), checkpoint_id=tmp_path)
    (shard,) = tmp_path.glob("*.distcp")
    content = bytearray(shard.read_bytes())
    at = content.index(torch.full((40, 3), 1.0).numpy().tobytes())
    content[at] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(blank(some_state(1.0)), checkpoint_id=tmp_path)
    assert isinstance(cause_of(caught.value), BrokenShard)
    metadata = tmp_path / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-32])  # a whole pickle, that was sealed
    with pytest.raises(BrokenMetadata):
        FileSystemReader(tmp_path).read_metadata()


def test_metadata_with_more_than_dcps_classes_in_it_is_read_as_stock_does(tmp_path, caplog):
    dropin.uninstall()
    dcp.save(some_state(7.0), checkpoint_id=tmp_path)
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = {**metadata.planner_data, "mine": Code(1)}
    path.write_bytes(pickle.dumps(metadata))
    dropin.install()
    with caplog.at_level(logging.INFO, "dcp_checkfreq"):
        assert same(loaded(some_state(0.0), FileSystemReader(tmp_path)), some_state(7.0))
    assert "its pickle has more than DCP's" in caplog.text


def test_metadata_that_the_caller_has_from_elsewhere_is_believed(tmp_path):
    dcp.save({"a": torch.arange(4)}, checkpoint_id=tmp_path)
    metadata = FileSystemReader(tmp_path).read_metadata()
    reader = FileSystemReader(tmp_path)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    assert reader.storage_data == metadata.storage_data
    planner, target = dcp.DefaultLoadPlanner(), {"a": torch.zeros(4, dtype=torch.int64)}
    planner.set_up_planner(target, metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    assert target["a"].tolist() == [0, 1, 2, 3]


# --- what stays stock ---


def lines(caplog):
    return [text for text in caplog.messages if "drop-in:" in text]


def test_safetensors_stay_stocks_with_one_line(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "dcp_checkfreq"):
        for name in ("0", "1"):
            writer = FileSystemWriter(
                tmp_path / name, serialization_format=SerializationFormat.SAFETENSORS
            )
            dcp.save({"a": torch.ones(2)}, storage_writer=writer)
            assert not is_ours(tmp_path / name)
    (line,) = lines(caplog)
    assert "safetensors" in line


class Flipped(io.RawIOBase):
    """Every bit the other way round, there and back."""

    def __init__(self, inner):
        self.inner = inner

    def readable(self):
        return True

    def write(self, data):
        return self.inner.write(bytes(255 - byte for byte in bytes(data)))

    def readinto(self, buffer):
        data = self.inner.read(len(buffer))
        buffer[: len(data)] = bytes(255 - byte for byte in data)
        return len(data)


class Flip(StreamTransformExtension):
    @staticmethod
    def registry_name():
        return "flip"

    @staticmethod
    def from_descriptor(version):
        return Flip()

    def get_descriptor(self):
        return "flip/1"

    def transform_to(self, output):
        return Flipped(output)

    def transform_from(self, input):
        return Flipped(input)


def test_stream_extensions_stay_stocks_both_ways(tmp_path, caplog):
    registry = ExtensionRegistry()
    registry.register(Flip)
    with caplog.at_level(logging.INFO, "dcp_checkfreq"):
        writer = FileSystemWriter(tmp_path, _extensions=[Flip()])
        dcp.save({"a": torch.ones(50)}, storage_writer=writer)
        assert not is_ours(tmp_path)
        got = loaded({"a": torch.zeros(50)}, FileSystemReader(tmp_path, registry))
    assert got["a"].unique().tolist() == [1.0]
    assert len(lines(caplog)) == 2


def test_hugging_face_storage_stays_stocks(tmp_path, caplog):
    pytest.importorskip("safetensors")
    from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

    state = {"a": torch.arange(6.0)}
    with caplog.at_level(logging.INFO, "dcp_checkfreq"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            state,
            storage_writer=HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping={"a": 1}),
        )
        got = loaded(state, HuggingFaceStorageReader(str(tmp_path)))
    assert same(got, state)
    assert list(tmp_path.glob("*.safetensors"))
    for name in ("HuggingFaceStorageWriter", "HuggingFaceStorageReader"):
        assert [line for line in lines(caplog) if name in line]
    assert len(lines(caplog)) == 2


class OwnFinish(FileSystemWriter):
    """Of a user who goes on from stock's own code."""

    def finish(self, metadata, results):
        assert all(type(one.index).__name__ == "MetadataIndex" for one in results[0])
        super().finish(metadata, results)
        (self.path / "done").write_text("done")


class OwnNames(FileSystemWriter):
    """Of a user who only decides where to save, and has methods of his own."""

    def __init__(self, root, step):
        super().__init__(root / f"step_{step}", thread_count=2)
        self.step = step

    def tell(self):
        return self.step


class OwnRead(FileSystemReader):
    def read_data(self, plan, planner):
        self.was_called = True
        return super().read_data(plan, planner)


def test_a_subclass_that_changes_what_stock_does_stays_stock(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "dcp_checkfreq"):
        for name in ("0", "1"):
            dcp.save(some_state(2.0), storage_writer=OwnFinish(tmp_path / name))
            assert not is_ours(tmp_path / name)
            assert (tmp_path / name / "done").exists()
        reader = OwnRead(tmp_path / "0")
        assert same(loaded(some_state(0.0), reader), some_state(2.0))
        assert reader.was_called
    assert [line for line in lines(caplog) if "OwnFinish.finish" in line] == lines(caplog)[:1]
    assert len(lines(caplog)) == 2


def test_a_subclass_that_changes_nothing_of_stocks_is_ours(tmp_path):
    writer = OwnNames(tmp_path, 3)
    dcp.save({"a": 1}, storage_writer=writer)
    assert is_ours(tmp_path / "step_3")
    assert writer.tell() == 3


def test_a_file_system_of_the_users_stays_stocks(tmp_path):
    class Files(type(FileSystemWriter(tmp_path).fs)):
        pass

    writer = FileSystemWriter(tmp_path)
    writer.fs = Files()
    dcp.save({"a": 1}, storage_writer=writer)
    assert not is_ours(tmp_path)


def test_a_method_put_on_an_object_stays(tmp_path):
    writer, called = FileSystemWriter(tmp_path), []

    def finish(metadata, results):
        called.append(len(results))

    writer.finish = finish
    dcp.save({"a": 1}, storage_writer=writer)
    assert called == [1]


def test_saves_without_collectives_stay_stocks_also_after_staging(tmp_path, caplog):
    state = {"a": torch.arange(2000.0)}
    with caplog.at_level(logging.INFO, "dcp_checkfreq"):
        for name in ("0", "1"):  # the second one would wait for ever for the snapshot of the first
            writer = FileSystemWriter(tmp_path / name)
            dcp.async_save(state, storage_writer=writer, use_collectives=False).result()
            assert (tmp_path / name / "__0.metadata").exists()
            assert same(loaded(state, FileSystemReader(tmp_path / name)), state)
    assert len([line for line in lines(caplog) if "use_collectives" in line]) == 1


def test_what_only_stock_can_stage_is_staged_by_stock(tmp_path, monkeypatch, caplog):
    from dcp_checkfreq.errors import UnsupportedState
    from dcp_checkfreq.snapshot.stager import Stager

    def refuse(self, state):
        raise UnsupportedState("a", "tensor", "for the test")

    monkeypatch.setattr(Stager, "stage", refuse)
    state = some_state(2.0)
    with caplog.at_level(logging.INFO, "dcp_checkfreq"):
        dcp.async_save(state, storage_writer=FileSystemWriter(tmp_path)).result()
    assert is_ours(tmp_path)
    assert same(loaded(state, FileSystemReader(tmp_path)), state)
    assert "for the test" in caplog.text


def long_folder(tmp_path):
    """Return a folder whose path has room for stock's names, but not for ours."""
    path = str(tmp_path)
    while len(path) < 4072:
        path += "/" + "n" * min(200, 4072 - len(path) - 1)
    os.makedirs(path)
    return path


def test_a_place_that_is_not_for_us_stays_stocks(tmp_path):
    folder = long_folder(tmp_path)
    dcp.save({"a": 1}, checkpoint_id=folder)
    assert loaded({"a": 0}, FileSystemReader(folder)) == {"a": 1}
    assert "__0_0.distcp" in os.listdir(folder)


def test_a_writer_that_goes_on_to_such_a_place_leaves_the_one_before_alone(tmp_path):
    first, folder = tmp_path / "first", long_folder(tmp_path)
    writer = FileSystemWriter(first)
    dcp.save({"a": 1}, storage_writer=writer)
    dcp.save({"a": 2}, checkpoint_id=folder, storage_writer=writer)
    assert loaded({"a": 0}, FileSystemReader(folder)) == {"a": 2}
    assert loaded({"a": 0}, FileSystemReader(first)) == {"a": 1}
