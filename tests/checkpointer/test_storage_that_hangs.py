"""Issue 10, line 4: a storage that never comes back is given up after ``timeout_s``, by name.

And one that is merely slow never is. Real seconds: nothing here can be told by a hand-set clock.
"""

import signal
import threading
import time

import pytest
import torch
from forked_scripts import run_scripts
from fuse_mount import Unavailable, fuse_mount

from dcp_checkfreq import (
    Checkpointer,
    LoadFailed,
    PublishUnknown,
    RecoveryFailed,
    SaveFailed,
    find_latest_valid,
)
from dcp_checkfreq.ranks import patience, watchdog
from dcp_checkfreq.staging import upload
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import ForwardingTier

pytestmark = pytest.mark.slow
TIMEOUT_S = 1.5
SOON_S = 12.0  # on a busy machine


@pytest.fixture(autouse=True)
def within_seconds(monkeypatch):
    monkeypatch.setattr(watchdog, "_POLL_S", 0.1)
    monkeypatch.setattr(patience, "_POLL_S", 0.05)
    begun_s = time.monotonic()
    yield
    assert time.monotonic() - begun_s < 3 * SOON_S


class Gate(ForwardingTier):
    """Holds calls as `GatedTier` does, from `hold` on; a call that was let go was carried out."""

    def __init__(self, inner):
        super().__init__(inner)
        self.verb, self.name = None, ""
        self.held, self.open = threading.Event(), threading.Event()

    def hold(self, verb, name=""):
        self.verb, self.name = verb, name

    def around(self, verb, name, call):
        if verb == self.verb and self.name in name:
            self.held.set()
            assert self.open.wait(60), "the test is over"
        return call()

    def let_go(self):
        self.verb = None
        self.open.set()


@pytest.fixture
def gate(tmp_path):
    made = Gate(LocalTier(tmp_path / "root"))
    yield made
    made.let_go()


def job(tier, *, every=1, **options):
    state = {"x": torch.arange(100.0), "y": torch.ones(3)}
    return state, Checkpointer(tier, state, every=every, timeout_s=TIMEOUT_S, **options)


def save(ckpt):
    ckpt.after_step()
    ckpt.wait()


@pytest.mark.parametrize(
    ("verb", "name", "kind", "phase", "where"),
    [
        ("write_shard", "__0_", SaveFailed, "writing", "step_00000002"),
        ("sync", "step_00000002", SaveFailed, "writing", "step_00000002"),
        ("list", "", SaveFailed, "looking whether it can save", "step_00000002"),
        ("list", "step_00000002", PublishUnknown, "publishing", "step_00000002"),
        ("create", ".metadata", PublishUnknown, "publishing", "step_00000002"),
        ("reserve", ".metadata", SaveFailed, "reserving the commit", "step_00000002"),
        ("replace", "lease", SaveFailed, "renewing the lease", ""),
    ],
)
def test_a_save_that_hangs_is_given_up_with_rank_path_and_phase(
    gate, verb, name, kind, phase, where
):
    _, ckpt = job(gate)
    ckpt.restore()
    save(ckpt)
    gate.hold(verb, name)
    begun_s = time.monotonic()
    with pytest.raises(kind) as caught:
        save(ckpt)
    assert type(caught.value) is kind
    assert TIMEOUT_S <= time.monotonic() - begun_s < SOON_S
    assert f"rank 0 has been {phase}" in str(caught.value)
    assert where in str(caught.value)
    begun_s = time.monotonic()
    for again in (ckpt.wait, ckpt.after_step, ckpt.close, ckpt.close):
        try:
            again()
        except SaveFailed:
            pass
        else:
            assert again == ckpt.close, again
    assert time.monotonic() - begun_s < SOON_S


def test_a_save_that_was_given_up_is_not_published_when_the_storage_comes_back(gate, tmp_path):
    _, ckpt = job(gate)
    ckpt.restore()
    save(ckpt)
    gate.hold("write_shard")
    with pytest.raises(SaveFailed, match="does not come back"):
        save(ckpt)
    gate.let_go()
    ckpt.wait()
    assert "does not come back" in ckpt.history[-1].error
    assert find_latest_valid(tmp_path / "root", depth="digest").step == 1
    assert not list((tmp_path / "root" / "step_00000002").glob("*.distcp"))
    ckpt.save(wait=True)
    assert find_latest_valid(tmp_path / "root", depth="digest").step == 2
    ckpt.close()


