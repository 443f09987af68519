"""Cases 33 and 34: checkpoints from someone else, and from another version."""

import collections
import contextlib
import datetime
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from behaviour_tools import fails_with, same, save, some_state
from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq import (
    BrokenMetadata,
    CheckFreqLoadPlanner,
    CheckFreqReader,
    Checkpointer,
    NewerFormat,
    NoValidCheckpoint,
    UnsafePickle,
    find_latest_valid,
)
from dcp_checkfreq.format.metadata import MAGIC


class Evil:
    """Opens a file for writing when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


both_planners = pytest.mark.parametrize(
    "planner", [lambda: None, CheckFreqLoadPlanner], ids=["default", "ours"]
)
writers = pytest.mark.parametrize(
    "write",
    [
        lambda state, path: save(state, path, allow_pickle=True),
        lambda state, path: dcp.save(state, storage_writer=dcp.FileSystemWriter(path)),
    ],
    ids=["ours", "stock"],
)


def plant(folder, content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".metadata").write_bytes(content)


def sealed(body):
    digest = xxhash.xxh3_128_digest(body)
    return body + MAGIC + len(body).to_bytes(8, "little") + digest


@both_planners
@pytest.mark.parametrize("seal", [lambda body: body, sealed], ids=["bare", "sealed"])
def test_code_in_the_metadata_file_is_never_run(tmp_path, planner, seal):
    flag = tmp_path / "FLAG"
    plant(tmp_path / "step_1", seal(pickle.dumps(Evil(flag))))
    with pytest.raises(CheckpointException, match=r"_io\.open|not readable"):
        dcp.load(
            {"w": torch.zeros(2)},
            storage_reader=CheckFreqReader(tmp_path / "step_1"),
            planner=planner(),
        )
    for depth in ("size", "digest"):
        assert find_latest_valid(tmp_path, depth=depth) is None
    with (
        Checkpointer(tmp_path, {"w": torch.zeros(2)}, every=1) as ckpt,
        contextlib.suppress(NoValidCheckpoint),
    ):
        ckpt.restore()
    assert not flag.exists()


def test_code_hidden_inside_good_metadata_is_never_run(tmp_path):
    save({"w": torch.ones(2)}, tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    flag = tmp_path / "FLAG"
    metadata.planner_data = {"w": Evil(flag)}
    plant(tmp_path, sealed(pickle.dumps(metadata)))
    with pytest.raises(BrokenMetadata, match="open"):
        CheckFreqReader(tmp_path).read_metadata()
    assert not flag.exists()


@writers
@both_planners
def test_code_in_a_byte_item_is_refused_by_name_and_not_run(tmp_path, write, planner):
    flag = tmp_path / "FLAG"
    write({"w": torch.ones(2), "deep": {"o": Evil(flag)}}, tmp_path / "a")
    flag.unlink(missing_ok=True)
    target = {"w": torch.zeros(2), "deep": {"o": None}}
    with fails_with(UnsafePickle, "'deep.o'") as caught:
        dcp.load(target, storage_reader=CheckFreqReader(tmp_path / "a"), planner=planner())
    assert "allow_pickle=True" in str(caught.value)
    assert target["deep"]["o"] is None
    assert not flag.exists()


@writers
def test_allow_pickle_opts_out(tmp_path, write):
    flag = tmp_path / "FLAG"
    write({"o": Evil(flag)}, tmp_path / "a")
    flag.unlink(missing_ok=True)
    reader = CheckFreqReader(tmp_path / "a", allow_pickle=True)
    target = {"o": None}
    dcp.load(target, storage_reader=reader)
    target["o"].close()
    assert flag.exists()
    flag.unlink()
    planner = CheckFreqLoadPlanner(allow_pickle=True)
    dcp.load(target, storage_reader=CheckFreqReader(tmp_path / "a"), planner=planner)
    target["o"].close()
    assert flag.exists()


HARMLESS = {
    "numpy array": np.arange(6.0).reshape(2, 3),
    "numpy scalar": np.float32(1.5),
    "numpy int": np.int64(7),
    "numpy state": np.random.RandomState(3).get_state(),
    "ordered": collections.OrderedDict(a=1, b=2),
    "counter": collections.Counter({3: 1}),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "tuple": (1, (2.5, None), frozenset({1}), {2}, b"raw", 1 + 2j),
    "bytearray": bytearray(b"abc"),
    "date": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
    "random state": __import__("random").Random(1).getstate(),
    "in a tuple": (torch.ones(2),),
}


@writers
@both_planners
@pytest.mark.parametrize("key", HARMLESS)
def test_what_optimizers_and_samplers_hold_loads_without_pickle(tmp_path, write, planner, key):
    wanted = HARMLESS[key]
    write({"v": (wanted,)}, tmp_path)
    target = {"v": None}
    # A stock planner unpickles by itself; the reader's own check comes first.
    dcp.load(target, storage_reader=CheckFreqReader(tmp_path), planner=planner())
    (got,) = target["v"]
    assert type(got) is type(wanted)
    if isinstance(wanted, np.ndarray):
        assert np.array_equal(got, wanted)
    elif key in ("numpy state", "in a tuple"):
        assert str(got) == str(wanted)
    else:
        assert got == wanted


@writers
@both_planners
@pytest.mark.parametrize(
    "value",
    [collections.deque([1, 2], maxlen=5), collections.defaultdict(list, {"a": [1]})],
    ids=["deque", "defaultdict"],
)
def test_what_torch_cannot_fill_without_pickle_is_refused_by_name(tmp_path, write, planner, value):
    write({"v": (value,)}, tmp_path)
    target = {"v": None}
    with fails_with(UnsafePickle, "'v'"):
        dcp.load(target, storage_reader=CheckFreqReader(tmp_path), planner=planner())


def test_the_file_position_of_a_checked_item_is_at_its_start_for_the_planner(tmp_path):
    save({"a": "first", "b": {"c": 2}}, tmp_path)
    target = {"a": None, "b": {"c": None}}
    dcp.load(target, storage_reader=CheckFreqReader(tmp_path))
    assert target == {"a": "first", "b": {"c": 2}}


# --- case 34 ---


def rewritten(folder, change):
    """Change the record in ``.metadata`` of a checkpoint and seal it again."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    plant(folder, sealed(pickle.dumps(metadata, protocol=4)))


