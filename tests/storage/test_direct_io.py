"""Item 4: file systems, sizes and directions of I/O, through the public classes."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from behaviour_tools import load, same, save

from dcp_checkfreq import (
    CheckFreqLoadPlanner,
    CheckFreqReader,
    CheckFreqSavePlanner,
    CheckFreqWriter,
    find_latest_valid,
)

MIB = 1 << 20


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request, tmp_path):
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no tmpfs here")
    path = Path(tempfile.mkdtemp(prefix="checkfreq-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def state_of(total_bytes, tensors):
    size = total_bytes // tensors // 4
    return {f"w{n}": torch.arange(n, n + size, dtype=torch.float32) for n in range(tensors)}


@pytest.mark.parametrize("direct_io", [None, True, False])
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("total_bytes", "tensors"),
    [(1000, 3), (4 * MIB - 64, 1), (4 * MIB + 4, 1), (40 * MIB, 3), (70 * MIB + 12, 7)],
)
def test_every_size_round_trips_on_every_path(folder, direct_io, threads, total_bytes, tensors):
    state = state_of(total_bytes, tensors)
    save(state, folder, direct_io=direct_io, threads=threads)
    assert same(load(state, folder, direct_io=direct_io, threads=threads), state)
    assert same(load(state, folder), state)
    files = list(folder.glob("*.distcp"))
    assert 1 <= len(files) <= threads
    assert sum(file.stat().st_size for file in files) < total_bytes + 6000 * tensors + 8192


def test_stock_reads_large_files_on_every_file_system(folder):
    state = state_of(40 * MIB, 3)
    save(state, folder)
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(target, checkpoint_id=folder)
    assert same(target, state)


def test_background_saves_round_trip_on_every_file_system(folder):
    state = state_of(40 * MIB, 3)
    for step in (1, 2):
        dcp.async_save(state, storage_writer=CheckFreqWriter(folder / f"step_{step}")).result()
        state["w0"].add_(1)
    assert find_latest_valid(folder, depth="digest").step == 2
    state["w0"].sub_(1)
    assert same(load(state, folder / "step_2"), state)


@pytest.mark.slow
def test_ten_thousand_small_tensors_take_few_calls(tmp_path, monkeypatch):
    state = {f"layer{n}.w": torch.full((8,), float(n)) for n in range(10_000)}
    calls = []
    for name in ("pwritev", "preadv", "write", "pwrite", "read", "pread"):
        real = getattr(os, name)

        def counted(*args, real=real, name=name):
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(os, name, counted)
    save(state, tmp_path, planner=CheckFreqSavePlanner())
    written = len(calls)
    target = {key: torch.zeros(8) for key in state}
    dcp.load(target, storage_reader=CheckFreqReader(tmp_path), planner=CheckFreqLoadPlanner())
    assert same(target, state)
    # 30,000 pieces go out at most a thousand to a call; reads are joined over the gaps.
    assert written < 100
    assert len(calls) - written < 20


def test_a_slice_is_read_without_the_rows_around_it(tmp_path):
    rows, columns = 4096, 512
    save({"w": torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)}, tmp_path)
    reader = CheckFreqReader(tmp_path)
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Rows(DefaultLoadPlanner):
        """Loads rows 1000 to 1512 only, into a tensor of that many rows."""

        def create_local_plan(self):
            import dataclasses

            plan = super().create_local_plan()
            (item,) = plan.items
            part = dataclasses.replace(
                item, storage_offsets=torch.Size([1000, 0]), lengths=torch.Size([512, columns])
            )
            return dataclasses.replace(plan, items=[part])

        def resolve_tensor(self, read_item):
            return wanted

    wanted = torch.zeros(512, columns)
    dcp.load({"w": torch.zeros(rows, columns)}, storage_reader=reader, planner=Rows())
    assert torch.equal(wanted.flatten(), torch.arange(1000.0 * columns, 1512.0 * columns))
    assert reader.bytes_needed == wanted.nbytes
    assert reader.bytes_read <= wanted.nbytes + 2 * (rows * columns * 4 // 32) + 8192
