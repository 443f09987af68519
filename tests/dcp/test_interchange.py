"""No lock-in: stock DCP reads what we write, we read what stock DCP writes."""

import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from behaviour_tools import blank, load, same, save, some_state
from stock_fsspec import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from dcp_checkfreq import (
    CheckFreqLoadPlanner,
    CheckFreqReader,
    CheckFreqSavePlanner,
    CheckFreqWriter,
    find_latest_valid,
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bool,
]


def every_kind():
    """Return tensors of every dtype and awkward shapes, and byte items."""
    torch.manual_seed(3)
    state = {str(dtype): (torch.randn(31, 5) * 3).to(dtype) for dtype in DTYPES}
    base = torch.arange(120.0).reshape(8, 15)
    state |= {
        "scalar": torch.tensor(3.25),
        "empty": torch.zeros(0, 5),
        "view": base[2:5, 3:9],
        "transposed": base.t(),
        "expanded": torch.ones(1).expand(64),
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "param": torch.nn.Parameter(torch.randn(4, 4)),
        "large": torch.randn(300_000),
        "text": "x" * 1000,
        "number": 1,
        "deep": {"a": {"b": [torch.ones(2), {"c": 1.5}]}},
    }
    return state


def blank_kinds():
    def fresh(value):
        if isinstance(value, torch.Tensor):
            return torch.zeros(value.shape, dtype=value.dtype)
        if isinstance(value, dict):
            return {key: fresh(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [fresh(inner) for inner in value]
        return None

    return fresh(every_kind())


STOCK_READERS = {
    "checkpoint_id": lambda path: {"checkpoint_id": path},
    "FileSystemReader": lambda path: {"storage_reader": dcp.FileSystemReader(path)},
    "FsspecReader": lambda path: {"storage_reader": FsspecReader(str(path))},
}
SAVE_PLANNERS = {
    "default": lambda: None,
    "stock cache": lambda: DefaultSavePlanner(enable_plan_caching=True),
    "ours": CheckFreqSavePlanner,
}


def equal(got, wanted):
    if isinstance(wanted, torch.Tensor):
        return torch.equal(got.view(torch.uint8), _plain(wanted).view(torch.uint8)) if (
            wanted.dim()
        ) else torch.equal(got, wanted)  # fmt: skip
    return same(got, wanted) if not isinstance(wanted, (dict, list)) else _equal_all(got, wanted)


def _plain(tensor):
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _equal_all(got, wanted):
    pairs = wanted.items() if isinstance(wanted, dict) else enumerate(wanted)
    return len(got) == len(wanted) and all(equal(got[key], value) for key, value in pairs)


@pytest.mark.parametrize("reader", STOCK_READERS.values(), ids=STOCK_READERS.keys())
@pytest.mark.parametrize("planner", SAVE_PLANNERS.values(), ids=SAVE_PLANNERS.keys())
def test_stock_dcp_loads_what_we_save(tmp_path, reader, planner):
    save(every_kind(), tmp_path, planner=planner())
    target = blank_kinds()
    dcp.load(target, **reader(tmp_path))
    assert _equal_all(target, every_kind())


@pytest.mark.parametrize("planner", SAVE_PLANNERS.values(), ids=SAVE_PLANNERS.keys())
def test_we_load_what_we_save_in_the_background(tmp_path, planner):
    dcp.async_save(
        every_kind(), storage_writer=CheckFreqWriter(tmp_path), planner=planner()
    ).result()
    for load_planner in (None, CheckFreqLoadPlanner()):
        target = blank_kinds()
        dcp.load(target, storage_reader=CheckFreqReader(tmp_path), planner=load_planner)
        assert _equal_all(target, every_kind())


def test_stock_dcp_to_torch_save_converts_what_we_save(tmp_path):
    save(some_state(), tmp_path / "ckpt")
    dcp_to_torch_save(tmp_path / "ckpt", tmp_path / "out.pt")
    assert same(torch.load(tmp_path / "out.pt", weights_only=True), some_state())


def test_we_load_what_torch_save_to_dcp_makes(tmp_path):
    torch.save(some_state(), tmp_path / "in.pt")
    torch_save_to_dcp(tmp_path / "in.pt", tmp_path / "ckpt")
    assert same(load(some_state(), tmp_path / "ckpt"), some_state())


STOCK_WRITERS = {
    "FileSystemWriter": lambda path: dcp.FileSystemWriter(path),
    "two threads": lambda path: dcp.FileSystemWriter(path, thread_count=2),
    "file per item": lambda path: dcp.FileSystemWriter(path, single_file_per_rank=False),
    "FsspecWriter": lambda path: FsspecWriter(str(path)),
}


@pytest.mark.parametrize("writer", STOCK_WRITERS.values(), ids=STOCK_WRITERS.keys())
@pytest.mark.parametrize(
    "planner",
    [lambda: None, lambda: DefaultSavePlanner(enable_plan_caching=True)],
    ids=["default", "stock cache"],
)
def test_we_load_and_find_what_stock_dcp_saves(tmp_path, writer, planner):
    for step in (9, 10):
        dcp.save(every_kind(), storage_writer=writer(tmp_path / f"step_{step}"), planner=planner())
    found = find_latest_valid(tmp_path)
    assert (found.step, found.attempt, found.rejected) == (10, "", ())
    for load_planner in (None, CheckFreqLoadPlanner()):
        target = blank_kinds()
        dcp.load(target, storage_reader=CheckFreqReader(found), planner=load_planner)
        assert _equal_all(target, every_kind())


def test_we_load_what_a_planner_of_ours_saved_through_a_stock_writer(tmp_path):
    dcp.save(
        some_state(), storage_writer=dcp.FileSystemWriter(tmp_path), planner=CheckFreqSavePlanner()
    )
    assert same(load(some_state(), tmp_path), some_state())


def test_metadata_without_our_record_is_read_by_stock_pickle(tmp_path):
    save(some_state(), tmp_path)
    metadata = pickle.load(io.BytesIO((tmp_path / ".metadata").read_bytes()))
    assert type(metadata).__module__ == "torch.distributed.checkpoint.metadata"
    assert isinstance(metadata.dcp_checkfreq, dict)


def test_an_item_is_an_archive_that_torch_load_reads(tmp_path):
    state = every_kind()
    save(state, tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        content = (tmp_path / info.relative_path).read_bytes()
        item = io.BytesIO(content[info.offset : info.offset + info.length])
        value = torch.load(item, weights_only=True)
        if index.fqn in state and isinstance(state[index.fqn], torch.Tensor):
            assert equal(value, state[index.fqn]), index.fqn


def test_targets_may_be_views_transposed_or_parameters(tmp_path):
    state = {key: torch.randn(6, 4) for key in ("plain", "strided", "transposed", "param", "conj")}
    state["conj"] = torch.randn(6, 4, dtype=torch.complex64)
    save(state, tmp_path)
    target = {
        "plain": torch.zeros(6, 4),
        "strided": torch.zeros(12, 8)[::2, ::2],
        "transposed": torch.zeros(4, 6).t(),
        "param": torch.nn.Parameter(torch.zeros(6, 4)),
        "conj": torch.zeros(6, 4, dtype=torch.complex64).conj(),
    }
    dcp.load(target, storage_reader=CheckFreqReader(tmp_path))
    assert all(torch.equal(target[key], state[key]) for key in state)


def test_half_of_the_keys_may_be_loaded_and_only_their_bytes_are_read(tmp_path):
    state = {f"w{n}": torch.full((1 << 18,), float(n)) for n in range(8)}
    save(state, tmp_path)
    target = {f"w{n}": torch.zeros(1 << 18) for n in (1, 4)}
    reader = CheckFreqReader(tmp_path)
    dcp.load(target, storage_reader=reader)
    assert all(torch.equal(target[key], state[key]) for key in target)
    assert reader.bytes_needed == 2 << 20
    assert reader.bytes_read <= 1.05 * reader.bytes_needed


def test_a_loaded_state_can_be_saved_again(tmp_path):
    save(some_state(), tmp_path / "a")
    again = load(some_state(), tmp_path / "a")
    save(again, tmp_path / "b")
    assert same(load(some_state(), tmp_path / "b"), some_state())
    assert same(blank(some_state()), blank(again))