def test_a_newer_format_is_an_error_that_names_both_versions(tmp_path):
    save(some_state(1.0), tmp_path / "step_1")
    save(some_state(2.0), tmp_path / "step_2")

    def newer(metadata):
        metadata.dcp_checkfreq["format"] = 2
        metadata.dcp_checkfreq["written_by"] = "dcp-checkfreq 9.9 (torch 2.99)"

    rewritten(tmp_path / "step_2", newer)
    with pytest.raises(NewerFormat, match=r"dcp-checkfreq 9\.9.*reads up to 1"):
        CheckFreqReader(tmp_path / "step_2").read_metadata()
    found = find_latest_valid(tmp_path)
    assert found.step == 1
    assert "9.9" in found.rejected[0].reason


def test_unknown_fields_of_the_record_and_the_metadata_are_ignored(tmp_path):
    save(some_state(), tmp_path)

    def more(metadata):
        metadata.dcp_checkfreq["colour"] = {"of": ["the", "sky"]}
        metadata.a_field_of_a_later_torch = 7

    rewritten(tmp_path, more)
    target = {"weight": torch.zeros(40, 3)}
    dcp.load(target, storage_reader=CheckFreqReader(tmp_path))
    assert same(target["weight"], some_state()["weight"])


def test_an_unknown_class_is_an_error_that_names_it(tmp_path):
    dcp.save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path / "step_1"))
    record = tmp_path / "step_1" / ".metadata"
    record.write_bytes(record.read_bytes().replace(b"_StorageInfo", b"_StorageInfX"))
    with pytest.raises(BrokenMetadata, match="_StorageInfX"):
        CheckFreqReader(tmp_path / "step_1").read_metadata()
    assert find_latest_valid(tmp_path) is None


@pytest.mark.slow
def test_six_tensor_properties_of_a_later_torch_are_read(tmp_path):
    """A later torch pickles a sixth field; the writer here is a process that does so too."""
    code = textwrap.dedent(
        f"""
        import torch, torch.distributed.checkpoint as dcp, warnings
        from torch.distributed.checkpoint.metadata import TensorProperties
        warnings.simplefilter("ignore")
        five = TensorProperties.__getstate__
        TensorProperties.__getstate__ = lambda self: (*five(self), None)
        dcp.save({{"w": torch.ones(3)}}, storage_writer=dcp.FileSystemWriter({str(tmp_path)!r}))
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    target = {"w": torch.zeros(3)}
    dcp.load(target, storage_reader=CheckFreqReader(tmp_path))
    assert target["w"].tolist() == [1, 1, 1]


def test_the_record_says_who_wrote_it(tmp_path):
    save(some_state(), tmp_path)
    record = pickle.loads((tmp_path / ".metadata").read_bytes()).dcp_checkfreq
    assert torch.__version__ in record["written_by"]
    assert record["world_size"] == 1
