"""What an iteration took, by a hand-set clock: at work, held up, queued, waiting for a copy."""

import threading

import pytest

from dcp_checkfreq import Checkpointer
from dcp_checkfreq.policy.step_timer import StepTimer
from dcp_checkfreq.testing import ForwardingTier, ManualClock, MemoryTier


class Loop:
    """A training loop in hand-set time, calling `StepTimer` where `Checkpointer` does."""

    def __init__(self):
        self.clock = ManualClock(monotonic_s=1000.0)
        self.times = StepTimer(self.clock, gpu=None)
        self.taken = []

    def work(self, seconds_s, *, wait_s=0.0, update_s=0.0):
        self.clock.advance(seconds_s)
        if wait_s:
            begun = self.times.mark()
            self.clock.advance(wait_s)
            self.times.add_wait(begun, self.times.mark())
        if update_s:
            begun = self.times.mark()
            self.clock.advance(update_s)
            self.times.add_update(begun, self.times.mark())

    def step(self, *, held_s=0.0, save=False, queue_s=0.0, copy_s=0.0, loaded=False, copying=False):
        self.times.enter()
        self.clock.advance(held_s)
        if save:
            self.clock.advance(queue_s)
            self.taken.append(self.times.take())
            self.clock.advance(copy_s)
        self.times.exit(is_loaded=loaded, is_copying=copying)

    def seen(self, number=-1):
        return self.times.resolve(self.taken[number])


def columns(iterations, *names):
    return [tuple(getattr(one, name) for name in names) for one in iterations]


def test_seconds_are_from_one_return_to_the_next_entry():
    loop = Loop()
    for seconds_s in (5.0, 1.0, 2.0, 3.0):
        loop.work(seconds_s)
        loop.step()
    loop.step(save=True)
    # What came before the first call was not an iteration that was seen whole.
    assert [one.seconds for one in loop.seen()][:3] == [1.0, 2.0, 3.0]


def test_an_iteration_is_loaded_or_copying_as_it_was_when_it_began():
    loop = Loop()
    for loaded, copying in [(False, False), (True, True), (True, False), (False, False)]:
        loop.step(loaded=loaded, copying=copying)
        loop.work(1.0)
    loop.step(save=True)
    kinds = columns(loop.seen(), "loaded", "copying")
    assert kinds == [(False, False), (True, True), (True, False), (False, False)]


def test_what_a_save_holds_the_loop_up_counts_for_the_first_iteration_after_it():
    loop = Loop()
    loop.step()
    loop.work(1.0)
    loop.step(save=True, copy_s=0.25, loaded=True)
    loop.work(1.0)
    loop.step()
    loop.work(1.0)
    loop.step(save=True, copy_s=0.5)
    assert columns(loop.seen(0), "seconds", "blocked_s", "queued_s") == [(1.0, 0.0, 0.0)]
    later = columns(loop.seen(1), "seconds", "blocked_s", "queued_s")
    assert later == [(1.0, 0.25, 0.0), (1.0, 0.0, 0.0)]


def test_waiting_for_the_save_before_counts_as_queued_in_the_interval_that_it_ends():
    loop = Loop()
    loop.step()
    loop.work(1.0)
    loop.step(save=True, queue_s=0.75, copy_s=0.25)
    loop.work(1.0)
    loop.step(save=True)
    assert columns(loop.seen(0), "blocked_s", "queued_s") == [(0.75, 0.75)]
    assert columns(loop.seen(1), "blocked_s", "queued_s") == [(0.25, 0.0)]


def test_standing_at_the_gate_is_blocked_and_not_work():
    loop = Loop()
    loop.step()
    loop.work(1.0)
    loop.step(held_s=0.5)
    loop.work(2.0)
    loop.step(save=True)
    assert columns(loop.seen(), "seconds", "blocked_s", "queued_s") == [
        (1.0, 0.0, 0.0),
        (2.0, 0.5, 0.0),
    ]


def test_waits_and_updates_are_sums_of_those_of_the_iteration_they_fell_into():
    loop = Loop()
    loop.step()
    loop.work(1.0, update_s=0.125)
    loop.step(copying=True, loaded=True)
    loop.work(1.0, wait_s=0.5, update_s=0.125)
    loop.work(0.0, update_s=0.25)  # of a second optimizer
    loop.step(save=True)
    got = columns(loop.seen(), "seconds", "waited_s", "update_s", "worked_s")
    assert got == [(1.125, 0.0, 0.125, 1.125), (1.875, 0.5, 0.375, 1.375)]


def test_all_time_is_in_one_iteration_or_another_and_none_in_two():
    loop = Loop()
    loop.step()
    begun_s = loop.clock.monotonic_s()
    for number in range(1, 30):
        loop.work(1.0 + number / 8, wait_s=0.125 * (number % 3), update_s=0.25)
        save = number % 5 == 0
        loop.step(held_s=0.0625, save=save, queue_s=0.5 * save, copy_s=0.25 * save)
    loop.step(save=True)
    total_s = sum(
        one.seconds + one.blocked_s for n in range(len(loop.taken)) for one in loop.seen(n)
    )
    assert total_s == loop.clock.monotonic_s() - begun_s


