"""The interval follows the costs of a simulated job: up at once, down step by step, then it stays.

All jobs run in hand-set time, see simulated_job.py.
"""

import math
import pickle
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from property_examples import examples
from simulated_job import Job, steady, stepped

from dcp_checkfreq.policy.costs import Costs
from dcp_checkfreq.policy.interval import (
    MAX_INTERVAL_STEPS,
    Mode,
    interval_steps,
)
from dcp_checkfreq.policy.observation import Iteration, summarise
from dcp_checkfreq.policy.save_timings import SaveTimings
from dcp_checkfreq.policy.tuner import observe, opening, start

BUDGET = 0.035
SLOW = examples(40)


def changes(intervals):
    return sum(one != other for one, other in pairwise(intervals))


def growths(intervals):
    return sum(one < other for one, other in pairwise(intervals))


def costs_of(ti=1.0, tw=0.1, tc=0.5, ts=3.0):
    return Costs(
        iteration_s=ti, update_s=tw, snapshot_gpu_s=None, snapshot_cpu_s=tc, persist_s=ts,
        state_bytes=1, gpu_used_bytes=0, gpu_total_bytes=0,
    )  # fmt: skip


def save_of(*iterations, copy=0.5, persist=3.0, mode=Mode.CPU, **more):
    return SaveTimings(
        interval=summarise(iterations), mode=mode, copy_s=copy, persist_s=persist, copied_bytes=1,
        state_bytes=1, **more,
    )  # fmt: skip


def iteration(seconds=1.0, blocked=0.0, waited=0.0, loaded=False):
    return Iteration(
        seconds=seconds, blocked_s=blocked, waited_s=waited, update_s=0.1, loaded=loaded
    )


# Iterations that are only in part beside a persist differ much, but saves cost all the same.
PARTLY_BESIDE = {
    "ti": steady(0.625), "tc": 0.0625, "ts": steady(2.0), "slow_copy": steady(0.0),
    "slow_persist": steady(0.5), "blocked": steady(0.0), "p": 0.1,
}  # fmt: skip

JOBS = st.builds(
    dict,
    ti=st.floats(0.2, 5).map(steady),
    tc=st.floats(0, 3),
    ts=st.floats(0.01, 20).map(steady),
    slow_copy=st.floats(0, 0.5).map(steady),
    slow_persist=st.floats(0, 0.5).map(steady),
    blocked=st.floats(0, 0.5).map(steady),
    p=st.sampled_from([0.02, 0.035, 0.1]),
)


@SLOW
@given(JOBS)
def test_on_steady_input_the_interval_settles_and_stays(job):
    job = Job(**job)
    job.run(40)
    settled = job.run(20)
    assert len(set(settled)) == 1


@SLOW
@given(JOBS)
@example(PARTLY_BESIDE)
def test_settled_overhead_is_within_the_budget_and_saves_are_finished_in_time(job):
    job = Job(**job)
    job.run(40)
    job.overheads.clear()
    job.run(12)
    assert max(job.overheads) <= job.p * 1.02 + 0.02 / job.decision.interval_steps
    k_s = job.decision.interval_steps * job.tuning.baseline.iteration_s
    assert job.tuning.recent[-1].left_s <= k_s * (1 + 1e-6)


