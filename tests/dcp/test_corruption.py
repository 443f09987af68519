"""Case 02: damaged files, and what may be loaded of them."""

import os
import re
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from behaviour_tools import blank, cause_of, fails_with, save
from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq import (
    BrokenMetadata,
    BrokenShard,
    CheckFreqLoadPlanner,
    CheckFreqReader,
    CheckFreqWriter,
    Checkpointer,
    NoValidCheckpoint,
    find_latest_valid,
)
from dcp_checkfreq.format import metadata as metadata_format

KEYS = [f"w{n}" for n in range(6)]


def full(value):
    return {key: torch.full((20000,), value + n) for n, key in enumerate(KEYS)}


def the_shard(folder):
    (shard,) = folder.glob("*.distcp")
    return shard


def truncated(shard):
    os.truncate(shard, int(shard.stat().st_size * 0.6))


def zero_tail(shard):
    content = bytearray(shard.read_bytes())
    keep = int(len(content) * 0.55)
    content[keep:] = bytes(len(content) - keep)
    shard.write_bytes(content)


def zero_page(shard):
    content = bytearray(shard.read_bytes())
    content[40960 : 40960 + 4096] = bytes(4096)
    shard.write_bytes(content)


def flipped_bit(shard):
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def deleted(shard):
    shard.unlink()


def emptied(shard):
    os.truncate(shard, 0)


def longer(shard):
    with open(shard, "ab") as file:
        file.write(b"x")


SEEN_BY_SIZE = {"truncated": truncated, "deleted": deleted, "empty": emptied, "longer": longer}
SEEN_BY_DIGEST = {"zero tail": zero_tail, "zero page": zero_page, "flipped bit": flipped_bit}
ALL = SEEN_BY_SIZE | SEEN_BY_DIGEST
both_planners = pytest.mark.parametrize(
    "planner", [lambda: None, CheckFreqLoadPlanner], ids=["default", "ours"]
)


@pytest.mark.slow
@both_planners
@pytest.mark.parametrize("damage", ALL.values(), ids=ALL.keys())
def test_a_damaged_shard_never_gives_wrong_values(tmp_path, damage, planner):
    save(full(1.0), tmp_path)
    damage(the_shard(tmp_path))
    target = full(-100.0)
    with fails_with(BrokenShard, "may hold the checkpoint's values") as caught:
        dcp.load(target, storage_reader=CheckFreqReader(tmp_path), planner=planner())
    assert str(tmp_path) in str(cause_of(caught.value))
    for key in KEYS:
        allowed = {full(1.0)[key][0].item(), full(-100.0)[key][0].item()}
        assert set(target[key].tolist()) <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("damage", SEEN_BY_SIZE.values(), ids=SEEN_BY_SIZE.keys())
def test_what_the_size_shows_is_noticed_before_any_target_is_touched(tmp_path, damage):
    save(full(1.0), tmp_path)
    damage(the_shard(tmp_path))
    target = full(-100.0)
    with fails_with(BrokenShard, "distcp"):
        dcp.load(target, storage_reader=CheckFreqReader(tmp_path))
    assert all(torch.equal(target[key], full(-100.0)[key]) for key in KEYS)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("damage", SEEN_BY_DIGEST.values(), ids=SEEN_BY_DIGEST.keys())
def test_the_block_that_fails_is_named_by_file_and_place(tmp_path, damage, threads):
    save(full(1.0), tmp_path)
    damage(the_shard(tmp_path))
    with fails_with(BrokenShard, "fails its digest in the block at byte"):
        dcp.load(full(0.0), storage_reader=CheckFreqReader(tmp_path, threads=threads))


@pytest.mark.parametrize("damage", ALL.values(), ids=ALL.keys())
def test_the_scan_falls_back_to_the_older_checkpoint_and_says_why(tmp_path, damage):
    save(full(1.0), tmp_path / "step_1")
    save(full(2.0), tmp_path / "step_2")
    damage(the_shard(tmp_path / "step_2"))
    found = find_latest_valid(tmp_path, depth="digest")
    assert found.step == 1
    (rejected,) = found.rejected
    assert (rejected.name, rejected.step) == ("step_2", 2)
    assert "distcp" in rejected.reason