def test_waited_s_is_of_the_updates_since_the_last_save():
    loop = Loop()
    loop.step()
    loop.work(1.0, wait_s=0.5)
    assert loop.times.waited_s() == 0.5
    loop.step(save=True)
    assert loop.times.waited_s() == 0.0
    loop.work(1.0, wait_s=0.25)
    assert loop.times.waited_s() == 0.25


def test_a_save_in_the_middle_of_an_iteration_holds_it_up_and_is_no_work():
    loop = Loop()
    loop.step()
    loop.work(1.0)
    loop.times.pause()
    loop.clock.advance(0.5)  # for the save before
    assert loop.times.take() == []
    loop.clock.advance(0.25)
    loop.times.start_wait()
    loop.clock.advance(4.0)
    loop.times.resume(is_loaded=True, is_copying=False)
    loop.work(1.0)
    loop.step(save=True)
    got = columns(loop.seen(), "seconds", "blocked_s", "queued_s", "loaded")
    assert got == [(2.0, 4.75, 4.5, True)]


def test_an_iteration_that_is_not_done_is_left_out():
    loop = Loop()
    loop.step()
    loop.work(1.0)
    laps = loop.times.take()
    assert loop.times.resolve(laps) == []


def test_before_the_first_iteration_nothing_is_taken_and_waits_go_nowhere():
    loop = Loop()
    loop.work(1.0, wait_s=1.0, update_s=1.0)
    assert loop.times.take() == []
    assert loop.times.waited_s() == 0.0


# --- in a Checkpointer ---


@pytest.fixture
def seen(monkeypatch):
    """The iterations that each save was told of."""
    told = []
    resolve = StepTimer.resolve

    def telling(self, laps):
        made = resolve(self, laps)
        told.append(made)
        return made

    monkeypatch.setattr(StepTimer, "resolve", telling)
    return told


def test_a_checkpointer_measures_iterations_between_its_calls(seen):
    clock = ManualClock()
    with Checkpointer(MemoryTier(), {"x": 1}, every=3, clock=clock) as ckpt:
        for seconds_s in (9.0, 1.0, 2.0, 3.0, 4.0, 5.0):
            clock.advance(seconds_s)
            ckpt.after_step()
            if ckpt.step == 3:
                ckpt.wait()
    assert [[one.seconds for one in interval] for interval in seen] == [[1.0, 2.0], [3.0, 4.0, 5.0]]


def test_a_save_that_is_asked_for_between_steps_is_no_iteration(seen):
    clock = ManualClock()
    with Checkpointer(MemoryTier(), {"x": 1}, every=4, clock=clock) as ckpt:
        for _ in range(8):
            clock.advance(1.0)
            ckpt.after_step()
            if ckpt.step == 6:
                ckpt.save(wait=True)
    assert [[one.seconds for one in interval] for interval in seen] == [
        [1.0] * 3,
        [1.0] * 2,
        [1.0] * 2,
    ]


def test_the_wait_of_a_save_that_was_asked_to_wait_is_time_blocked():
    clock = ManualClock()

    class Slow(ForwardingTier):
        def around(self, verb, name, call):
            if verb == "write_shard":
                clock.advance(8.0)
            return call()

    with Checkpointer(Slow(MemoryTier()), {"x": 1}, every=4, clock=clock) as ckpt:
        ckpt.after_step()
        ckpt.save(wait=True)
        (record,) = ckpt.history
    assert record.blocked_s == 8.0


def test_slow_storage_is_persist_time_and_no_time_of_the_loop():
    clock = ManualClock()
    loop_goes_on = threading.Event()

    class Slow(ForwardingTier):
        def around(self, verb, name, call):
            if verb == "write_shard":
                assert loop_goes_on.wait(30)
                clock.advance(8.0)
            return call()

    with Checkpointer(Slow(MemoryTier()), {"x": 1}, every=1, clock=clock) as ckpt:
        ckpt.after_step()
        loop_goes_on.set()
        ckpt.wait()
        (record,) = ckpt.history
    assert record.persist_s == 8.0
    assert (record.waited_s, record.blocked_s) == (0.0, 0.0)
    assert record.copy_s < 1.0


def test_copies_are_measured_by_the_clock_that_was_given():
    with Checkpointer(MemoryTier(), {"x": 1}, every=1, clock=ManualClock()) as ckpt:
        ckpt.after_step()
        ckpt.wait()
        (record,) = ckpt.history
    assert record.copy_s == 0.0


def test_a_wait_for_the_save_before_that_ends_in_no_save_is_no_cost_of_saving():
    clock = ManualClock()
    times = StepTimer(clock, gpu=None)

    def iteration(*, waits_s=0.0):
        clock.advance(1.0)
        times.enter()
        if waits_s:
            clock.advance(waits_s)
            times.add_save_wait()
        times.exit(is_loaded=False, is_copying=False)

    iteration()
    iteration(waits_s=5.0)
    iteration()
    iteration()
    times.enter()
    held_up, *rest = [one for one in times.resolve(times.take()) if one.blocked_s]
    assert (held_up.blocked_s, held_up.queued_s) == (5.0, 5.0)
    assert not rest
