"""What a user is told when S3 refuses for credentials, clock or region, whatever was asked."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from s3_stub import refusing_s3
from torch.distributed.checkpoint.api import CheckpointException

from dcp_checkfreq import CheckFreqReader, CheckFreqWriter, Checkpointer, find_latest_valid
from dcp_checkfreq.errors import BadLocation
from dcp_checkfreq.storage.object_store.tier import RemoteTier
from dcp_checkfreq.storage.open import open_tier

SKEW = {"RequestTime": "20260101T000000Z", "ServerTime": "2026-01-01T09:00:00Z"}
DENIED = {
    "RequestTimeTooSkewed": (403, SKEW, ["clock of this machine", "20260101T000000Z", "NTP"]),
    "ExpiredToken": (400, {}, ["credentials have expired", "Renew them"]),
    "InvalidAccessKeyId": (403, {}, ["access denied", "does not know this access key"]),
    "SignatureDoesNotMatch": (403, {}, ["access denied", "secret key does not belong"]),
    "InvalidToken": (400, {}, ["access denied", "session token"]),
    "AccessDenied": (403, {}, ["access denied", "policy"]),
}
CALLS = {
    "size (HEAD)": lambda tier: tier.size("a"),
    "open (HEAD)": lambda tier: tier.open("a"),
    "make (HEAD)": lambda tier: tier.make(),
    "write_shard (HEAD, PUT)": lambda tier: tier.write_shard("a", [memoryview(b"x")], 1),
    "read": lambda tier: tier.read("a"),
    "list": lambda tier: tier.list(),
    "create": lambda tier: tier.create("a", b"x", scratch="s"),
    "replace": lambda tier: tier.replace("a", b"x", scratch="s"),
    "delete": lambda tier: tier.delete("a"),
}

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server():
    with refusing_s3() as stub:
        yield stub


@pytest.fixture
def stub(server):
    server.ok_from = None
    server.say(403, "AccessDenied")
    return server


def options_for(stub):
    return {"endpoint_url": stub.endpoint, "key": "a-key", "secret": "a-secret"}


def tier_at(stub):
    return RemoteTier("s3://bucket/run", options_for(stub), retry_for_s=2.0)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("code", DENIED)
def test_a_refusal_says_what_is_wrong_what_was_done_and_what_to_do(stub, call, code):
    status, fields, texts = DENIED[code]
    stub.say(status, code, fields=fields)
    with pytest.raises(PermissionError) as caught:
        call(tier_at(stub))
    told = str(caught.value)
    for text in [code, f"as {code} says", "Nothing was read or written", *texts]:
        assert text in told, told
    assert "\n" not in told
    assert "a-secret" not in told
    assert len(stub.asked) <= 6, stub.asked


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize(
    ("status", "code", "fields", "headers"),
    [
        (400, "AuthorizationHeaderMalformed", {"Region": "eu-west-9"}, {}),
        (301, "PermanentRedirect", {}, {"x-amz-bucket-region": "eu-west-9"}),
    ],
    ids=["malformed", "redirect"],
)
def test_a_bucket_of_another_region_is_named_with_the_option(
    stub, call, status, code, fields, headers
):
    stub.say(status, code, fields=fields, headers=headers)
    with pytest.raises(BadLocation) as caught:
        call(tier_at(stub))
    told = str(caught.value)
    assert "the bucket is in" in told
    assert "eu-west-9" in told
    assert "region_name" in told
    assert "Nothing was read or written" in told


def test_a_head_without_any_reason_stays_what_it_was(stub):
    """The second look is refused by nobody: no reason is made up."""
    stub.say(403, "AccessDenied")
    stub.ok_from = 1
    with pytest.raises(PermissionError, match="access denied, 403"):
        tier_at(stub).size("a")
    assert [method for method, _ in stub.asked] == ["HEAD", "GET"]


def test_a_missing_object_is_asked_for_once(stub):
    stub.say(404, "NoSuchKey")
    with pytest.raises(FileNotFoundError):
        tier_at(stub).size("a")
    assert [method for method, _ in stub.asked] == ["HEAD"]


def test_an_expired_token_is_asked_for_anew_once_and_a_wrong_clock_is_not(stub):
    stub.say(400, "ExpiredToken")
    with pytest.raises(PermissionError, match="expired"):
        tier_at(stub).size("a")
    assert [method for method, _ in stub.asked].count("GET") == 2
    stub.say(403, "RequestTimeTooSkewed")
    with pytest.raises(PermissionError, match="clock"):
        tier_at(stub).size("a")
    assert [method for method, _ in stub.asked] == ["HEAD", "GET"]


def test_every_entrance_tells_the_user(stub):
    stub.say(403, "RequestTimeTooSkewed", fields=SKEW)
    url, options = "s3://bucket/run", options_for(stub)
    state = {"w": torch.zeros(3)}
    for work in (
        lambda: find_latest_valid(url, storage_options=options),
        lambda: Checkpointer(url, dict(state), every=1, storage_options=options),
        lambda: open_tier(url, storage_options=options).child("step_1").read(".metadata"),
        lambda: dcp.save(
            state, storage_writer=CheckFreqWriter(f"{url}/step_1", storage_options=options)
        ),
        lambda: dcp.load(
            state, storage_reader=CheckFreqReader(f"{url}/step_1", storage_options=options)
        ),
    ):
        with pytest.raises((OSError, CheckpointException, AssertionError)) as caught:
            work()
        assert "the clock of this machine is wrong" in str(caught.value)
        assert "NTP" in str(caught.value)


def test_no_credentials_at_all_says_how_to_give_some(stub, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    tier = RemoteTier("s3://bucket/run", {"endpoint_url": stub.endpoint}, retry_for_s=2.0)
    with pytest.raises(PermissionError, match="storage_options"):
        tier.size("a")
