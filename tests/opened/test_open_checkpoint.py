"""A checkpoint is opened, and only what is asked for is read: right, checked, by any thread."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from self_described_kinds import buffer

from dcp_checkfreq import (
    BadLocation,
    BrokenMetadata,
    BrokenShard,
    CheckFreqWriter,
    Checkpointer,
    LazyTensor,
    LazyValue,
    UnsafePickle,
    find_latest_valid,
    open_checkpoint,
)
from dcp_checkfreq.testing import ForwardingTier, MemoryTier

ROWS = torch.arange(1_200_000, dtype=torch.float32).reshape(2000, 600)
DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.bool),
    *(torch.int8, torch.uint8, torch.int16, torch.int64, torch.float8_e4m3fn),
]


def state():
    return {
        "model": {"w": ROWS.clone(), "b": torch.ones(7), "none": torch.zeros(0, 3)},
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "kinds": {str(kind): torch.arange(9).to(kind) for kind in DTYPES},
        "step": 5,
        "names": ["one", "two"],
    }


def in_pieces():
    """One tensor, of which the checkpoint has three chunks."""
    blocks = {0: ROWS[:700], 700: ROWS[700:701], 701: ROWS[701:]}
    return {"w": buffer([2000, 600], blocks)}


def save(folder, kept=None, **options):
    dcp.save(kept or state(), storage_writer=CheckFreqWriter(folder, **options))


def shard(folder):
    (found,) = folder.glob("*.distcp")
    return found


@pytest.fixture(params=["ours", "stock", "memory"])
def opened(request, tmp_path):
    if request.param == "stock":
        dcp.save(state(), checkpoint_id=tmp_path / "c")
        yield open_checkpoint(tmp_path / "c")
    elif request.param == "ours":
        save(tmp_path / "c")
        yield open_checkpoint(str(tmp_path / "c"))
    else:
        tier = MemoryTier()
        save(tier)
        yield open_checkpoint(tier)


def is_mapped(tensor, file):
    """Whether these bytes are a mapping of that file."""
    at = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(one, 16) for one in line.split()[0].split("-"))
        if first <= at < last:
            return line.endswith(str(file))
    return False


def test_every_key_is_there_with_its_shape_and_dtype_before_anything_is_read(opened):
    wanted = state()
    flat = {"model.w", "model.b", "model.none", "scalar", "step", "names"}
    assert set(opened) == flat | {f"kinds.{kind}" for kind in wanted["kinds"]}
    w = opened["model.w"]
    assert isinstance(w, LazyTensor)
    assert (w.shape, w.dtype, w.ndim, len(w)) == (ROWS.shape, torch.float32, 2, 2000)
    assert (w.numel(), w.nbytes) == (ROWS.numel(), ROWS.nbytes)
    assert repr(w) == "LazyTensor('model.w', [2000, 600], torch.float32)"
    assert set(opened.tensors()) == set(opened) - {"step", "names"}


def test_tensors_and_values_are_what_was_saved(opened):
    wanted = state()
    for name in ("w", "b", "none"):
        assert torch.equal(opened[f"model.{name}"].tensor(), wanted["model"][name])
    assert opened["scalar"].tensor().item() == opened["scalar"][()].item() == 2.5
    for kind, tensor in wanted["kinds"].items():
        got = opened[f"kinds.{kind}"].tensor()
        assert got.dtype == tensor.dtype
        assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))
    assert isinstance(opened["step"], LazyValue)
    assert opened["step"].value() == 5
    assert opened["names"].value() == ["one", "two"]


@pytest.mark.parametrize(
    "index",
    [3, -1, slice(10, 20), slice(690, 710), slice(5, 5), (..., 2), (slice(3, 900, 7), slice(9))],
    ids=str,
)
def test_parts_are_those_of_the_whole(tmp_path, index):
    save(tmp_path / "one")
    save(tmp_path / "three", in_pieces())
    for folder, key in (("one", "model.w"), ("three", "w")):
        got = open_checkpoint(tmp_path / folder)[key][index]
        assert got.shape == ROWS[index].shape
        assert torch.equal(got, ROWS[index])


def test_what_is_in_one_piece_on_a_local_disk_is_the_memory_of_the_file(tmp_path):
    save(tmp_path / "one")
    save(tmp_path / "three", in_pieces())
    file, before = shard(tmp_path / "one"), shard(tmp_path / "one").read_bytes()
    opened = open_checkpoint(tmp_path / "one")
    for got in (opened["model.w"].tensor(), opened["model.w"][10:20], opened["model.w"][:, 3]):
        assert is_mapped(got, file)
    three = open_checkpoint(tmp_path / "three")["w"]
    assert is_mapped(three[0:700], shard(tmp_path / "three"))
    assert not is_mapped(three[0:701], shard(tmp_path / "three"))
    opened["model.w"].tensor().zero_()  # private: nobody else sees it
    assert file.read_bytes() == before
    assert torch.equal(open_checkpoint(tmp_path / "one")["model.w"].tensor(), ROWS)
    copied = open_checkpoint(tmp_path / "one", map_files=False)["model.w"]
    assert not is_mapped(copied.tensor(), file)
    assert torch.equal(copied.tensor(), ROWS)


def test_a_mapped_tensor_outlives_its_checkpoint_and_whoever_opened_it(tmp_path):
    save(tmp_path)
    with open_checkpoint(tmp_path) as opened:
        got = opened["model.w"][100:200]
    shard(tmp_path).unlink()
    assert torch.equal(got, ROWS[100:200])
    with pytest.raises(BrokenShard, match=r"is missing.*Nothing was loaded"):
        opened["model.w"].tensor()


class Counting(ForwardingTier):
    def __init__(self, tier):
        super().__init__(tier)
        self.read_bytes = 0

    def open(self, name):
        reader, counting = super().open(name), self

        class Reader:
            size_bytes = reader.size_bytes

            def read_into(self, offset, target):
                counting.read_bytes += len(target)
                reader.read_into(offset, target)

            def close(self):
                reader.close()

        return Reader()


def test_little_more_is_read_than_is_asked_for():
    tier = Counting(MemoryTier())
    save(tier)
    opened = open_checkpoint(tier)
    assert tier.read_bytes == 0
    got = opened["model.w"][1000:1010]
    assert torch.equal(got, ROWS[1000:1010])
    assert (
        got.nbytes <= tier.read_bytes <= 2 * (128 << 10) + 2 * 4096
    )  # two digest blocks, in pages


def flip(file, at):
    with open(file, "r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("maps", [True, False])
def test_a_damaged_block_is_named_and_the_others_are_read(tmp_path, maps):
    save(tmp_path, {"w": ROWS.clone()})
    content = shard(tmp_path).read_bytes()
    start = content.index(ROWS[0].numpy().tobytes())
    flip(shard(tmp_path), start + 1000 * 2400)
    w = open_checkpoint(tmp_path, map_files=maps)["w"]
    assert torch.equal(w[:500], ROWS[:500])
    assert torch.equal(w[1500:], ROWS[1500:])
    for index in (1000, slice(None), (..., 0)):
        with pytest.raises(BrokenShard, match=r"fails its digest.*'w'.*Nothing was loaded"):
            w[index]
    trusting = open_checkpoint(tmp_path, map_files=maps, verify=False)["w"]
    assert int((trusting.tensor() != ROWS).sum()) == 1


@pytest.mark.parametrize("maps", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("damage", ["gone", "cut", "a fifo", "a folder"])
def test_a_file_that_is_not_what_was_saved_is_an_error(tmp_path, maps, damage):
    save(tmp_path, {"w": ROWS.clone()})
    file = shard(tmp_path)
    content = file.read_bytes()
    file.unlink()
    if damage == "cut":
        file.write_bytes(content[:-1])
    elif damage == "a fifo":
        os.mkfifo(file)
    elif damage == "a folder":
        file.mkdir()
    with pytest.raises(BrokenShard, match=re.escape(file.name)):
        open_checkpoint(tmp_path, map_files=maps)["w"][0]


def test_chunks_that_are_missing_are_an_error_only_for_whom_they_concern(tmp_path):
    save(tmp_path, {"w": buffer([2000, 600], {0: ROWS[:700]})})
    w = open_checkpoint(tmp_path)["w"]
    assert torch.equal(w[100:700], ROWS[100:700])
    with pytest.raises(BrokenMetadata, match="elements of 'w' are in no chunk"):
        w[699:702]


@pytest.mark.parametrize("maps", [True, False])
def test_many_threads_read_at_once(tmp_path, maps):
    save(tmp_path)
    opened = open_checkpoint(tmp_path, map_files=maps)
    rows = list(range(0, 2000, 50))
    with ThreadPoolExecutor(8) as pool:
        parts = pool.map(lambda at: opened["model.w"][at : at + 50], rows)
        for row, got in zip(rows, parts, strict=True):
            assert torch.equal(got, ROWS[row : row + 50])


def test_a_name_that_is_not_there_tells_what_is_near(opened):
    with pytest.raises(KeyError, match=r"has no 'model.ww'; near it are 'model.w'"):
        opened["model.ww"]
    assert opened.get("model.x") is None
    assert "model.ww" not in opened
    with pytest.raises(TypeError, match="load it first"):
        bool(opened["model.w"])


def test_code_is_run_only_for_whoever_asks_for_it(tmp_path):
    save(tmp_path, {"when": torch.distributed.ReduceOp.SUM}, allow_pickle=True)
    value = open_checkpoint(tmp_path)["when"]
    with pytest.raises(UnsafePickle, match="not run"):
        value.value()
    assert value.value(allow_pickle=True) == torch.distributed.ReduceOp.SUM


def test_what_a_checkpointer_has_saved_is_opened_by_what_find_latest_valid_returns(tmp_path):
    model = torch.nn.Linear(3, 2)
    with Checkpointer(tmp_path, {"model": model}, every=1) as ckpt:
        ckpt.after_step()
    opened = open_checkpoint(find_latest_valid(tmp_path))
    assert (opened.step, opened.world_size) == (1, 1)
    assert torch.equal(opened["model.weight"].tensor(), model.weight)


def test_a_root_and_other_places_are_told_from_a_checkpoint(tmp_path):
    with pytest.raises(BadLocation, match="found no whole checkpoint"):
        open_checkpoint(None)
    with pytest.raises(BrokenMetadata, match=r"there is no \.metadata"):
        open_checkpoint(tmp_path)
    for name in ("step_9", "step_10"):
        save(tmp_path / name, {"w": torch.ones(2)})
    with pytest.raises(BadLocation, match="2 folders of steps, such as 'step_"):
        open_checkpoint(tmp_path)
