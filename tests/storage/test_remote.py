"""A folder behind an fsspec URL keeps the promises of a tier, and gives no secret away."""

import errno
import pickle
import random
import socket
import subprocess
import sys

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from stock_fsspec import FsspecReader

from dcp_checkfreq import CheckFreqReader, CheckFreqWriter, Checkpointer, find_latest_valid
from dcp_checkfreq.errors import BadLocation
from dcp_checkfreq.storage.object_store.errors import as_os_error, is_passing
from dcp_checkfreq.storage.object_store.options import Options
from dcp_checkfreq.storage.object_store.parts import (
    checked,
    gathered,
    in_parts,
    part_bytes,
)
from dcp_checkfreq.storage.object_store.tier import RemoteTier
from dcp_checkfreq.testing import TierSuite

MIB = 1 << 20


class TestMemoryUrl(TierSuite):
    def make_tier(self, tmp_path):
        return RemoteTier(f"memory://{tmp_path.name}/root")

    def raw_files(self, tier, tmp_path):
        fs = fsspec.filesystem("memory")
        base = f"/{tmp_path.name}/root"
        return {path[len(base) + 1 :]: fs.cat_file(path) for path in fs.find(base)}


# --- parts ---------------------------------------------------------------------------------


@given(st.integers(0, 5 << 40))
def test_every_size_fits_into_ten_thousand_parts_that_s3_takes(size_bytes):
    part = part_bytes(size_bytes)
    assert 5 * MIB <= part <= 5 << 30
    assert part % MIB == 0
    assert -(-size_bytes // part) <= 10_000


def test_ordinary_shards_have_parts_of_16_mib():
    assert {part_bytes(size) for size in (0, 1, 1 << 30, 10_000 * 16 * MIB)} == {16 * MIB}
    assert part_bytes(10_000 * 16 * MIB + 1) == 17 * MIB


PIECES = st.lists(st.integers(0, 400_000), max_size=12)


def pieces_of(lengths):
    data = random.Random(1).randbytes(sum(lengths))
    at, pieces = 0, []
    for length in lengths:
        pieces.append(memoryview(data)[at : at + length])
        at += length
    return data, pieces


@given(PIECES)
def test_gathering_keeps_the_bytes_and_large_pieces_where_they_lie(lengths):
    data, pieces = pieces_of(lengths)
    given_on = list(gathered(pieces))
    assert b"".join(given_on) == data
    large = [piece for piece in pieces if len(piece) >= 256 << 10]
    assert [piece for piece in given_on if piece.obj is data] == large
    assert all(len(piece) for piece in given_on)


def test_many_small_pieces_become_few():
    _, pieces = pieces_of([100, 16 << 10] * 400)
    assert len(list(gathered(pieces))) <= 8


@given(PIECES, st.integers(1, 500_000))
def test_parts_are_all_of_one_size_but_the_last(lengths, part):
    data, pieces = pieces_of(lengths)
    parts = [b"".join(group) for group in in_parts(pieces, part)]
    assert b"".join(parts) == data
    assert all(len(one) == part for one in parts[:-1])
    assert all(0 < len(one) <= part for one in parts[-1:])


@pytest.mark.parametrize("lengths", [[], [3], [3, 0, 4], [3, 5]])
def test_pieces_that_do_not_add_up_are_an_error_at_the_end(lengths):
    _, pieces = pieces_of(lengths)
    total = sum(lengths)
    assert sum(map(len, checked(pieces, total, "f"))) == total
    for wrong in (total - 1, total + 1):
        with pytest.raises(OSError, match="bytes were given"):
            list(checked(pieces, wrong, "f"))


# --- options -------------------------------------------------------------------------------

SECRETS = {
    "key": "SEKRET1",
    "secret": "SEKRET2",
    "token": "SEKRET3",
    "client_kwargs": {"aws_access_key_id": "SEKRET4", "region_name": "eu-west-1"},
    "config_kwargs": {"proxies": {"https": "SEKRET5"}, "read_timeout": 5},
    "endpoint_url": "https://me:SEKRET6@host",
    "some_new_option": "SEKRET7",
    "anon": False,
}


def test_what_is_not_known_to_be_harmless_is_neither_shown_nor_pickled():
    options = Options(SECRETS)
    for text in (repr(options), pickle.dumps(options).decode("latin-1"), options.digest):
        assert "SEKRET" not in text
    assert "eu-west-1" in repr(options)
    assert options.all() == SECRETS


def test_in_this_process_a_pickle_gets_its_secrets_back_and_elsewhere_it_says_what_is_missing():
    copy = pickle.loads(pickle.dumps(Options(SECRETS)))
    assert copy.all() == SECRETS
    assert not copy.lost_secrets
    code = "import pickle, sys; o = pickle.load(sys.stdin.buffer); print(o.lost_secrets, o.all())"
    elsewhere = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(Options(SECRETS)), capture_output=True, check=True,
    ).stdout.decode()  # fmt: skip
    assert elsewhere.startswith("True ")
    assert "SEKRET" not in elsewhere
    assert "eu-west-1" in elsewhere