def test_a_removal_that_hangs_costs_the_next_save_and_not_the_last(gate, tmp_path, caplog):
    _, ckpt = job(gate, keep_last=1)
    ckpt.restore()
    save(ckpt)
    gate.hold("delete", ".metadata")
    save(ckpt)
    assert ckpt.last_saved_step == 2
    assert "rank 0 has been removing what is not kept" in caplog.text
    with pytest.raises(SaveFailed, match="rank 0 has been removing what is not kept"):
        save(ckpt)
    with pytest.raises(SaveFailed, match="rank 0 has been removing what is not kept"):
        ckpt.close()
    assert find_latest_valid(tmp_path / "root", depth="digest").step == 2


def test_training_that_does_not_wait_hears_of_it_too(gate):
    _, ckpt = job(gate, every=10**6)
    ckpt.restore()
    ckpt.after_step()
    gate.hold("write_shard")
    ckpt.save()
    assert gate.held.wait(30)

    def train():
        until_s = time.monotonic() + SOON_S
        while time.monotonic() < until_s:
            ckpt.after_step()
            threading.Event().wait(0.01)

    with pytest.raises(SaveFailed, match="rank 0 has been writing"):
        train()
    with pytest.raises(SaveFailed):
        ckpt.close()


@pytest.mark.parametrize(
    ("verb", "name", "kind", "phase"),
    [
        ("list", "", RecoveryFailed, "choosing a checkpoint"),
        ("read", ".metadata", RecoveryFailed, "choosing a checkpoint"),
        ("read", "lease", RecoveryFailed, "choosing a checkpoint"),
        ("open", ".distcp", LoadFailed, "reading"),
        ("read_into", ".distcp", LoadFailed, "reading"),
    ],
)
def test_a_restore_that_hangs_is_given_up(gate, verb, name, kind, phase):
    state, ckpt = job(gate)
    ckpt.restore()
    ckpt.after_step()
    ckpt.close()
    state, ckpt = job(gate)
    state["x"].zero_()
    gate.hold(verb, name)
    begun_s = time.monotonic()
    with pytest.raises(kind, match=f"rank 0 has been {phase}") as caught:
        ckpt.restore()
    assert TIMEOUT_S <= time.monotonic() - begun_s < SOON_S
    assert "root" in str(caught.value)
    gate.let_go()
    late = [one for one in threading.enumerate() if one.name.startswith("checkfreq-storage")]
    for thread in late:
        thread.join(30)
    assert not state["x"].any(), "a read that came back late must not get into the state"
    assert ckpt.restore().step == 1
    assert state["x"].tolist() == torch.arange(100.0).tolist()
    ckpt.close()


class Slow(ForwardingTier):
    """Each call takes a while, and so does each piece of a file."""

    PAUSE_S = 0.25 * TIMEOUT_S

    def __init__(self, inner):
        super().__init__(inner)
        self.is_slow = False

    def pause(self):
        if self.is_slow:
            threading.Event().wait(self.PAUSE_S)

    def around(self, verb, name, call):
        self.pause()
        return call()

    def around_pieces(self, name, pieces):
        for piece in pieces:
            self.pause()
            yield piece


def test_what_is_merely_slow_is_never_cut(tmp_path):
    tier = Slow(LocalTier(tmp_path / "root"))
    state = {str(i): torch.full((1000,), float(i)) for i in range(3)}

    def started():
        return Checkpointer(
            tier, state, every=1, keep_last=1, timeout_s=TIMEOUT_S, on_error="raise", threads=1
        )

    with started() as ckpt:
        ckpt.restore()
        save(ckpt)
        tier.is_slow = True
        begun_s = time.monotonic()
        save(ckpt)  # for the removal of the first one as well
        assert time.monotonic() - begun_s > 3 * TIMEOUT_S
    tier.is_slow = False
    with started() as ckpt:
        tier.is_slow = True
        begun_s = time.monotonic()
        assert ckpt.restore(depth="digest").step == 2
        assert time.monotonic() - begun_s > 3 * TIMEOUT_S
        tier.is_slow = False


