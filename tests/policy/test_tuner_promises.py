"""What a crash loses stays within what was said; saves are published in time, though they swing."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from simulated_job import Job, steady, stepped

from dcp_checkfreq.policy.interval import SHORTEST_ITERATION_S, forecast

FEW = examples(40)

JOBS = st.builds(
    dict,
    ti=st.floats(0.2, 5).map(steady),
    tc=st.floats(0, 3),
    ts=st.floats(0.01, 20).map(steady),
    slow_copy=st.floats(0, 0.5).map(steady),
    slow_persist=st.floats(0, 0.5).map(steady),
    blocked=st.floats(0, 0.5).map(steady),
    noise=st.sampled_from([0.0, 0.02, 0.1]),
    p=st.sampled_from([0.02, 0.035, 0.1]),
)


def lost_steps(job):
    """Return for every save but the last what a crash just before the next one's end loses."""
    return [
        published - saved
        for saved, published in zip(job.save_steps, job.published_steps[1:], strict=False)
    ]


def said_steps(job):
    """Return what was promised while each of these could have happened."""
    bounds = [
        one.forecast.recovery_bound_s / max(job.tuning.baseline.iteration_s, SHORTEST_ITERATION_S)
        for one in job.decisions
    ]
    return [max(bounds[max(0, n - 1) : n + 1]) for n in range(len(bounds) - 1)]


# --- a crash ---


@FEW
@given(JOBS)
def test_a_crash_loses_no_more_than_was_said(job):
    job = Job(**job)
    job.run(70)
    settled = slice(40, None)
    for lost, said in zip(lost_steps(job)[settled], said_steps(job)[settled], strict=True):
        # with noise an iteration more may fit beside a save
        assert lost <= said * (1 + job.noise) + (1 if job.noise else 1e-6)


def test_a_gap_at_the_shortest_interval_is_lost_work_and_is_said():
    job = Job()
    job.run(60)
    bounds = {one.gap_steps: one.forecast.recovery_bound_s for one in job.decisions}
    assert bounds == {0: pytest.approx(8.0), 3: pytest.approx(11.0)}
    assert 8 < max(lost_steps(job)) <= 11


@FEW
@given(JOBS)
def test_a_gap_that_breaks_two_intervals_is_as_short_as_can_be(job):
    job = Job(**job)
    job.run(70)
    for one in job.decisions:
        if one.gap_steps > 3:
            bound_s = 2 * one.interval_steps * job.tuning.baseline.iteration_s
            assert one.forecast.recovery_bound_s <= bound_s * 1.1


@given(
    k=st.integers(1, 1000), gap=st.integers(-50, 8), save=st.floats(0, 1e4),
    ti=st.floats(0.01, 20),
)  # fmt: skip
def test_the_bound_is_two_intervals_or_interval_gap_and_save(k, gap, save, ti):
    bound_s = forecast(
        k, iteration_s=ti, cost_s=0.0, save_s=0.0, longest_save_s=save, gap_steps=gap
    ).recovery_bound_s
    assert bound_s >= 2 * k * ti * (1 - 1e-9)
    assert bound_s <= (2 * k + max(0, gap)) * ti * (1 + 1e-9)
    if k * ti + gap * ti + save + ti <= 2 * k * ti:
        assert bound_s == pytest.approx(2 * k * ti)


# --- saves that swing ---


def every_sixth(chance, number):
    return 9.0 if number % 6 == 0 else 3.0


def one_in_five(chance, number):
    return 9.0 if chance.random() < 0.2 else 3.0


def anything(chance, number):
    return chance.uniform(2, 10)


def often_double(chance, number):
    return chance.choice([3.0, 6.0])


@pytest.mark.parametrize("swing", [every_sixth, one_in_five, anything, often_double])
def test_saves_that_swing_are_nearly_always_published_before_the_next_one(swing):
    late = saves = 0
    for seed in range(4):
        # long ones first, so that the interval has to come down to where they swing
        job = Job(
            ts=lambda n, seed=seed: 12.0 if n < 12 else swing(random.Random(7919 * n + seed), n),
            noise=0.02,
            seed=seed,
        )
        job.run(150)
        late += sum(queued > 0 for queued in job.queued[24:])
        saves += len(job.queued[24:])
    assert late <= 0.04 * saves


def test_an_interval_does_not_shrink_below_the_longest_of_five():
    job = Job(ts=lambda n: 12.0 if n < 12 else 9.0 if n % 4 == 0 else 3.0)
    assert min(job.run(80)) >= 10


@pytest.mark.parametrize("busy", [4, 12, 40])
def test_after_a_busy_period_it_is_back_within_fifteen_saves(busy):
    job = Job(ts=stepped(3.0, 30.0, 12, 12 + busy))
    job.run(12 + busy)
    assert job.decision.interval_steps == 31
    job.run(15)
    assert job.decision.interval_steps == 4


def test_after_two_busy_periods_it_is_back_once_they_are_sixteen_saves_ago():
    job = Job(ts=lambda n: 30.0 if 10 <= n < 14 or 20 <= n < 24 else 3.0)
    job.run(24)
    assert job.decision.interval_steps == 31
    assert job.run(24)[-1] == 4
    assert set(job.run(20)) == {4}


def test_one_long_save_does_not_keep_an_interval_long():
    job = Job(ts=lambda n: 30.0 if 12 <= n < 24 or n == 27 else 3.0)
    job.run(48)
    assert job.decision.interval_steps == 4
