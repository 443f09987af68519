"""Exported models are what safetensors reads; imported ones are checkpoints that load."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from self_described_kinds import buffer
from torch import nn

from dcp_checkfreq import (
    BadLocation,
    BrokenShard,
    CheckFreqWriter,
    StateMismatch,
    UnsafePickle,
    UnsupportedState,
    export_safetensors,
    export_torch_save,
    find_latest_valid,
    import_files,
    load_part,
    open_checkpoint,
)
from dcp_checkfreq.convert import to_safetensors
from dcp_checkfreq.testing import Fault, FaultyTier, MemoryTier

ROWS = torch.arange(60_000, dtype=torch.float32).reshape(100, 600)
KINDS = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32),
    *(torch.int64, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2),
]


def model():
    return {
        "embed.weight": ROWS.clone(),
        "head": buffer([100, 600], {0: ROWS[:30], 30: ROWS[30:]}),  # two shards
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        **{f"kind.{kind}": torch.arange(5).to(kind) for kind in KINDS},
    }


def save(folder, state=None, **options):
    state = state or {"model": model(), "optim": {"m": ROWS}, "step": 3}
    dcp.save(state, storage_writer=CheckFreqWriter(folder, **options))


def same(got, wanted):
    wanted = ROWS if hasattr(wanted, "blocks") else wanted
    return (
        got.dtype == wanted.dtype
        and got.shape == wanted.shape
        and got.contiguous().view(-1).view(torch.uint8).tolist()
        == wanted.contiguous().view(-1).view(torch.uint8).tolist()
    )


def all_of(folder):
    """Return what a loader of Hugging Face's layout finds."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    weights = json.loads(index.read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in weights.items()}


