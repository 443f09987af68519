"""The lease holds deleting back while another run may be at work, and decides nothing else."""

import json
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.format.names import LEASE, RUN_FOLDER
from dcp_checkfreq.recovery.lease import TTL_S, LeaseFile, RunLease, is_live
from dcp_checkfreq.testing import ManualClock, MemoryTier

NOW_S = 1_700_000_000.0


def live(lease, *, run_id="mine", host="here", pid_alive=False, now_s=NOW_S):
    return is_live(lease, run_id=run_id, host=host, pid_alive=pid_alive, now_s=now_s)


def theirs(*, host="there", age_s=0.0):
    return RunLease("theirs", host, 77, NOW_S - age_s)


def test_no_lease_holds_nobody_back():
    assert not live(None)


@given(age_s=st.floats(-1e9, 1e9), alive=st.booleans(), host=st.sampled_from(["here", "there"]))
def test_a_run_does_not_hold_itself_back(age_s, alive, host):
    assert not live(RunLease("mine", host, 1, NOW_S - age_s), pid_alive=alive)


def test_on_the_same_host_a_dead_process_holds_nobody_back_at_once():
    assert not live(theirs(host="here"), pid_alive=False)
    assert live(theirs(host="here"), pid_alive=True)


@pytest.mark.parametrize("age_s", [0.0, 1.0, TTL_S - 1, -1.0, -TTL_S + 1])
def test_on_another_host_a_fresh_lease_holds_back(age_s):
    assert live(theirs(age_s=age_s), pid_alive=False)


@pytest.mark.parametrize("age_s", [TTL_S, TTL_S + 1, 1e9, -TTL_S, -1e9])
def test_on_another_host_a_lease_that_is_far_from_now_does_not(age_s):
    assert not live(theirs(age_s=age_s), pid_alive=True)


def files(root=None, clock=None):
    root = root or MemoryTier()
    clock = clock or ManualClock(wall_s=NOW_S)
    return root, clock


def plant(root, **fields):
    content = {"run_id": "theirs", "host": "there", "pid": 77, "renewed_s": NOW_S} | fields
    root.poke(f"{RUN_FOLDER}/{LEASE}", json.dumps(content).encode())


def test_a_renewed_lease_names_its_run_host_and_process():
    root, clock = files()
    LeaseFile(root, "mine", clock).renew()
    said = json.loads(root.files()[f"{RUN_FOLDER}/{LEASE}"])
    holder = {"run_id": "mine", "host": socket.gethostname(), "pid": os.getpid()}
    assert said.items() >= (holder | {"renewed_s": NOW_S}).items()
    assert list(root.files()) == [f"{RUN_FOLDER}/{LEASE}"]


def test_another_run_sees_the_lease_until_it_is_released():
    root, clock = files()
    holder, other = LeaseFile(root, "mine", clock), LeaseFile(root, "other", clock)
    assert other.held_by_other() is None
    holder.renew()
    assert other.held_by_other().run_id == "mine"
    assert holder.held_by_other() is None
    holder.release()
    assert other.held_by_other() is None
    assert root.files() == {}


def test_a_lease_of_another_host_runs_out():
    root, clock = files()
    plant(root)
    mine = LeaseFile(root, "mine", clock)
    assert mine.held_by_other().run_id == "theirs"
    clock.advance(TTL_S)
    assert mine.held_by_other() is None


def test_renewing_again_makes_it_last_longer():
    root, clock = files()
    holder = LeaseFile(root, "mine", clock)
    holder.renew()
    clock.advance(TTL_S - 1)
    holder.renew()
    assert json.loads(root.files()[f"{RUN_FOLDER}/{LEASE}"])["renewed_s"] == NOW_S + TTL_S - 1


def test_a_run_does_not_release_the_lease_of_another():
    root, clock = files()
    mine = LeaseFile(root, "mine", clock)
    mine.renew()
    plant(root)
    mine.release()
    assert f"{RUN_FOLDER}/{LEASE}" in root.files()


def test_release_without_a_lease_does_nothing():
    root, clock = files()
    LeaseFile(root, "mine", clock).release()
    assert root.files() == {}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"null", b"[]", b"{}", b"\xff\xfe", b'"x"', b'{"run_id": "theirs"}',
        b'{"run_id": "t", "host": "h", "pid": 1, "renewed_s": 1.0, "more": 1}',
        b'{"run_id": "t", "host": "h", "pid": 1, "renewed_s": "soon"}',
        b'{"run_id": "t", "host": "h", "pid": 1, "renewed_s": null}',
        b'{"run_id": "t", "host": "h", "pid": "../..", "renewed_s": 0}',
    ],
)  # fmt: skip
def test_a_lease_that_says_nothing_holds_nobody_back_and_is_replaced(content):
    root, clock = files()
    root.poke(f"{RUN_FOLDER}/{LEASE}", content)
    mine = LeaseFile(root, "mine", clock)
    assert mine.held_by_other() is None
    mine.release()
    mine.renew()
    assert json.loads(root.files()[f"{RUN_FOLDER}/{LEASE}"])["run_id"] == "mine"


def test_a_restarted_container_is_not_held_back_by_its_own_earlier_life():
    """Host name and pid are the same after a restart (pid 1, or 7, in every life)."""
    root, clock = files()
    plant(root, host=socket.gethostname(), pid=os.getpid(), renewed_s=NOW_S - 10 * TTL_S)
    assert LeaseFile(root, "mine", clock).held_by_other() is None