@pytest.mark.parametrize("damage", SEEN_BY_SIZE.values(), ids=SEEN_BY_SIZE.keys())
def test_sizes_alone_show_cut_and_lost_files(tmp_path, damage):
    save(full(1.0), tmp_path / "step_1")
    save(full(2.0), tmp_path / "step_2")
    damage(the_shard(tmp_path / "step_2"))
    assert find_latest_valid(tmp_path).step == 1


@pytest.mark.parametrize("damage", ALL.values(), ids=ALL.keys())
def test_checkpointer_restores_the_older_checkpoint_bit_for_bit(tmp_path, damage):
    state = {"w": torch.zeros(20000)}
    with Checkpointer(tmp_path, state, every=1) as ckpt:
        ckpt.restore()
        for value in (1.0, 2.0):
            state["w"].fill_(value)
            ckpt.after_step()
    damage(the_shard(tmp_path / "step_00000002"))
    state = {"w": torch.zeros(20000)}
    with Checkpointer(tmp_path, state, every=1) as ckpt:
        restored = ckpt.restore()
    assert restored.step == 1
    assert any("step_00000002" in text for text in restored.passed_over)
    assert torch.equal(state["w"], torch.full((20000,), 1.0))


def test_verification_can_be_switched_off(tmp_path):
    save(full(1.0), tmp_path)
    zero_page(the_shard(tmp_path))
    target = full(-1.0)
    dcp.load(target, storage_reader=CheckFreqReader(tmp_path, verify=False))
    assert not torch.equal(target["w0"], full(1.0)["w0"])


@pytest.mark.parametrize("keep_bytes", [0, 1, 300, -1, -32, -33])
def test_a_cut_metadata_file_is_an_error_and_not_a_checkpoint(tmp_path, keep_bytes):
    save(full(1.0), tmp_path / "step_1")
    save(full(2.0), tmp_path / "step_2")
    record = tmp_path / "step_2" / ".metadata"
    size = record.stat().st_size
    os.truncate(record, keep_bytes if keep_bytes >= 0 else size + keep_bytes)
    target = full(-1.0)
    with pytest.raises((BrokenMetadata, CheckpointException)) as caught:
        dcp.load(target, storage_reader=CheckFreqReader(tmp_path / "step_2"))
    assert ".metadata" in str(caught.value)
    assert torch.equal(target["w0"], full(-1.0)["w0"])
    assert find_latest_valid(tmp_path).step == 1


@pytest.mark.parametrize("stock", [False, True])
def test_a_metadata_file_that_is_cut_anywhere_says_so_or_that_it_is_no_metadata(tmp_path, stock):
    writer = dcp.FileSystemWriter(tmp_path) if stock else CheckFreqWriter(tmp_path)
    dcp.save({"w": torch.ones(4), "n": "x" * 50}, storage_writer=writer)
    content = (tmp_path / ".metadata").read_bytes()
    said = []
    for size in range(0, len(content), 7):
        with pytest.raises(BrokenMetadata) as caught:
            metadata_format.load(content[:size], "here")
        said.append(f"cut short at {size} bytes" in str(caught.value))
    assert sum(said) > 0.95 * len(said)


