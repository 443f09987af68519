"""Work that does not return is named once a minute, with rank, phase and place."""

import logging
import threading

import pytest

from dcp_checkfreq import Checkpointer
from dcp_checkfreq.ranks.rollcall import RollCall
from dcp_checkfreq.ranks.watchdog import Watchdog
from dcp_checkfreq.storage.local.tier import LocalTier
from dcp_checkfreq.testing import ForwardingTier, ManualClock


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def warned(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def test_work_is_told_after_a_minute_and_each_minute_then(clock, warned):
    dog = Watchdog(3, clock)
    with dog.doing("writing", "/runs/step_7"):
        for _ in range(179):
            clock.advance(1.0)
            dog.look()
    assert warned() == [
        "rank 3 has been writing /runs/step_7 for 60 s",
        "rank 3 has been writing /runs/step_7 for 120 s",
    ]
    clock.advance(1000.0)
    dog.look()
    assert len(warned()) == 2, "it is through"


def test_a_pause_before_work_begins_is_no_silence_of_the_storage(clock):
    dog = Watchdog(3, clock)
    dog.limit_s = 5.0
    for _ in range(100):
        dog.look()
    with dog.doing("writing", "/runs/step_7", in_storage=True):
        assert dog.stuck() is None, "it has just begun"
        for _ in range(5):
            dog.look()
            assert dog.stuck() is None
        dog.look()
        assert "without a sign for 5 s" in dog.stuck()


def test_only_the_innermost_work_of_a_thread_is_told(clock, warned):
    dog = Watchdog(0, clock)
    with dog.doing("saving", "a"):
        clock.advance(100.0)
        with dog.doing("writing", "b"):
            clock.advance(59.0)
            dog.look()
            assert warned() == []
            clock.advance(1.0)
            dog.look()
        assert warned() == ["rank 0 has been writing b for 60 s"]
        dog.look()
    assert warned()[1:] == ["rank 0 has been saving a for 160 s"]


def test_threads_are_told_each(clock, warned):
    dog = Watchdog(0, clock)
    inside, leave = threading.Event(), threading.Event()

    def work():
        with dog.doing("writing", "b"):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=work)
    with dog.doing("waiting"):
        thread.start()
        assert inside.wait(60)
        clock.advance(61.0)
        dog.look()
        leave.set()
        thread.join()
    assert warned() == ["rank 0 has been waiting for 61 s", "rank 0 has been writing b for 61 s"]


def test_others_hear_of_it_and_that_it_is_over(clock, warned):
    notes = []
    dog = Watchdog(1, clock, note=notes.append, others=lambda: {2: "has been reading x for 99 s"})
    with dog.doing("writing", "b"):
        for _ in range(70):
            clock.advance(1.0)
            dog.look()
    dog.look()
    dog.look()
    assert notes == ["has been writing b for 60 s", ""]
    assert warned() == ["rank 1 has been writing b for 60 s; rank 2 has been reading x for 99 s"]


class Slow(ForwardingTier):
    """Takes 70 s for some calls."""

    def __init__(self, inner, clock):
        super().__init__(inner)
        self.clock, self.remote, self.dog = clock, None, None

    def around(self, verb, name, call):
        if verb == self.remote:
            self.clock.advance(70.0)
            self.dog.look()
        return call()


@pytest.mark.parametrize(
    ("verb", "told"),
    [
        ("list", "choosing a checkpoint"),
        ("read_into", "reading"),
        ("write_shard", "writing"),
        ("sync", "writing"),
        ("create", "publishing"),
    ],
)
def test_storage_that_does_not_come_back_is_told_in_a_job_of_one_process(
    tmp_path, clock, warned, verb, told
):
    tier = Slow(LocalTier(tmp_path), clock)
    with Checkpointer(tier, {"x": 1}, every=1, clock=clock) as ckpt:
        tier.dog = ckpt._ranks.watchdog
        ckpt.restore()
        ckpt.after_step()
        ckpt.wait()
        tier.remote = verb
        if verb in ("list", "read_into"):
            ckpt.restore()
        else:
            ckpt.after_step()
            ckpt.wait()
        tier.remote = None
    texts = [text for text in warned() if text.startswith(f"rank 0 has been {told}")]
    assert texts, warned()
    assert "for 70 s" in texts[0]


def test_the_thread_ends_when_it_is_closed(clock):
    dog = Watchdog(0, clock)
    dog.start()
    thread = dog._thread
    dog.close()
    thread.join(30)
    assert not thread.is_alive()


# --- the roll ---


class Store(dict):
    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        return self[key]


def roll(store, rank, ranks=3):
    return RollCall(store, "job", rank, ranks)


def test_the_roll_names_who_is_missing_who_left_and_what_they_did():
    store = Store()
    roll(store, 1).leave("out of memory")
    roll(store, 1).leave("closed")
    roll(store, 2).doing("has been writing x for 60 s")
    assert roll(store, 0).missing() == (
        "rank 1 has left: out of memory; rank 2 is gone or does not answer, it has been writing x "
        "for 60 s"
    )
    assert roll(store, 0).others_doing() == {2: "has been writing x for 60 s"}
    roll(store, 2).doing("")
    assert roll(store, 0).others_doing() == {}


def test_if_all_are_there_nobody_is_missing():
    store = Store()
    callers = [threading.Thread(target=roll(store, rank).missing) for rank in (1, 2)]
    for caller in callers:
        caller.start()
    assert roll(store, 0).missing() == ""
    for caller in callers:
        caller.join()


def test_a_store_that_fails_or_hangs_ends_no_call():
    never = threading.Event()

    class Broken(Store):
        def set(self, key, value):
            raise RuntimeError("Broken pipe")

    class Hung(Store):
        def check(self, keys):
            never.wait(60)

    assert "store of the process group does not answer" in roll(Broken(), 0).missing()
    hung = roll(Hung(), 0)
    hung.leave("x")
    assert hung.others_doing() == {}
    never.set()