@pytest.mark.parametrize("max_file_bytes", [5_000_000_000, 250_000, 1])
@pytest.mark.parametrize(
    "block_bytes", [32 << 20, 7_000, pytest.param(1_500, marks=pytest.mark.slow)]
)
def test_what_is_exported_is_what_safetensors_reads(
    tmp_path, monkeypatch, max_file_bytes, block_bytes
):
    monkeypatch.setattr(to_safetensors, "_BLOCK_BYTES", block_bytes)
    save(tmp_path / "c")
    made = export_safetensors(
        tmp_path / "c", tmp_path / "hf", prefix="model.", max_file_bytes=max_file_bytes
    )
    found = all_of(tmp_path / "hf")
    assert set(found) == set(made.names) == set(model())
    assert all(same(found[name], tensor) for name, tensor in model().items())
    on_disk = {file.name: file.stat().st_size for file in (tmp_path / "hf").iterdir()}
    on_disk.pop("model.safetensors.index.json", None)
    assert sorted(on_disk) == sorted(made.files)
    assert sum(on_disk.values()) == made.size_bytes
    if max_file_bytes == 250_000:
        assert len(made.files) == 2
    with safe_open(tmp_path / "hf" / made.files[0], "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_names_dtypes_and_what_is_left_out_are_chosen(tmp_path, caplog):
    save(tmp_path / "c", {"model": {"a": torch.ones(3), "n": torch.arange(3), "x": "text"}})
    made = export_safetensors(
        tmp_path / "c",
        tmp_path / "one",
        prefix="model.",
        rename={"a": "b"},
        dtype=torch.bfloat16,
    )
    found = all_of(tmp_path / "one")
    assert {name: one.dtype for name, one in found.items()} == {
        "b": torch.bfloat16,
        "n": torch.int64,
    }
    assert made.left_out == ("model.x",)
    assert "not tensors, so not exported: model.x" in caplog.text
    export_safetensors(
        tmp_path / "c",
        tmp_path / "two",
        rename=lambda name: None if name.endswith(".n") else name.upper(),
    )
    assert set(all_of(tmp_path / "two")) == {"MODEL.A"}


@pytest.mark.parametrize(
    ("state", "options", "error", "text"),
    [
        ({"m": {"a": ROWS}}, {"prefix": "model."}, StateMismatch, "begins with 'model.'.*: m"),
        ({"a": ROWS, "b": ROWS}, {"rename": {"a": "b"}}, StateMismatch, "'a' and 'b' would both"),
        ({"deep.a": ROWS.to(torch.complex128)}, {}, UnsupportedState, "'deep.a'.*no such dtype"),
    ],
)
def test_what_cannot_be_exported_is_named_and_nothing_is_written(
    tmp_path, state, options, error, text
):
    save(tmp_path / "c", state)
    with pytest.raises(error, match=text):
        export_safetensors(tmp_path / "c", tmp_path / "hf", **options)
    assert not (tmp_path / "hf").exists()


def test_another_model_is_never_replaced_and_other_files_stay(tmp_path):
    save(tmp_path / "c")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    export_safetensors(tmp_path / "c", tmp_path / "hf", prefix="model.")
    assert (tmp_path / "hf" / "config.json").read_text() == "{}"
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()
    with pytest.raises(BadLocation, match="another model is there"):
        export_safetensors(tmp_path / "c", tmp_path / "hf", prefix="optim.", max_file_bytes=1)
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before


def test_damage_in_the_midst_leaves_no_index_and_no_half_written_file(tmp_path):
    save(tmp_path / "c", {"a": ROWS, "b": -ROWS})
    (shard,) = (tmp_path / "c").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[content.index((-ROWS)[50].numpy().tobytes())] ^= 1
    shard.write_bytes(content)
    with pytest.raises(BrokenShard, match="'b'"):
        export_safetensors(tmp_path / "c", tmp_path / "hf", max_file_bytes=1)
    assert [one.name for one in (tmp_path / "hf").iterdir()] == ["model-00001-of-00002.safetensors"]
    with pytest.raises(BadLocation, match="another model is there"):
        export_safetensors(tmp_path / "c", tmp_path / "hf", max_file_bytes=1)


def test_an_object_store_that_fails_leaves_no_index(tmp_path):
    save(tmp_path / "c", {"a": ROWS, "b": ROWS + 1})
    store = MemoryTier()
    failing = FaultyTier(store, [Fault(verb="write_shard", name="model-00002*")])
    with pytest.raises(OSError, match="injected"):
        export_safetensors(tmp_path / "c", failing, max_file_bytes=1)
    assert "model.safetensors.index.json" not in store.files()
    export_safetensors(tmp_path / "c", MemoryTier(), max_file_bytes=1)


MEASURED = """
import resource, sys, torch
from dcp_checkfreq import export_safetensors
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
torch.ones(1)
export_safetensors(sys.argv[1], sys.argv[2] + "/small", prefix="small")
before = peak()
export_safetensors(sys.argv[1], sys.argv[2] + "/large", prefix="large", dtype=torch.bfloat16)
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tensor(tmp_path):
    large = torch.zeros(160 << 20)  # 640 MiB
    save(tmp_path / "c", {"large": large, "small": torch.zeros(1 << 20)})
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURED, tmp_path / "c", tmp_path / "to"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 256 << 20
    assert (tmp_path / "to" / "large" / "model.safetensors").stat().st_size > 320 << 20


# --- from files ---


def test_a_folder_of_several_files_becomes_a_checkpoint_that_load_part_takes(tmp_path):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    save(tmp_path / "c", {"net": net.state_dict()})
    export_safetensors(tmp_path / "c", tmp_path / "hf", prefix="net.", max_file_bytes=40)
    import_files(tmp_path / "hf", tmp_path / "root" / "step_0")
    fresh = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    load_part(find_latest_valid(tmp_path / "root"), "model", into=fresh)
    for got, wanted in zip(fresh.parameters(), net.parameters(), strict=True):
        assert torch.equal(got, wanted)


def test_every_kind_comes_back_from_a_file(tmp_path):
    tensors = {f"k.{kind}": torch.arange(5).to(kind) for kind in KINDS}
    save_file(tensors, tmp_path / "x.safetensors")
    import_files(
        tmp_path / "x.safetensors", tmp_path / "c", part="m", rename={"k.torch.bool": None}
    )
    opened = open_checkpoint(tmp_path / "c")
    assert set(opened) == {f"m.{name}" for name in tensors} - {"m.k.torch.bool"}
    assert all(same(one.tensor(), tensors[key[2:]]) for key, one in opened.items())


def test_a_file_of_torch_save_becomes_a_checkpoint_and_one_again(tmp_path):
    torch.save({"a": ROWS, "deep": {"b": ROWS + 1}, "n": 5}, tmp_path / "x.pt")
    import_files(tmp_path / "x.pt", tmp_path / "c", part="")
    opened = open_checkpoint(tmp_path / "c")
    assert set(opened) == {"a", "deep.b", "n"}
    assert torch.equal(opened["deep.b"].tensor(), ROWS + 1)
    assert export_torch_save(tmp_path / "c", tmp_path / "y.pt", rename={"n": "m"}) == 3
    again = torch.load(tmp_path / "y.pt", weights_only=True)
    assert torch.equal(again["a"], ROWS)
    assert torch.equal(again["deep.b"], ROWS + 1)
    assert again["m"] == 5
    with pytest.raises(BadLocation, match="is there already"):
        export_torch_save(tmp_path / "c", tmp_path / "y.pt")
    with pytest.raises(StateMismatch, match="no key begins with 'q'"):
        export_torch_save(tmp_path / "c", tmp_path / "z.pt", prefix="q")
    assert sorted(os.listdir(tmp_path)) == ["c", "x.pt", "y.pt"]


def test_what_is_no_model_is_named_and_nothing_is_written(tmp_path):
    to = tmp_path / "to"
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    (tmp_path / "no.pt").write_bytes(b"no archive")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"x": contextlib.ExitStack}, tmp_path / "code.pt")
    for source, error, text in (
        ("nothing", BadLocation, "no such file"),
        ("empty", BadLocation, "neither"),
        ("cut.safetensors", BrokenShard, "cut.safetensors is damaged.*Nothing was loaded"),
        ("no.pt", BrokenShard, "not what torch.save writes"),
        ("list.pt", StateMismatch, "it holds a list"),
        ("code.pt", UnsafePickle, "code"),
    ):
        with pytest.raises(error, match=text):
            import_files(tmp_path / source, to)
        assert not to.exists()


@pytest.mark.parametrize("damage", ["a file is gone", "a tensor is gone", "no JSON", "twice"])
def test_a_folder_whose_index_and_files_differ_is_refused(tmp_path, damage):
    save(tmp_path / "c", {"a": ROWS, "b": ROWS})
    folder = tmp_path / "hf"
    export_safetensors(tmp_path / "c", folder, max_file_bytes=1)
    second, index = (
        folder / "model-00002-of-00002.safetensors",
        folder / "model.safetensors.index.json",
    )
    error, text = BrokenShard, second.name
    if damage == "a file is gone":
        second.unlink()
    elif damage == "a tensor is gone":
        save_file({"c": ROWS}, second)
    elif damage == "no JSON":
        index.write_text("[")
        text = "index.json is damaged"
    else:
        save_file({"a": ROWS, "b": ROWS + 1}, second)
        error = StateMismatch
    with pytest.raises(error, match=text):
        import_files(folder, tmp_path / "to")
    assert not (tmp_path / "to").exists()
