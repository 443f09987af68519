"""Saves and loads through DCP on a real S3 server: what is sent, what is left, who can read it."""

import logging
import os
import pickle
import re
import tracemalloc

import pytest
import torch
import torch.distributed.checkpoint as dcp
from servers import BUCKET, KEY, SECRET, Break
from stock_fsspec import FsspecReader

from dcp_checkfreq import (
    CheckFreqReader,
    CheckFreqWriter,
    Checkpointer,
    LeftBehind,
    find_latest_valid,
)
from dcp_checkfreq.storage.object_store.fsspec_files import FsspecFiles
from dcp_checkfreq.storage.object_store.options import Options
from dcp_checkfreq.storage.open import open_tier

pytestmark = pytest.mark.slow

MIB = 1 << 20


def state_of(mib=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    large = torch.randn(mib * MIB // 8, generator=generator)
    return {
        "large": large,
        "more": torch.randn(mib * MIB // 8, generator=generator),
        "rows": torch.randn(100, 7, generator=generator).bfloat16(),
        **{f"small{n}": torch.randn(33, generator=generator) for n in range(50)},
        "step": 7,
    }


def empty_of(state):
    return {k: torch.zeros_like(v) if torch.is_tensor(v) else 0 for k, v in state.items()}


def same(one, other):
    return all(
        torch.equal(one[k], other[k]) if torch.is_tensor(one[k]) else one[k] == other[k]
        for k in one
    )


def test_a_save_is_parts_and_one_conditional_put_and_nothing_else(
    proxy, root, stored, uploads, monkeypatch
):
    monkeypatch.setattr(os, "sync", lambda: pytest.fail("the whole machine was synced"))
    state = state_of()
    dcp.save(state, storage_writer=CheckFreqWriter(f"{root}/step_1", storage_options=proxy.options))
    files = stored(f"{root}/step_1")
    shards = [name for name in files if name != ".metadata"]
    assert uploads(root) == []
    assert proxy.count("POST", "?uploads") == len(shards) > 0
    parts = [r for r in proxy.requests if r.method == "PUT" and "partNumber" in r.path]
    reserved = [r for r in proxy.requests if ".tmp" in r.path]
    assert len(proxy.requests) - len(reserved) == 4 + sum(3 for _ in shards) + len(parts)
    assert all(part.size_bytes >= 5 * MIB for part in parts if "partNumber=1&" in part.path)
    assert sum(part.size_bytes for part in parts) == sum(files[shard] for shard in shards)
    commits = [r for r in proxy.requests if r.method == "PUT" and r.path.endswith(".metadata")]
    assert [commit.headers.get("if-none-match") for commit in commits] == ["*"]
    assert proxy.requests.index(commits[0]) > max(map(proxy.requests.index, parts))
    assert not any("x-amz-copy-source" in request.headers for request in proxy.requests)
    # The reservation is made before the first part, and changed once, right before the commit; all
    # that is ever deleted is it, and before that what conditional writes were tried out on.
    puts = [r for r in reserved if r.method == "PUT"][-2:]
    assert proxy.requests.index(puts[0]) < min(map(proxy.requests.index, parts))
    assert [("if-match" in put.headers) for put in puts] == [False, True]
    assert proxy.requests.index(puts[1]) == proxy.requests.index(commits[0]) - 1
    deleted = [r.path for r in proxy.requests if r.method == "DELETE"]
    assert all(".metadata" in path and path.endswith(".tmp") for path in deleted), deleted
    assert len(deleted) <= 2
    assert proxy.requests[-1].method == "DELETE"


def test_a_small_shard_is_one_put(proxy, root):
    state = {"w": torch.ones(1000)}
    dcp.save(state, storage_writer=CheckFreqWriter(f"{root}/step_1", storage_options=proxy.options))
    shards = [r for r in proxy.requests if r.method == "PUT" and r.path.endswith(".distcp")]
    assert len(shards) == 1
    assert proxy.count("POST") == 0


@pytest.mark.parametrize("move_with", ["auto", "s3fs"])
def test_what_was_saved_is_loaded_by_us_and_by_stock(weed, root, move_with, monkeypatch):
    from dcp_checkfreq.storage.object_store.s3_files import S3Files

    monkeypatch.setattr(S3Files, "move_with", move_with)
    state = state_of()
    dcp.save(state, storage_writer=CheckFreqWriter(f"{root}/step_1", storage_options=weed.options))
    target = empty_of(state)
    reader = CheckFreqReader(f"{root}/step_1", storage_options=weed.options)
    dcp.load(target, storage_reader=reader)
    assert same(target, state)
    assert reader.bytes_needed <= reader.bytes_read <= 1.05 * reader.bytes_needed
    target = empty_of(state)
    dcp.load(target, storage_reader=FsspecReader(f"{root}/step_1", **weed.options))
    assert same(target, state)


def test_conditional_writes_are_tried_out_once_for_all_saves_of_a_process(proxy, root):
    for step in (1, 2, 3):
        writer = CheckFreqWriter(f"{root}/step_{step}", storage_options=proxy.options)
        dcp.save(state_of(1), storage_writer=writer)
    tried = [r for r in proxy.requests if r.method == "PUT" and r.path.endswith(".tmp")]
    reserved = tried[4:]
    assert [r.headers.get("if-none-match") for r in tried[:4]] == [None, "*", None, None]
    assert ["if-match" in r.headers for r in tried[:4]] == [False, False, False, True]
    assert ["if-match" in r.headers for r in reserved] == [False, True] * 3
    commits = [r for r in proxy.requests if r.method == "PUT" and r.path.endswith("/.metadata")]
    assert [r.headers.get("if-none-match") for r in commits] == ["*"] * 3
    assert sum("step_3" in r.path for r in proxy.requests) == 9, "docs/object-storage.md says so"


@pytest.mark.parametrize("through", ["s3", "fsspec alone"])
def test_what_another_client_did_meanwhile_is_seen_at_once(weed, root, boto, through):
    tier = open_tier(root, storage_options=weed.options)
    if through == "fsspec alone":
        tier._files = FsspecFiles("s3", Options(weed.options))
    step_1 = tier.child("step_1")
    step_1.create(".metadata", b"short", scratch="s.tmp")
    assert [entry.name for entry in tier.list()] == ["step_1"]
    assert [(entry.name, entry.size_bytes) for entry in step_1.list()] == [(".metadata", 5)]
    assert step_1.size(".metadata") == 5

    key = root.removeprefix(f"s3://{BUCKET}/")
    source = {"Bucket": BUCKET, "Key": f"{key}/step_1/.metadata"}
    boto.copy_object(Bucket=BUCKET, Key=f"{key}/step_2/.metadata", CopySource=source)
    assert sorted(entry.name for entry in tier.list()) == ["step_1", "step_2"]
    boto.put_object(Bucket=BUCKET, Key=f"{key}/step_1/.metadata", Body=b"longer than it was")
    assert step_1.size(".metadata") == 18
    assert [(entry.name, entry.size_bytes) for entry in step_1.list()] == [(".metadata", 18)]
    assert step_1.read(".metadata") == b"longer than it was"
    boto.delete_object(Bucket=BUCKET, Key=f"{key}/step_1/.metadata")
    with pytest.raises(FileNotFoundError):
        step_1.read(".metadata")


@pytest.mark.parametrize("move_with", ["auto", "s3fs"])
def test_an_upload_holds_no_more_parts_than_it_says(proxy, root, move_with, monkeypatch):
    from dcp_checkfreq.storage.object_store.s3_files import S3Files

    monkeypatch.setattr(S3Files, "move_with", move_with)
    # slower than the pieces come, so that as many wait as may
    proxy.rule = lambda r: Break(delay_s=0.1) if "partNumber" in r.path else None
    tier = open_tier(f"{root}/step_1", storage_options=proxy.options)
    tier.create("warm", b"", scratch="warm.tmp")
    tracemalloc.start()
    try:
        tier.write_shard("a", (memoryview(bytes(MIB)) for _ in range(160)), 160 * MIB)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tier.size("a") == 160 * MIB
    # Parts of 16 MiB: six under way and one being filled. s3fs has three, each of them twice.
    assert 3 * 16 * MIB < peak_bytes < (7 if move_with == "auto" else 8) * 16 * MIB + 4 * MIB


def test_a_copy_on_another_storage_is_the_same_checkpoint(weed, root, boto, tmp_path):
    state = state_of(1)
    dcp.save(state, storage_writer=CheckFreqWriter(f"{root}/step_1", storage_options=weed.options))
    (tmp_path / "step_1").mkdir()
    prefix = f"{root}/step_1/".removeprefix(f"s3://{BUCKET}/")
    for item in boto.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]:
        path = tmp_path / "step_1" / item["Key"].rpartition("/")[2]
        boto.download_file(BUCKET, item["Key"], str(path))
        os.utime(path, (0, 0))
    found = find_latest_valid(tmp_path, depth="digest")
    target = empty_of(state)
    dcp.load(target, storage_reader=CheckFreqReader(found))
    assert same(target, state)


def test_the_newest_whole_step_is_found_and_a_cut_one_passed_over(weed, root, boto):
    for step in (9, 10):
        writer = CheckFreqWriter(f"{root}/step_{step}", storage_options=weed.options)
        dcp.save(state_of(1), storage_writer=writer)
    find = lambda **more: find_latest_valid(root, storage_options=weed.options, **more)  # noqa: E731
    assert find().step == 10
    assert find().path == f"{root}/step_10"
    prefix = f"{root}/step_10/__0_0".removeprefix(f"s3://{BUCKET}/")
    shard = boto.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"][0]["Key"]
    boto.put_object(Bucket=BUCKET, Key=shard, Body=b"cut short")  # another client, any time
    found = find(depth="digest")
    assert found.step == 9
    assert [rejected.step for rejected in found.rejected] == [10]


def test_a_checkpointer_saves_restores_keeps_two_and_leaves_no_uploads(weed, root, stored, uploads):
    state = {"w": torch.zeros(1000)}
    with Checkpointer(root, state, every=1, storage_options=weed.options) as ckpt:
        ckpt.restore()
        for step in range(1, 5):
            state["w"].fill_(step)
            ckpt.after_step()
        ckpt.wait()
    steps = {name.partition("/")[0] for name in stored(root) if name.startswith("step")}
    assert steps == {"step_00000003", "step_00000004"}
    assert uploads(root) == []
    fresh = {"w": torch.zeros(1000)}
    with Checkpointer(root, fresh, every=1, storage_options=weed.options) as ckpt:
        assert ckpt.restore().step == 4
    assert fresh["w"].eq(4).all()


def test_a_forgotten_run_hears_that_another_one_has_gone_back_behind_it(weed, root, stored):
    options = {"every": 1, "on_error": "raise", "storage_options": weed.options}
    with Checkpointer(root, {"w": torch.zeros(9)}, keep_last=3, **options) as old:
        old.restore()
        for _ in range(3):
            old.after_step()
        old.wait()
        with Checkpointer(root, {"w": torch.zeros(9)}, keep_last=3, **options) as new:
            new.restore(1)
            new.after_step()  # replaces step 2: folders of object stores have no times that tell
            new.wait()
        before = {name: size for name, size in stored(root).items() if name.startswith("step")}
        old.after_step()
        with pytest.raises(LeftBehind, match="went on from step 1"):
            old.wait()
        after = {name: size for name, size in stored(root).items() if name.startswith("step")}
        assert after == before


def test_a_second_writer_of_a_step_is_refused_and_overwrite_replaces_it(weed, root, stored):
    def save(seed, **more):
        writer = CheckFreqWriter(f"{root}/step_1", storage_options=weed.options, **more)
        dcp.save(state_of(1, seed), storage_writer=writer)

    save(1)
    before = stored(root)
    with pytest.raises(BaseException, match="Checkpoint already exists"):
        save(2)
    assert stored(root) == before
    save(3, overwrite=True)
    assert len(stored(root)) == len(before)
    target = empty_of(state_of(1))
    reader = CheckFreqReader(f"{root}/step_1", storage_options=weed.options)
    dcp.load(target, storage_reader=reader)
    assert same(target, state_of(1, 3))


def test_options_that_obstore_lacks_are_honoured_by_s3fs_and_the_log_says_so(weed, root, caplog):
    options = {**weed.options, "config_kwargs": {"s3": {"addressing_style": "path"}}}
    with caplog.at_level(logging.INFO, "dcp_checkfreq"):
        writer = CheckFreqWriter(f"{root}/step_1", storage_options=options)
        dcp.save(state_of(), storage_writer=writer)
        target = empty_of(state_of())
        reader = CheckFreqReader(f"{root}/step_1", storage_options=options)
        dcp.load(target, storage_reader=reader)
    assert same(target, state_of())
    said = [record.getMessage() for record in caplog.records if "s3fs moves" in record.getMessage()]
    assert said == ["s3fs moves the bytes, not obstore: an option has no counterpart there"]


def test_a_reused_writer_keeps_its_options_for_another_step(weed, root, stored):
    writer = CheckFreqWriter(f"{root}/step_1", storage_options=weed.options)
    dcp.save(state_of(1), storage_writer=writer)
    dcp.save(state_of(1), storage_writer=writer, checkpoint_id=f"{root}/step_2")
    assert {name.partition("/")[0] for name in stored(root)} == {"step_1", "step_2"}


def test_secrets_are_not_in_pickles_reprs_logs_or_files(weed, root, boto, caplog):
    caplog.set_level(logging.DEBUG, "dcp_checkfreq")
    secret = re.compile(f"{KEY}|{SECRET}")
    writer = CheckFreqWriter(f"{root}/step_1", storage_options=weed.options)
    dcp.save({"w": torch.ones(9)}, storage_writer=writer)
    reader = CheckFreqReader(f"{root}/step_1", storage_options=weed.options)
    tier = open_tier(root, storage_options=weed.options)
    wrong = open_tier(root, storage_options={**weed.options, "secret": "not-" + SECRET})
    with pytest.raises(PermissionError) as caught:
        wrong.list()
    shown = [repr(writer), repr(reader), repr(tier), repr(tier._files), str(caught.value)]
    shown += [pickle.dumps(thing).decode("latin-1") for thing in (writer, reader, tier)]
    shown += [record.getMessage() for record in caplog.records]
    assert not any(secret.search(text) for text in shown)
    prefix = root.removeprefix(f"s3://{BUCKET}/")
    for item in boto.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]:
        body = boto.get_object(Bucket=BUCKET, Key=item["Key"])["Body"].read()
        assert not secret.search(body.decode("latin-1"))
    # in the same process, nothing is missing
    assert [entry.name for entry in pickle.loads(pickle.dumps(tier)).list()] == ["step_1"]


def test_only_the_rows_that_are_wanted_are_read(proxy, root):
    state = {"w": torch.randn(4096, 1024)}  # 16 MiB
    dcp.save(state, storage_writer=CheckFreqWriter(f"{root}/step_1", storage_options=proxy.options))
    proxy.reset()
    tier = open_tier(f"{root}/step_1", storage_options=proxy.options)
    shard = next(e.name for e in tier.list() if e.name.endswith(".distcp"))
    got = bytearray(100_000)
    reader = tier.open(shard)
    reader.read_into(5 * MIB, memoryview(got))
    assert proxy.received_bytes < 110_000