def test_options_without_secrets_pickle_whole():
    options = Options({"profile": "lab", "endpoint_url": "http://127.0.0.1:1"})
    assert not pickle.loads(pickle.dumps(options)).lost_secrets


def test_tiers_of_equal_options_share_their_connections_and_others_do_not():
    one, same = RemoteTier("s3://a/x", {"key": "1"}), RemoteTier("s3://b/y", {"key": "1"})
    other = RemoteTier("s3://a/x", {"key": "2"})
    assert one._files is same._files
    assert one._files is not other._files


# --- errors --------------------------------------------------------------------------------


class ClientError(Exception):
    """Like botocore's, which is not imported here."""

    def __init__(self, code, status, message="why"):
        super().__init__(f"An error occurred ({code})")
        self.response = {
            "Error": {"Code": code, "Message": message},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


@pytest.mark.parametrize(
    ("error", "passing", "kind"),
    [
        (ClientError("SlowDown", 503), True, OSError),
        (ClientError("InternalError", 500), True, OSError),
        (ClientError("503", 503), True, OSError),
        (ClientError("RequestTimeout", 400), True, OSError),
        (ClientError("AccessDenied", 403), False, PermissionError),
        (ClientError("403", 403), False, PermissionError),
        (ClientError("InvalidAccessKeyId", 403), False, PermissionError),
        (ClientError("ExpiredToken", 400), False, PermissionError),
        (ClientError("NoSuchBucket", 404), False, BadLocation),
        (ClientError("NoSuchKey", 404), False, FileNotFoundError),
        (ClientError("404", 404), False, FileNotFoundError),
        (ClientError("NotImplemented", 501), False, OSError),
        (ConnectionResetError(104, "reset"), True, OSError),
        (TimeoutError("late"), True, TimeoutError),
        (ValueError("a bug"), False, ValueError),
    ],
)
def test_errors_are_told_apart(error, passing, kind):
    assert is_passing(error) is passing
    told = as_os_error(error, "s3://b/x")
    assert isinstance(told, kind)
    assert "\n" not in str(told)
    if isinstance(told, OSError):
        assert told.errno not in (None, errno.EIO), "EIO would mean that a disk has lost bytes"


@pytest.mark.slow
def test_an_address_where_nobody_listens_is_an_error_after_the_time_for_tries(caplog):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        options = {"endpoint_url": f"http://127.0.0.1:{held.getsockname()[1]}", "anon": True}
        tier = RemoteTier("s3://bucket/x", options, retry_for_s=2.0)
        with pytest.raises(OSError, match="EndpointConnectionError"):
            tier.list()
    assert any("trying again" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("outer", ["endpoint_url", "client_kwargs"])
def test_credentials_in_an_endpoint_are_refused_and_not_shown(outer, caplog):
    url = "http://me:SEKRET@127.0.0.1:1"
    given = url if outer == "endpoint_url" else {"endpoint_url": url}
    tier = RemoteTier("s3://bucket/x", {outer: given})
    with pytest.raises(BadLocation, match="key= and secret=") as caught:
        tier.list()
    assert "SEKRET" not in str(caught.value) + repr(tier) + caplog.text


@pytest.mark.slow
def test_importing_the_package_imports_no_client():
    code = (
        "import sys, dcp_checkfreq.storage.open, dcp_checkfreq.dcp.writer\n"
        "dcp_checkfreq.storage.open.open_tier('s3://bucket/run')\n"
        "print([n for n in ('s3fs', 'obstore', 'aiobotocore', 'tenacity') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[]"


# --- through DCP ---------------------------------------------------------------------------


def test_a_checkpoint_behind_any_fsspec_url_is_saved_found_loaded_and_read_by_stock(tmp_path):
    root = f"memory://{tmp_path.name}"
    state = {"w": torch.arange(100_000), "n": 3}
    dcp.save(state, storage_writer=CheckFreqWriter(f"{root}/step_7"))
    found = find_latest_valid(root, depth="digest")
    assert (found.step, found.path) == (7, f"{root}/step_7")
    for reader in (CheckFreqReader(found), FsspecReader(f"{root}/step_7")):
        target = {"w": torch.zeros(100_000, dtype=torch.int64), "n": 0}
        dcp.load(target, storage_reader=reader)
        assert torch.equal(target["w"], state["w"])
        assert target["n"] == 3


def test_a_checkpointer_keeps_its_steps_behind_a_url(tmp_path):
    root = f"memory://{tmp_path.name}"
    state = {"w": torch.zeros(10)}
    with Checkpointer(root, state, every=1) as ckpt:
        ckpt.restore()
        for step in range(1, 5):
            state["w"].fill_(step)
            ckpt.after_step()
    fresh = {"w": torch.zeros(10)}
    with Checkpointer(root, fresh, every=1) as ckpt:
        assert ckpt.restore().step == 4
    assert fresh["w"].eq(4).all()
    names = {e.name for e in RemoteTier(root).list() if e.name.startswith("step")}
    assert names == {"step_00000003", "step_00000004"}