@SLOW
@given(
    ti=st.floats(0.05, 5), tc=st.floats(0, 5), ts=st.floats(0.01, 40),
    p=st.sampled_from([0.01, 0.035, 0.1]),
)  # fmt: skip
def test_without_slow_down_the_profile_was_right_and_nothing_changes(ti, tc, ts, p):
    job = Job(ti=steady(ti), tc=tc, ts=steady(ts), p=p)
    first = job.decision.interval_steps
    assert first == interval_steps(job.tuning.costs, Mode.CPU, p)
    found = job.run(40)
    assert max(found) <= first + 1  # a copy that spans several iterations is hidden by one only
    assert changes(found) <= 1


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"tc": 2.0},
        {"tc": 0.2, "ts": steady(0.5)},
        {"slow_persist": steady(0.2)},
        {"blocked": steady(0.3)},
        {"ts": steady(30.0)},
    ],
    ids=["hidden", "waits", "short", "slows", "blocks", "long"],
)
def test_with_ten_percent_noise_it_changes_a_few_times_and_then_stays(kind, seed):
    job = Job(noise=0.1, seed=seed, **kind)
    found = job.run(200)
    assert growths(found) <= 6
    assert growths(found[100:]) <= 2  # each a needless one, with its way back step by step
    quiet = sum(one == other for one, other in pairwise(found[30:]))
    assert quiet >= 0.9 * len(found[31:])


def test_with_two_percent_noise_it_stays_in_a_narrow_band():
    for kind in ({}, {"tc": 2.0}, {"slow_persist": steady(0.2)}, {"blocked": steady(0.3)}):
        for seed in range(4):
            found = Job(noise=0.02, seed=seed, **kind).run(150)[50:]
            assert changes(found) <= 6
            assert max(found) <= 1.25 * min(found) + 1


@pytest.mark.parametrize("seed", range(8))
def test_under_noise_it_does_not_stay_dear_where_a_single_iteration_is_free(seed):
    job = Job(noise=0.1, seed=seed, slow_persist=steady(0.2))  # 12 % at k 4 if it stays
    job.run(50)
    job.overheads.clear()
    job.run(50)
    assert sorted(job.overheads)[25] <= 1.5 * BUDGET


STEPS_UP = {
    "persist": ({"ts": stepped(3.0, 30.0, 12)}, 31),
    "blocked": ({"blocked": stepped(0.0, 1.0, 12)}, 29),
    "slower": ({"slow_persist": stepped(0.0, 0.5, 12)}, 22),
    "waits": ({"tc": 1.0, "contention": stepped(0.9, 1.9, 12), "mode": Mode.CPU}, 29),
}


@pytest.mark.parametrize("name", STEPS_UP)
def test_after_a_step_up_it_is_within_the_budget_from_the_third_interval_on(name):
    kind, enough = STEPS_UP[name]
    job = Job(**kind)
    before = job.run(12)  # save 12 is the first dear one; what it costs is seen with save 13
    assert len(set(before[:11])) == 1
    grown = job.run(2)
    assert grown[-1] >= enough
    job.run(1)  # the interval in which the decision fell
    job.overheads.clear()
    job.run(10)
    assert max(job.overheads) <= BUDGET * 1.05


LOADS = {
    "persist": {"ts": stepped(3.0, 30.0, 12, 24)},
    "blocked": {"blocked": stepped(0.0, 1.0, 12, 24)},
    "slower": {"slow_persist": stepped(0.0, 0.5, 12, 24)},
}


