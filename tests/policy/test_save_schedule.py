"""The schedule of a tuned run: what it tells the tuner and stores, and when a save is due."""

from dataclasses import replace

import pytest

from dcp_checkfreq.policy.constants import PROFILE_STEPS
from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.observation import Iteration, summarise
from dcp_checkfreq.policy.save_schedule import SaveSchedule
from dcp_checkfreq.policy.save_timings import SaveTimings
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.testing import MemoryTier


@pytest.fixture
def ranks():
    one = Ranks(timeout_s=10.0)
    yield one
    one.close()


@pytest.fixture
def schedule_of(ranks):
    root = MemoryTier()

    def make(max_overhead=0.035, mtbf_s=None, steps_per_epoch=None):
        return SaveSchedule(
            root, ranks, lambda: ["a job"], every=None, max_overhead=max_overhead, mtbf_s=mtbf_s,
            steps_per_epoch=steps_per_epoch, mode=None,
        )  # fmt: skip

    return make


def iterations(steps, seconds=1.0, loaded=False):
    return [
        Iteration(seconds=seconds, blocked_s=0.0, waited_s=0.0, update_s=0.1, loaded=loaded)
    ] * steps


def profile(steps=50, copy=0.5, persist=3.0, call=0.0, gpu_bytes=(0, 0)):
    return SaveTimings(
        interval=summarise(iterations(steps)), mode=Mode.BLOCKING, copied_bytes=10,
        written_bytes=10, state_bytes=10, copy_s=copy, persist_s=persist, call_s=call,
        gpu_used_bytes=gpu_bytes[0], gpu_total_bytes=gpu_bytes[1], is_first=True,
    )  # fmt: skip


def later(steps, call=0.0, is_first=False):
    rows = [*iterations(min(steps, 4), loaded=True), *iterations(max(0, steps - 4))]
    rows[0] = replace(rows[0], blocked_s=call)
    return SaveTimings(
        interval=summarise(rows), mode=Mode.CPU, copied_bytes=10, state_bytes=10, copy_s=0.5,
        persist_s=3.0, call_s=call, is_first=is_first,
    )  # fmt: skip


def decide(schedule, *ranks):
    schedule.save_started()
    schedule.apply(schedule.decide(list(ranks)))
    schedule.store()
    return schedule.interval_steps


def run(schedule, call=0.0):
    """See one cold save and three that are judged: what the profile said is confirmed then."""
    for number in range(4):
        decide(schedule, later(schedule.interval_steps, call, is_first=number == 0))


# --- what the tuner is told ---


def test_the_baseline_has_the_weight_of_the_iterations_that_were_measured(schedule_of):
    schedule = schedule_of()
    decide(schedule, profile(steps=49), profile(steps=37), profile(steps=50))
    assert schedule._tuning.baseline.pace.steps == 37


def test_what_the_call_took_is_part_of_the_first_interval_but_not_beside_a_gpu(schedule_of):
    assert decide(schedule_of(), profile(call=0.7)) == 20
    timings = profile(call=0.7, gpu_bytes=(1, 10))  # the GPU has work while the host is busy
    assert timings.profile().call_s == 0.0
    assert timings.call_s == 0.7


def test_a_save_that_failed_on_one_rank_is_no_profile(schedule_of):
    schedule = schedule_of()
    assert schedule.decide([profile(), replace(profile(), failed=True)]) is None
    assert schedule.wants_profile
    assert decide(schedule, profile(), profile()) == 4


# --- when a save is due ---


def due_after(schedule):
    for steps in range(1, 2000):
        schedule.step_done()
        if schedule.is_due(steps):
            return steps
    return None


def test_after_a_profile_the_first_save_is_early_and_the_one_after_it_is_not(schedule_of):
    schedule = schedule_of()
    assert decide(schedule, profile(persist=300.0)) == 301
    assert due_after(schedule) == PROFILE_STEPS
    schedule.save_started()
    assert schedule.interval_steps == 301
    assert due_after(schedule) == 301  # the save is still under way


def test_after_the_early_save_the_interval_is_that_of_warm_buffers(schedule_of):
    schedule = schedule_of()
    decide(schedule, profile(persist=300.0))
    assert decide(schedule, later(PROFILE_STEPS, is_first=True)) == 4
    assert due_after(schedule) == 4


# --- what is stored ---


def test_an_interval_is_taken_over_under_the_same_budget_and_failure_rate_only(schedule_of):
    schedule = schedule_of(mtbf_s=1e5)
    decide(schedule, profile(call=0.5))
    run(schedule, call=0.5)
    k = schedule.interval_steps
    assert k == 316  # sqrt(2 * 0.5 * 1e5)
    assert schedule_of(mtbf_s=1e5).interval_steps == k
    for other in ({"mtbf_s": None}, {"mtbf_s": 1e7}, {"mtbf_s": 1e5, "max_overhead": 0.01}):
        assert schedule_of(**other)._tuning.warming
    assert schedule_of(mtbf_s=None).interval_steps < k


def test_deciding_stores_nothing_by_itself(schedule_of):
    """The end of a save waits for the decision; on a busy disk storing takes seconds."""
    schedule = schedule_of()
    schedule.decide([profile()])
    assert schedule_of().interval_steps is None
    schedule.store()
    assert schedule_of().interval_steps == 4


def test_an_interval_from_the_first_save_alone_is_checked_after_a_restart_too(schedule_of):
    decide(schedule_of(), profile(persist=1e6))  # a clock that jumped
    again = schedule_of()
    assert again.interval_steps == 1_000_000
    assert due_after(again) == PROFILE_STEPS
    assert decide(again, later(PROFILE_STEPS, is_first=True)) == 4


def test_an_interval_that_later_saves_confirm_is_stored_as_that(schedule_of):
    schedule = schedule_of()
    decide(schedule, profile())
    run(schedule)
    assert schedule.interval_steps == 4
    again = schedule_of()
    assert again.interval_steps == 4
    assert not again._tuning.warming