def test_a_damaged_metadata_file_tells_what_was_expected_and_what_is_there(tmp_path):
    save({"w": torch.ones(4)}, tmp_path)
    content = bytearray((tmp_path / ".metadata").read_bytes())
    body = len(content) - metadata_format.TRAILER_BYTES
    expected = xxhash.xxh3_128_hexdigest(bytes(content[:body]))
    content[body // 3] ^= 4
    found = xxhash.xxh3_128_hexdigest(bytes(content[:body]))
    with pytest.raises(BrokenMetadata, match=f"does not match its digest.*{expected}.*{found}"):
        metadata_format.load(bytes(content), "here")
    del content[5:9]
    with pytest.raises(BrokenMetadata, match=f"{body - 4} bytes, it was saved with {body}"):
        metadata_format.load(bytes(content), "here")


def test_every_flipped_byte_of_the_metadata_file_is_noticed(tmp_path):
    save({"w": torch.ones(4), "n": 1}, tmp_path)
    record = tmp_path / ".metadata"
    good = record.read_bytes()
    for at in range(0, len(good), 7):
        record.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
        with pytest.raises(BrokenMetadata):
            CheckFreqReader(tmp_path).read_metadata()


def test_dcp_load_of_an_empty_folder_names_the_missing_metadata(tmp_path):
    with pytest.raises(CheckpointException, match=r"there is no \.metadata"):
        dcp.load({"w": torch.ones(1)}, storage_reader=CheckFreqReader(tmp_path / "nothing"))


def test_a_damaged_byte_item_is_not_unpickled(tmp_path):
    save({"note": "x" * 5000}, tmp_path)
    flipped_bit(the_shard(tmp_path))
    with fails_with(BrokenShard):
        dcp.load({"note": None}, storage_reader=CheckFreqReader(tmp_path))


def test_a_cut_stock_checkpoint_is_rejected_by_the_scan(tmp_path):
    for step in (1, 2):
        dcp.save(full(float(step)), storage_writer=dcp.FileSystemWriter(tmp_path / f"step_{step}"))
    truncated(the_shard(tmp_path / "step_2"))
    found = find_latest_valid(tmp_path)
    assert found.step == 1
    assert "cut short" in found.rejected[0].reason
    with fails_with(BrokenShard):
        dcp.load(full(0.0), storage_reader=CheckFreqReader(tmp_path / "step_2"))


def test_a_shard_of_another_checkpoint_under_the_right_name_is_noticed(tmp_path):
    save(full(1.0), tmp_path / "step_1")
    save(full(2.0), tmp_path / "step_2")
    shutil.copyfile(the_shard(tmp_path / "step_2"), the_shard(tmp_path / "step_1"))
    with fails_with(BrokenShard, "fails its digest"):
        dcp.load(full(0.0), storage_reader=CheckFreqReader(tmp_path / "step_1"))


# --- what an error tells: key, file, block, bytes, expected and found ---


def two_shards(tmp_path):
    """Save ``first`` and ``second``, of 3 and 40 blocks; return the path and the items' places."""
    state = {"first": torch.arange(10_000.0), "second": torch.arange(160_000.0)}
    save(state, tmp_path)
    content = (tmp_path / ".metadata").read_bytes()
    metadata, record = metadata_format.load(content, str(tmp_path))
    places = {
        index.fqn: (info.relative_path, record.columns.payload_offset[number])
        for number, (index, info) in enumerate(metadata.storage_data.items())
    }
    return state, places


@pytest.mark.parametrize(("key", "block", "count"), [("first", 2, 3), ("second", 17, 40)])
def test_a_damaged_block_is_told_by_key_file_block_bytes_and_both_digests(
    tmp_path, key, block, count
):
    folder = tmp_path / "step_1"
    state, places = two_shards(folder)
    file, offset = places[key]
    size = 16 << 10
    start = offset + (block - 1) * size
    stop = min(start + size, offset + state[key].numel() * 4)
    with open(folder / file, "r+b") as shard:
        shard.seek(start)
        expected = xxhash.xxh3_64_hexdigest(shard.read(stop - start))
        shard.seek(start + 5)
        shard.write(b"\xff\xfe\xfd")
        shard.seek(start)
        found = xxhash.xxh3_64_hexdigest(shard.read(stop - start))
    wanted = [
        file,
        repr(key),
        f"block {block} of {count}",
        f"bytes [{start}, {stop})",
        expected,
        found,
        str(folder),
    ]
    with pytest.raises(CheckpointException) as caught:
        dcp.load(blank(state), storage_reader=CheckFreqReader(folder))
    with pytest.raises(NoValidCheckpoint) as refused:
        Checkpointer(tmp_path, {"a": 1}, every=1).restore(depth="digest")
    for text in wanted:
        assert text in str(caught.value)
    for text in wanted[:-1]:
        assert text in str(refused.value)


@pytest.mark.parametrize("stock", [False, True])
def test_a_cut_file_is_told_by_key_and_both_sizes(tmp_path, stock):
    root = tmp_path / "step_1"
    state = {"first": torch.arange(10_000.0), "second": torch.arange(20_000.0)}
    writer = dcp.FileSystemWriter(root) if stock else CheckFreqWriter(root)
    dcp.save(state, storage_writer=writer)
    (shard,) = root.glob("*.distcp")
    size = shard.stat().st_size
    os.truncate(shard, size - 30_000)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(blank(state), storage_reader=CheckFreqReader(root))
    with pytest.raises(NoValidCheckpoint) as refused:
        Checkpointer(tmp_path, {"a": 1}, every=1).restore()
    for error in (caught.value, refused.value):
        assert shard.name in str(error)
        assert f"{size - 30_000} bytes" in str(error)
        assert "'second'" in str(error)
        if not stock:
            assert f"saved with {size}" in str(error)


@pytest.mark.slow
def test_a_missing_file_is_told_by_the_keys_that_it_holds(tmp_path):
    state = {f"layer.{n}": torch.ones(9) for n in range(7)}
    save(state, tmp_path / "step_1")
    (shard,) = (tmp_path / "step_1").glob("*.distcp")
    shard.unlink()
    text = f"{shard.name} is missing, it holds 'layer.0', 'layer.1', 'layer.2' and 4 more"
    with fails_with(BrokenShard, text):
        dcp.load(blank(state), storage_reader=CheckFreqReader(tmp_path / "step_1"))
    with pytest.raises(NoValidCheckpoint, match=re.escape(text)):
        Checkpointer(tmp_path, {"a": 1}, every=1).restore()


# --- plain dcp.load: our type, although DCP swallows what read_metadata raises ---


def damaged_records(tmp_path):
    save(full(1.0), tmp_path / "ok")
    content = (tmp_path / "ok" / ".metadata").read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for name, text in {"cut": content[:-5], "empty": b"", "flipped": bytes(flipped)}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").write_bytes(text)
    (tmp_path / "none").mkdir()
    return ["cut", "empty", "flipped", "none"]


@pytest.mark.parametrize("planner", [None, "stock", "ours"])
def test_plain_load_of_a_damaged_record_raises_our_type_and_touches_nothing(tmp_path, planner):
    planners = {"stock": dcp.DefaultLoadPlanner, "ours": CheckFreqLoadPlanner}
    reader = CheckFreqReader(tmp_path / "ok")
    for name in damaged_records(tmp_path):
        target = full(-100.0)
        with pytest.raises(CheckpointException) as caught:
            dcp.load(
                target,
                storage_reader=reader,
                checkpoint_id=tmp_path / name,
                planner=planners[planner]() if planner else None,
            )
        cause = cause_of(caught.value)
        assert type(cause) is BrokenMetadata
        assert str(tmp_path / name) in str(cause)
        assert str(cause) in str(caught.value)
        assert all(torch.equal(target[key], full(-100.0)[key]) for key in KEYS)
    target = full(-100.0)
    dcp.load(target, storage_reader=reader, checkpoint_id=tmp_path / "ok")
    assert all(torch.equal(target[key], full(1.0)[key]) for key in KEYS)


def test_whoever_reads_metadata_itself_gets_the_error_at_once(tmp_path):
    for name in damaged_records(tmp_path):
        reader = CheckFreqReader(tmp_path / name)
        for _ in range(2):
            with pytest.raises(BrokenMetadata):
                reader.read_metadata()
        with pytest.raises(BrokenMetadata):
            CheckFreqReader(tmp_path / name).read_metadata(rank=0)


def test_metadata_of_a_rank_that_is_damaged_is_named_itself(tmp_path):
    (tmp_path / "__0.metadata").write_bytes(b"not a record")
    with fails_with(BrokenMetadata) as caught:
        dcp.load(full(0.0), storage_reader=CheckFreqReader(tmp_path))
    assert "there is no .metadata" not in str(cause_of(caught.value))


def test_a_reader_and_a_writer_tell_the_ids_of_load_and_save_as_stock_ones_do(tmp_path):
    writer = CheckFreqWriter(tmp_path)
    first = writer.save_id
    assert writer.storage_meta().save_id == first
    writer.reset(tmp_path)
    assert writer.save_id != first
    dcp.save(full(1.0), storage_writer=writer)
    reader = CheckFreqReader(tmp_path)
    loading = reader.load_id
    metadata = reader.read_metadata()
    assert metadata.storage_meta.load_id == loading
    reader.reset()
    assert reader.load_id != loading