def test_an_upload_that_comes_to_a_stand_fails_and_a_slow_one_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "_GIVE_UP_AFTER_S", TIMEOUT_S)
    big = {"x": torch.ones(3 << 20)}  # more than one piece
    tier = Slow(LocalTier(tmp_path / "root"))
    gate = Gate(tier)
    options = {"staging_dir": tmp_path / "disk", "timeout_s": TIMEOUT_S, "every": 1}
    ckpt = Checkpointer(gate, big, on_error="raise", **options)
    ckpt.restore()
    tier.is_slow = True
    save(ckpt)
    tier.is_slow = False
    gate.hold("write_shard")
    with pytest.raises(SaveFailed, match="rank 0 has been uploading"):
        save(ckpt)
    gate.let_go()
    ckpt.close()


SCRIPT = """
import sys, torch
from dcp_checkfreq import Checkpointer
from dcp_checkfreq.ranks import patience, watchdog
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import GatedTier
watchdog._POLL_S, patience._POLL_S = 0.1, 0.05
tier = GatedTier(LocalTier(sys.argv[1]), timeout_s=600)
ckpt = Checkpointer(tier, {"x": torch.ones(3)}, every=1, timeout_s=0.5)
ckpt.after_step()
tier.wait_until_held()
"""
PLAIN = """
import sys, torch, torch.distributed.checkpoint as dcp
from dcp_checkfreq import CheckFreqWriter
from dcp_checkfreq.commit import in_flight
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import GatedTier
in_flight.GIVE_UP_AFTER_S = 0.5
tier = GatedTier(LocalTier(sys.argv[1] + "/step_00000001"), verbs=[VERB], timeout_s=600)
dcp.async_save({"x": torch.ones(3)}, storage_writer=CheckFreqWriter(tier), no_dist=True)
tier.wait_until_held()
"""
ENDS = {
    "last_line": "",
    "dropped": "del ckpt",
    "told": "try: ckpt.wait()\nexcept Exception as error: print(error, file=sys.stderr)",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    scripts = {name: SCRIPT + end for name, end in ENDS.items()}
    for verb in ("write_shard", "create"):
        scripts[f"plain {verb}"] = PLAIN.replace("VERB", repr(verb))
    return run_scripts(scripts, tmp_path_factory.mktemp("ends"), at_most_s=30)


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_although_its_storage_hangs(ended, end):
    code, said = ended[end]
    assert code == SaveFailed.exit_code, said
    assert "rank 0 has been writing" in said
    assert "step_00000001" in said


@pytest.mark.parametrize(("verb", "doing"), [("write_shard", "writing"), ("create", "publishing")])
def test_a_plain_async_save_that_hangs_lets_the_process_end(ended, verb, doing):
    code, said = ended[f"plain {verb}"]
    assert code == SaveFailed.exit_code, said
    assert f"step_00000001: not saved: the storage does not come back: it has been {doing}" in said


@pytest.mark.parametrize("what", ["save", "restore"])
def test_a_mount_whose_server_has_stopped(tmp_path, what):
    servers = []
    try:
        with fuse_mount(tmp_path / "mount", {}, started=servers.append) as folder:
            _, ckpt = job(folder / "root")
            ckpt.restore()
            save(ckpt)
            servers[0].send_signal(signal.SIGSTOP)
            try:
                if what == "save":
                    with pytest.raises(SaveFailed, match="rank 0 has been "):
                        save(ckpt)
                    with pytest.raises(SaveFailed, match="rank 0 has been "):
                        ckpt.close()
                else:
                    with pytest.raises(RecoveryFailed, match="choosing a checkpoint"):
                        ckpt.restore()
            finally:
                servers[0].send_signal(signal.SIGCONT)
            if what == "restore":
                assert ckpt.restore().step == 1
                ckpt.close()
    except Unavailable as why:
        pytest.skip(str(why))
