"""Tiers in other processes: forked, spawned, DataLoader workers, DCP's saving process."""

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from servers import BUCKET, KEY, SECRET, Break
from torch.utils.data import DataLoader, Dataset

from dcp_checkfreq import Checkpointer
from dcp_checkfreq.recovery.clean import clean_root
from dcp_checkfreq.runtime.clock import SystemClock
from dcp_checkfreq.storage.open import open_tier
from dcp_checkfreq.testing import ManualClock

pytestmark = [
    pytest.mark.slow,
    # the very thing that is tested: Python warns of every fork of a process with threads
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

DATA = bytes(range(256)) * (80_000)  # 20 MiB: in parts


def use(tier, name):
    """Write, read back, list and create; return what went wrong, or None."""
    try:
        tier.write_shard(name, [memoryview(DATA)], len(DATA))
        got = bytearray(len(DATA))
        tier.open(name).read_into(0, memoryview(got))
        assert got == DATA
        tier.create(name + " done", b"x", scratch=name + " scratch")
        assert {name, name + " done"} <= {entry.name for entry in tier.list()}
    except Exception as error:  # noqa: BLE001 - crosses to the parent as text
        return repr(error)
    return None


def work(tier, name, answers):
    answers.put(use(tier, name))


def in_child(method, tier, name):
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    child = context.Process(target=work, args=(tier, name, answers))
    child.start()
    try:
        return answers.get(timeout=90)
    finally:
        child.join(10)
        if child.is_alive():
            child.kill()


@pytest.fixture
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


def test_a_forked_child_goes_on_with_a_tier_that_its_parent_has_used(weed, root):
    tier = open_tier(root, storage_options=weed.options)
    assert use(tier, "parent") is None
    assert in_child("fork", tier, "child") is None
    assert use(tier, "parent again") is None


def test_a_forked_child_of_a_parent_that_used_nothing_moves_bytes_with_obstore(weed, root):
    code = """
import os, sys
from dcp_checkfreq.storage.object_store import obstore_transfer
from dcp_checkfreq.storage.open import open_tier
tier = open_tier(sys.argv[1], storage_options={"endpoint_url": sys.argv[2]})
child = os.fork()
if not child:
    tier.write_shard("a", [memoryview(b"x")], 1)
    os._exit(0 if obstore_transfer._started_in == os.getpid() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    environment = os.environ | {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    command = [sys.executable, "-c", code, root, weed.endpoint]
    subprocess.run(command, env=environment, check=True, timeout=60)


def test_a_spawned_child_finds_credentials_in_its_environment(weed, root, credentials):
    tier = open_tier(root, storage_options={"endpoint_url": weed.endpoint})
    assert use(tier, "parent") is None
    assert in_child("spawn", tier, "child") is None


def test_a_spawned_child_without_credentials_is_told_where_they_went(weed, root, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    tier = open_tier(root, storage_options=weed.options)
    assert SECRET.encode() not in pickle.dumps(tier)
    problem = in_child("spawn", tier, "child")
    assert "without the keys in storage_options" in problem
    assert SECRET not in problem


class Shards(Dataset):
    """Reads ranges of one object, as a data set that lies in a bucket does."""

    def __init__(self, tier):
        self.tier = tier
        self.reader = tier.open("data")

    def __len__(self):
        return 40

    def __getitem__(self, index):
        got = bytearray(1000)
        self.reader.read_into(index * 1000, memoryview(got))
        return torch.frombuffer(got, dtype=torch.uint8)


def test_loader_workers_read_through_a_reader_that_their_parent_has_opened(weed, root):
    tier = open_tier(root, storage_options=weed.options)
    tier.write_shard("data", [memoryview(DATA)], len(DATA))
    data = Shards(tier)
    assert bytes(data[0].numpy()) == DATA[:1000]
    for _ in range(2):
        loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
        read = b"".join(bytes(batch.numpy()) for batch in loader)
        assert read == DATA[:40_000]


def test_the_saving_process_of_dcp_writes_to_s3(weed, root):
    environment = os.environ | {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    script = Path(__file__).with_name("process_save.py")
    done = subprocess.run(
        [sys.executable, str(script), root, weed.endpoint],
        env=environment, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "both steps are right" in done.stdout


def test_uploads_of_a_killed_run_are_aborted_at_the_next_restore(proxy, root, weed, uploads):
    code = """
import sys, torch, torch.distributed.checkpoint as dcp
from dcp_checkfreq import CheckFreqWriter
options = {"endpoint_url": sys.argv[2]}
writer = CheckFreqWriter(sys.argv[1] + "/step_1", storage_options=options)
dcp.save({"w": torch.zeros(25_000_000)}, storage_writer=writer)
"""
    environment = os.environ | {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, root, proxy.endpoint], env=environment
    )
    third = threading.Event()

    def rule(request):
        if "partNumber=3&" in request.path:
            third.set()
            return Break(delay_s=1.0)
        return None

    proxy.rule = rule
    assert third.wait(60)
    child.kill()
    child.wait()
    assert len(uploads(root)) == 1
    tier = open_tier(root, storage_options=weed.options)
    now_s = SystemClock().wall_s()
    assert clean_root(tier, now_s=now_s) == [], "it may still be at work"
    (key,) = uploads(root)
    assert "/step_1/__0_" in key
    later = ManualClock(wall_s=now_s + 100)
    state, options = {"w": torch.zeros(9)}, weed.options
    with Checkpointer(root, state, every=1, storage_options=options, clock=later) as ckpt:
        assert ckpt.restore() is None
    assert uploads(root) == []
    assert "step_1" not in [entry.name for entry in tier.list()]


def test_uploads_of_others_are_left_alone(root, weed, boto, uploads):
    key = f"{root}/step_1/their-file".removeprefix(f"s3://{BUCKET}/")
    made = boto.create_multipart_upload(Bucket=BUCKET, Key=key)
    tier = open_tier(root, storage_options=weed.options)
    assert clean_root(tier, now_s=SystemClock().wall_s() + 100) == []
    assert uploads(root) == [key]
    boto.abort_multipart_upload(Bucket=BUCKET, Key=key, UploadId=made["UploadId"])
