"""What a save or load does when the server throttles, breaks, refuses, dies or keeps silent."""

import logging
import threading
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from servers import BUCKET, KEY, SECRET, Break, Proxy, Weed
from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq import (
    CheckFreqReader,
    CheckFreqWriter,
    Checkpointer,
    find_latest_valid,
)
from dcp_checkfreq.errors import BadLocation, PublishUnknown, WriteFailed
from dcp_checkfreq.storage.object_store.fsspec_files import FsspecFiles
from dcp_checkfreq.storage.object_store.options import Options
from dcp_checkfreq.storage.object_store.s3_files import S3Files
from dcp_checkfreq.storage.object_store.tier import RemoteTier
from dcp_checkfreq.storage.open import open_tier

pytestmark = pytest.mark.slow

MIB = 1 << 20
AT_ONCE_S = 60.0  # what is tried again is tried for 180 s, however busy the machine


@pytest.fixture(params=["auto", "s3fs"])
def move_with(request, monkeypatch):
    """Either way to move bytes."""
    monkeypatch.setattr(S3Files, "move_with", request.param)
    return request.param


def state_of(mib=40):
    return {"large": torch.arange(mib * MIB // 4, dtype=torch.int32), "step": 7}


def save(url, options, mib=40):
    dcp.save(state_of(mib), storage_writer=CheckFreqWriter(url, storage_options=options))


def check_load(url, options, mib=40):
    target = {"large": torch.zeros(mib * MIB // 4, dtype=torch.int32), "step": 0}
    dcp.load(target, storage_reader=CheckFreqReader(url, storage_options=options))
    assert torch.equal(target["large"], state_of(mib)["large"])


def first(times, how, match):
    """Return a rule that breaks the first so many requests that match."""
    left, lock = [times], threading.Lock()

    def rule(request):
        with lock:
            if match(request) and left[0] > 0:
                left[0] -= 1
                return how
        return None

    return rule


def is_part(request):
    return request.method == "PUT" and "partNumber" in request.path


def is_commit(request):
    return request.method == "PUT" and request.path.endswith("/.metadata")


def cause(caught):
    (failure,) = caught.value.failures.values()
    return failure[0] if isinstance(failure, tuple) else failure


@pytest.mark.parametrize(
    ("move_with", "status", "code"),
    [
        ("auto", 503, "SlowDown"),
        ("auto", 500, "InternalError"),
        ("auto", 429, "TooManyRequests"),
        ("s3fs", 503, "SlowDown"),
        ("s3fs", 429, "TooManyRequests"),
    ],
    indirect=["move_with"],
)
def test_throttling_and_5xx_anywhere_are_tried_again(proxy, root, uploads, move_with, status, code):
    for what in (is_part, is_commit, lambda r: True):
        url = f"{root}/{proxy.port}-{id(what)}"
        proxy.rule = first(2, Break(status=status, code=code), what)
        save(url, proxy.options, mib=20)
        proxy.rule = first(2, Break(status=status, code=code), lambda r: r.method == "GET")
        check_load(url, proxy.options, mib=20)
    assert len(proxy.broken) == 12
    assert uploads(root) == []


def test_a_line_that_breaks_in_mid_part_has_that_part_sent_again(proxy, root, move_with):
    proxy.rule = first(2, Break(cut_after=3 * MIB), is_part)
    save(f"{root}/step_1", proxy.options)
    assert len(proxy.broken) == 2
    by_path = [r.path for r in proxy.requests if is_part(r)]
    assert len(by_path) == len(set(by_path)) + 2, "only the broken parts were sent again"
    proxy.reset()
    check_load(f"{root}/step_1", proxy.options)


def test_a_line_that_breaks_in_mid_answer_has_that_range_read_again(proxy, root, move_with):
    save(f"{root}/step_1", proxy.options)
    proxy.rule = first(
        2, Break(cut_answer_after=1 * MIB), lambda r: r.method == "GET" and "range" in r.headers
    )
    check_load(f"{root}/step_1", proxy.options)
    assert len(proxy.broken) == 2


def test_a_part_that_is_refused_for_good_leaves_nothing(proxy, root, stored, uploads, move_with):
    proxy.rule = lambda r: (
        Break(status=403, code="AccessDenied") if is_part(r) and "partNumber=2&" in r.path else None
    )
    started = time.monotonic()
    with pytest.raises(CheckpointException) as caught:
        save(f"{root}/step_1", proxy.options)
    assert time.monotonic() - started < AT_ONCE_S
    assert isinstance(cause(caught), WriteFailed)
    assert "AccessDenied" in str(cause(caught))
    assert "\n" not in str(cause(caught))
    assert stored(root) == {}
    assert uploads(root) == []


@pytest.mark.parametrize("at", ["CompleteMultipartUpload", "last part"])
def test_an_upload_that_fails_at_its_end_is_aborted(proxy, root, stored, uploads, at, move_with):
    tier = RemoteTier(f"{root}/step_1", proxy.options, retry_for_s=1.0)
    proxy.rule = lambda r: (
        Break(status=500, code="InternalError")
        if (r.method == "POST" and "uploadId" in r.path and at.startswith("Complete"))
        or (is_part(r) and "partNumber=3&" in r.path and at == "last part")
        else None
    )
    data = memoryview(bytes(40 * MIB))
    with pytest.raises(OSError, match=r"InternalError|500"):
        tier.write_shard("a", [data], len(data))
    assert proxy.broken
    assert stored(root) == {}
    assert uploads(root) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_or_a_cancellation_in_the_midst_leaves_nothing(
    proxy, root, stored, uploads, error, move_with
):
    tier = open_tier(f"{root}/step_1", storage_options=proxy.options)

    def pieces():
        for _ in range(35):
            yield memoryview(bytes(MIB))
        raise error("stop")

    with pytest.raises(error, match="stop"):
        tier.write_shard("a", pieces(), 64 * MIB)
    assert proxy.count("POST", "uploads") == 1, "the upload was under way"
    assert stored(root) == {}
    assert uploads(root) == []


def test_wrong_keys_fail_at_once_with_one_line(weed, root):
    options = {**weed.options, "secret": "wrong-one"}
    for work in (
        lambda: find_latest_valid(root, storage_options=options),
        lambda: open_tier(root, storage_options=options).read("a"),
        lambda: open_tier(root, storage_options=options).write_shard("a", [memoryview(b"x")], 1),
    ):
        started = time.monotonic()
        with pytest.raises(PermissionError, match="access denied") as caught:
            work()
        assert "SignatureDoesNotMatch" in str(caught.value)
        assert "secret key does not belong" in str(caught.value)
        assert time.monotonic() - started < AT_ONCE_S
        assert "\n" not in str(caught.value)
        assert "wrong-one" not in str(caught.value)


def test_an_unknown_key_and_a_wrong_clock_say_so_although_head_has_no_body(weed, proxy, root):
    unknown = {**weed.options, "key": "nobody"}
    with pytest.raises(PermissionError, match=r"InvalidAccessKeyId.*does not know this access key"):
        open_tier(root, storage_options=unknown).size("a")
    proxy.rule = lambda r: Break(status=403, code="RequestTimeTooSkewed")
    with pytest.raises(PermissionError, match="clock of this machine is wrong"):
        open_tier(root, storage_options=proxy.options).size("a")
    assert [r.method for r in proxy.requests] == ["HEAD", "GET"]


def test_a_missing_bucket_fails_at_once_and_is_named(proxy, weed):
    with pytest.raises(BadLocation, match="no such bucket"):
        find_latest_valid("s3://nobody-made-this/run", storage_options=weed.options)
    proxy.rule = lambda r: Break(status=404, code="NoSuchBucket")  # weed makes buckets by itself
    started = time.monotonic()
    for work in (
        lambda: open_tier("s3://no-bucket/run", storage_options=proxy.options).list(),
        lambda: open_tier("s3://no-bucket/run", storage_options=proxy.options).read("a"),
    ):
        with pytest.raises(BadLocation, match="no such bucket"):
            work()
    state = {"w": torch.zeros(9)}
    with (
        pytest.raises(BadLocation, match="no such bucket"),
        Checkpointer("s3://no-bucket/run", state, every=1, storage_options=proxy.options) as ckpt,
    ):
        ckpt.restore()
    assert time.monotonic() - started < AT_ONCE_S


def test_a_save_to_a_missing_bucket_fails_at_once_in_one_line(proxy, move_with):
    # as S3 answers: HEAD has no body, so only the others say what it is that is missing
    proxy.rule = lambda r: Break(status=404, code="NoSuchBucket")
    started = time.monotonic()
    with pytest.raises(CheckpointException) as caught:
        save("s3://no-bucket/run/step_1", proxy.options)
    assert time.monotonic() - started < AT_ONCE_S
    assert isinstance(cause(caught), BadLocation)
    assert "there is no such bucket" in str(cause(caught))
    assert "\n" not in str(cause(caught))


def test_a_checkpointer_with_wrong_keys_fails_at_once_and_says_nothing_of_them(weed, root, caplog):
    options = {**weed.options, "secret": "wrong-one"}
    started = time.monotonic()
    with (
        caplog.at_level(logging.DEBUG, "dcp_checkfreq"),
        pytest.raises(PermissionError, match="access denied") as caught,
        Checkpointer(root, {"w": torch.zeros(9)}, every=1, storage_options=options) as ckpt,
    ):
        ckpt.restore()
    assert time.monotonic() - started < AT_ONCE_S
    shown = [str(caught.value), *(record.getMessage() for record in caplog.records)]
    assert not any("wrong-one" in text or KEY in text for text in shown), shown


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """A credentials file as something else renews it; returns how to write it."""
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)

    def write(key):
        path.write_text(f"[lab]\naws_access_key_id = {key}\naws_secret_access_key = {SECRET}\n")

    return write


def test_credentials_that_have_expired_are_asked_for_anew(proxy, root, profile, move_with):
    profile("old-key")

    def rule(request):
        if "old-key" in request.headers.get("authorization", ""):
            profile(KEY)
            return Break(status=400, code="ExpiredToken")
        return None

    proxy.rule = rule
    options = {"endpoint_url": proxy.endpoint, "profile": "lab"}
    save(f"{root}/step_1", options)
    check_load(f"{root}/step_1", options)
    assert len(proxy.broken) >= 1


def test_credentials_that_expire_in_mid_upload_have_the_shard_sent_again(
    proxy, root, profile, uploads, move_with
):
    profile(KEY)
    proxy.rule = first(1, Break(status=400, code="ExpiredToken"), is_part)
    options = {"endpoint_url": proxy.endpoint, "profile": "lab"}
    save(f"{root}/step_1", options)
    assert len(proxy.broken) == 1
    check_load(f"{root}/step_1", options)
    assert uploads(root) == []


def test_a_commit_whose_answer_is_lost_is_found_to_have_landed(proxy, root, weed):
    open_tier(root, storage_options=proxy.options).create("warm", b"", scratch="warm.tmp")
    proxy.rule = first(1, Break(drop_answer=True), is_commit)
    save(f"{root}/step_1", proxy.options)
    assert len(proxy.broken) == 1
    check_load(f"{root}/step_1", weed.options)


def test_a_server_that_answers_too_late_leaves_the_commit_unknown_and_nothing_deleted(
    proxy, root, weed, stored
):
    options = {**proxy.options, "config_kwargs": {"read_timeout": 0.3}}
    tier = RemoteTier(f"{root}/step_1", options, retry_for_s=1.0)
    tier.create("warm", b"", scratch="warm.tmp")
    committing = threading.Event()

    def rule(request):
        if is_commit(request):
            committing.set()
        if committing.is_set():
            return Break(delay_s=0.6)
        return None

    proxy.rule = rule
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state_of(), storage_writer=CheckFreqWriter(tier))
    assert isinstance(cause(caught), PublishUnknown)
    proxy.reset()
    assert ".metadata" in stored(f"{root}/step_1")
    assert find_latest_valid(root, storage_options=weed.options).step == 1
    check_load(f"{root}/step_1", weed.options)


@pytest.fixture
def moto():
    """moto's server, which minds no signatures, so that headers can be taken away."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    proxy = Proxy(server.get_host_and_port()[1])
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=proxy.endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    yield proxy
    proxy.close()
    server.stop()


def test_a_server_without_conditional_writes_is_noticed_and_looked_at_first(moto, root, caplog):
    moto.rule = lambda r: Break(without_header="if-none-match") if r.method == "PUT" else None
    with caplog.at_level(logging.WARNING, "dcp_checkfreq"):
        save(f"{root}/step_1", moto.options)
    assert any("no conditional writes" in record.getMessage() for record in caplog.records)
    tier = open_tier(f"{root}/step_1", storage_options=moto.options)
    before = tier.read(".metadata")
    with pytest.raises(FileExistsError):
        tier.create(".metadata", b"other", scratch="s")
    assert tier.read(".metadata") == before
    with pytest.raises(CheckpointException):
        save(f"{root}/step_1", moto.options)
    check_load(f"{root}/step_1", moto.options)


def test_without_conditional_writes_too_a_commit_whose_answer_is_lost_has_landed(moto, root):
    moto.rule = lambda r: Break(without_header="if-none-match") if r.method == "PUT" else None
    open_tier(root, storage_options=moto.options).create("warm", b"", scratch="warm.tmp")
    moto.reset()
    moto.rule = first(2, Break(drop_answer=True), is_commit)  # aiohttp sends once more by itself
    save(f"{root}/step_1", moto.options)
    assert len(moto.broken) == 2
    check_load(f"{root}/step_1", moto.options)


def test_where_nothing_is_marked_the_content_tells_that_a_commit_has_landed(proxy, root):
    """As for other stores than S3; the client repeats the request by itself and finds it taken."""
    tier = RemoteTier(f"{root}/step_1")
    tier._files = FsspecFiles("s3", Options(proxy.options))
    tier.create("warm", b"", scratch="warm.tmp")
    proxy.rule = first(1, Break(drop_answer=True), is_commit)
    tier.create(".metadata", b"of one attempt", scratch="s.tmp")
    assert len(proxy.broken) == 1
    assert proxy.count("PUT", "/.metadata") == 2
    with pytest.raises(FileExistsError):
        tier.create(".metadata", b"of another one", scratch="s.tmp")
    assert tier.read(".metadata") == b"of one attempt"


def test_a_server_that_knows_no_conditional_writes_at_all_gets_plain_ones(moto, root):
    moto.rule = lambda r: (
        Break(status=501, code="NotImplemented") if "if-none-match" in r.headers else None
    )
    save(f"{root}/step_1", moto.options)
    check_load(f"{root}/step_1", moto.options)


@pytest.mark.parametrize(
    "move_with", ["auto", pytest.param("s3fs", marks=pytest.mark.long)], indirect=True
)
def test_a_server_that_dies_in_mid_save_and_comes_back_gets_the_rest(tmp_path, move_with):
    weed = Weed(tmp_path)
    weed.start()
    proxy = Proxy(weed.port)
    restarted = threading.Event()

    def restart():
        weed.kill()
        time.sleep(1)
        weed.start()
        restarted.set()

    seen = []

    def rule(request):
        if is_part(request) and not seen:
            seen.append(request)
            threading.Thread(target=restart, name="restart").start()
            return Break(delay_s=0.2)
        return None

    proxy.rule = rule
    try:
        url = f"s3://{BUCKET}/run/step_1"
        save(url, proxy.options)
        assert restarted.is_set()
        check_load(url, proxy.options)
        assert find_latest_valid(f"s3://{BUCKET}/run", storage_options=weed.options).step == 1
    finally:
        restarted.wait(60)
        proxy.close()
        sockets = weed.sockets()
        weed.kill()
    assert sockets, "it makes some, and not where it was told to"
    assert weed.sockets() == []


def test_a_slow_server_shows_in_what_a_save_costs(proxy, root):
    state = {"w": torch.zeros(8 * MIB // 4)}
    with Checkpointer(root, state, every=1, storage_options=proxy.options) as ckpt:
        ckpt.restore()
        proxy.bytes_per_s = 4 * MIB
        ckpt.after_step()
        ckpt.wait()
        proxy.bytes_per_s = 0
        (record,) = ckpt.history
    assert record.error is None
    assert record.persist_s > 1.9
    assert record.blocked_s < 1.0