@pytest.mark.parametrize("name", LOADS)
def test_when_the_load_ends_it_comes_back_down_step_by_step_to_where_it_was(name):
    job = Job(**LOADS[name])
    first = job.decision.interval_steps
    loaded = job.run(24)
    assert loaded[-1] > 4 * first
    down = job.run(24)
    assert down[-1] == first
    assert down == sorted(down, reverse=True)
    assert len(set(down)) >= 5
    for one, other in pairwise(down):
        assert other >= one - max(1, (one - first) // 2)  # half of the distance at most


def test_a_second_job_on_the_same_storage_is_followed_up_and_down_under_noise():
    for seed in range(6):
        job = Job(
            ts=stepped(3.0, 12.0, 15, 40), slow_persist=stepped(0.0, 0.3, 15, 40), noise=0.02,
            seed=seed,
        )  # fmt: skip
        alone = job.run(15)[-1]
        job.run(4)
        job.overheads.clear()
        beside = job.run(20)[-1]
        assert beside > 3 * alone
        assert sorted(job.overheads)[len(job.overheads) // 2] <= BUDGET * 1.1
        assert job.run(45)[-1] <= alone + 1


@SLOW
@given(where=st.integers(8, 120), seconds=st.floats(0, 1000))
def test_one_slow_iteration_changes_nothing(where, seconds):
    job = Job(odd={where: seconds})
    assert set(job.run(40)) == {4}


@SLOW
@given(number=st.integers(2, 25), factor=st.floats(1, 100), blocked=st.floats(0, 50))
def test_one_dear_save_changes_nothing(number, factor, blocked):
    job = Job(
        ts=lambda n: 3.0 * factor if n == number else 3.0,
        blocked=lambda n: blocked if n == number else 0.0,
    )
    assert set(job.run(40)) == {4}


@pytest.mark.parametrize("after", [0.3, 0.6, 1.1, 1.3, 2.0, 4.0])
def test_a_job_that_changes_its_own_pace_is_not_taken_for_overhead(after):
    """Saves are always in flight at the shortest interval, so the baseline was never free."""
    job = Job(ti=stepped(1.0, after, 60))
    job.run(40)
    settled = job.run(20)
    needed = interval_steps(costs_of(ti=after, tw=0.1 * after), Mode.CPU, BUDGET)
    assert settled[-1] == pytest.approx(needed, abs=1)
    assert max(job.intervals()) <= max(4, needed + 1)
    assert job.tuning.baseline.iteration_s == pytest.approx(after, rel=BUDGET)


@pytest.mark.parametrize("per_step", [0.002, 0.01, -0.002])
def test_a_job_that_drifts_is_not_taken_for_overhead(per_step):
    job = Job(ti=lambda step: min(max(1.0 + per_step * step, 0.5), 3.0))
    found = job.run(100)
    fewest = interval_steps(costs_of(ti=3.0, tw=0.3), Mode.CPU, BUDGET)
    most = interval_steps(costs_of(ti=0.5, tw=0.05), Mode.CPU, BUDGET)
    assert fewest <= min(found)
    assert max(found) <= (most if per_step < 0 else 4)
    end_s = job.ti(job.step)
    assert job.tuning.baseline.iteration_s == pytest.approx(end_s, rel=2 * BUDGET)


def test_overhead_is_not_taken_for_a_slower_job():
    """Iterations beside saves get slower and slower; those without do not."""
    job = Job(slow_persist=lambda n: min(0.02 * n, 0.6))
    job.run(60)
    assert job.tuning.baseline.iteration_s == pytest.approx(1.0, rel=0.01)
    assert job.decision.interval_steps > 25
    job.overheads.clear()
    job.run(10)
    assert max(job.overheads) <= BUDGET * 1.05


def test_a_gap_is_asked_for_when_the_baseline_is_old_and_makes_that_interval_longer():
    job = Job()
    job.run(60)
    gaps = [decision.gap_steps for decision in job.decisions]
    assert set(gaps) == {0, 3}
    assert gaps.count(3) <= len(gaps) / 8
    between = [b - a for a, b in zip(job.save_steps, job.save_steps[1:], strict=False)]
    assert set(between) == {4, 7}
    assert job.tuning.baseline.age_saves <= 9
    assert any("the next save is 3 later" in decision.reason for decision in job.decisions)


def test_an_interval_with_free_iterations_needs_no_gap():
    job = Job(tc=2.0)
    job.run(60)
    assert not any(decision.gap_steps for decision in job.decisions)


def test_a_job_that_is_nearly_always_saving_over_budget_renews_the_baseline_before_it_judges():
    job = Job(ts=steady(3.4), slow_persist=stepped(0.0, 0.1, 12))
    job.run(20)
    first_gap = next(i for i, d in enumerate(job.decisions) if "must be seen first" in d.reason)
    grown = next(i for i, d in enumerate(job.decisions) if "(was" in d.reason)
    assert first_gap == grown - 1


def test_nothing_is_judged_by_an_old_baseline_while_a_gap_is_still_to_come_nor_afterwards():
    """A save that ends late answers for an interval that was over before the gap was asked for."""
    quiet = [iteration(loaded=True)] * 4
    slower = [iteration(1.2, loaded=True)] * 4  # the job itself, as it turns out
    free = [iteration(1.2)] * 3
    tuning = start(costs_of(), max_overhead=BUDGET)
    seen = []
    for interval in (quiet, quiet, slower, slower, slower, slower + free, slower, slower):
        tuning, decision = observe(tuning, save_of(*interval))
        seen.append((decision.interval_steps, decision.gap_steps))
    assert seen == [(4, 0), (4, 0), (4, 3), (4, 3), (4, 3), (4, 0), (4, 0), (4, 0)]
    assert tuning.baseline.iteration_s == pytest.approx(1.2)


@pytest.mark.parametrize("knows_copying", [True, False])
def test_an_overlapped_copy_that_costs_more_than_a_blocking_one_is_given_up(knows_copying):
    job = Job(tc=3.0, contention=steady(3.0), knows_copying=knows_copying)
    job.run(5)
    assert job.decision.mode is Mode.BLOCKING
    said = [one.reason for one in job.decisions if "waits for the copy" in one.reason]
    assert len(said) == 1
    assert "a copy beside it cost" in said[0]
    job.overheads.clear()
    settled = job.run(12)
    assert len(set(settled[5:])) == 1
    assert max(job.overheads[2:]) <= BUDGET * 1.02
    assert settled[-1] == interval_steps(costs_of(tc=3.0), Mode.BLOCKING, BUDGET)


def test_overlapping_is_tried_again_less_and_less_often_while_it_stays_dear():
    job = Job(tc=3.0, contention=steady(3.0))
    job.run(200)
    modes = [decision.mode for decision in job.decisions]
    tries = [n for n in range(1, len(modes)) if modes[n - 1 : n + 1] == [Mode.BLOCKING, Mode.CPU]]
    assert 3 <= len(tries) <= 4
    assert tries[2] - tries[1] > 1.5 * (tries[1] - tries[0])
    assert modes.count(Mode.CPU) < 25


def test_overlapping_comes_back_for_good_once_it_is_cheap_again():
    job = Job(tc=0.5, contention=stepped(6.0, 1.0, at=10))
    job.run(8)
    assert job.decision.mode is Mode.BLOCKING
    job.run(100)
    assert {decision.mode for decision in job.decisions[-60:]} == {Mode.CPU}


def test_iterations_slowed_by_the_copy_count_against_overlapping():
    job = Job(tc=0.3, contention=steady(3.0), slow_copy=steady(2.0))
    job.run(6)
    assert job.decision.mode is Mode.BLOCKING


def test_one_dear_copy_does_not_end_overlapping_nor_does_a_chosen_mode_change():
    once = Job(tc=2.0, contention=lambda n: 5.0 if n == 6 else 1.0)
    once.run(20)
    assert once.decision.mode is Mode.CPU
    chosen = Job(tc=3.0, contention=steady(3.0), mode=Mode.CPU)
    chosen.run(20)
    assert chosen.decision.mode is Mode.CPU


def test_a_copy_that_hides_is_never_given_up():
    for seed in range(6):
        job = Job(tc=0.5, slow_copy=steady(0.3), noise=0.1, seed=seed)
        job.run(60)
        assert job.decision.mode is Mode.CPU


def test_the_first_save_of_a_process_and_failed_ones_do_not_judge():
    tuning = start(costs_of(), max_overhead=BUDGET)
    dear = save_of(*[iteration(blocked=100.0, loaded=True)] * 4, persist=500.0)
    for _ in range(6):
        for odd in (replace(dear, is_first=True), replace(dear, failed=True)):
            tuning, decision = observe(tuning, odd)
            assert decision.interval_steps == opening(tuning).interval_steps == 4
            assert decision.overhead_seen is None
    assert "no measure" in decision.reason
    for _ in range(2):
        tuning, decision = observe(tuning, dear)
    assert decision.interval_steps > 1000


def test_a_failure_rate_lengthens_the_interval_and_tells_the_goodput():
    without, with_rate = Job(tc=1.2), Job(tc=1.2, mtbf_s=36_000.0)
    assert without.run(30)[-1] < with_rate.run(30)[-1]
    assert len(set(with_rate.intervals()[5:])) == 1
    assert without.decision.forecast.goodput is None
    assert 0.9 < with_rate.decision.forecast.goodput < 1
    k = with_rate.decision.interval_steps
    assert with_rate.decision.forecast.recovery_bound_s == pytest.approx(2 * k)


def test_a_restarted_job_begins_where_the_one_before_ended():
    job = Job(slow_persist=steady(0.2))
    k = job.run(40)[-1]
    again = start(job.tuning.costs, max_overhead=BUDGET, first_interval_steps=k)
    assert opening(again).interval_steps == k
    assert again.baseline.iteration_s == pytest.approx(1.0)
    fresh = start(job.tuning.costs, max_overhead=BUDGET)
    assert fresh.interval_steps == 4  # from the costs alone


def test_a_line_for_the_log_says_what_was_seen_and_what_follows():
    job = Job(blocked=stepped(0.0, 1.0, 5))
    job.run(8)
    lines = [decision.reason for decision in job.decisions]
    assert (
        "save every 29 iterations (was 4): the last save cost 25.0% of the training time, "
        "the budget is 3.5%"
    ) in lines
    assert all("\n" not in line for line in lines)
    assert opening(job.tuning).reason.startswith("save every 29 iterations ")


def test_state_and_decision_pickle():
    job = Job(slow_persist=steady(0.2))
    job.run(30)
    assert pickle.loads(pickle.dumps(job.tuning)) == job.tuning
    assert pickle.loads(pickle.dumps(job.decision)) == job.decision


BROKEN = st.floats() | st.sampled_from([0.0, -1.0, math.nan, math.inf])
BROKEN_SAVES = st.builds(
    SaveTimings,
    interval=st.lists(
        st.builds(
            Iteration, seconds=BROKEN, blocked_s=BROKEN, waited_s=BROKEN, update_s=BROKEN,
            loaded=st.booleans(), copying=st.booleans(), queued_s=BROKEN,
        ),
        max_size=6,
    ).map(summarise),
    mode=st.sampled_from(Mode), copy_s=BROKEN, persist_s=BROKEN, copied_bytes=st.just(1),
    state_bytes=st.just(1), is_first=st.booleans(), failed=st.booleans(),
)  # fmt: skip


@given(values=st.tuples(BROKEN, BROKEN, BROKEN, BROKEN), seen=st.lists(BROKEN_SAVES, max_size=12))
def test_whatever_was_measured_the_decision_is_usable(values, seen):
    ti, tw, tc, ts = values
    tuning = start(costs_of(ti=ti, tw=tw, tc=tc, ts=ts), max_overhead=BUDGET, mtbf_s=3600.0)
    for save in seen:
        tuning, decision = observe(tuning, save)
        assert 1 <= decision.interval_steps <= MAX_INTERVAL_STEPS
        assert 0 <= decision.gap_steps <= 8
        assert decision.mode in Mode
        assert decision.overhead_seen is None or decision.overhead_seen >= 0


def test_the_same_saves_lead_to_the_same_decisions():
    one, other = Job(noise=0.1, seed=5), Job(noise=0.1, seed=5)
    one.run(60)
    other.run(60)
    assert one.decisions == other.decisions


@pytest.mark.parametrize("wrong", [{"max_overhead": 0}, {"mtbf_s": -1.0}, {"mode": Mode.GPU}])
def test_what_cannot_be_meant_is_refused(wrong):
    with pytest.raises(ValueError, match=r"max_overhead|mtbf_s|mode GPU"):
        start(costs_of(), **{"max_overhead": BUDGET, **wrong})
