"""The pace of a job without saves: joined, renewed, and dropped when the job has another one."""

import random
import statistics

import pytest

from dcp_checkfreq.policy.baseline import (
    Baseline,
    baseline_error_s,
    baseline_of,
    change_s,
    renewed,
)
from dcp_checkfreq.policy.observation import Iteration, Pace, summarise

BUDGET = 0.035


def interval(*free, beside=()):
    return summarise(
        [Iteration(seconds=s, blocked_s=0.0, waited_s=0.0, update_s=0.0, loaded=loaded)
         for seconds, loaded in ((free, False), (beside, True)) for s in seconds]
    )  # fmt: skip


def after(baseline, *intervals):
    changed = False
    for one in intervals:
        baseline, changed = renewed(baseline, one, BUDGET)
    return baseline, changed


def test_iterations_without_a_save_renew_it_and_others_make_it_older():
    baseline, _ = after(baseline_of(1.0, 10), interval(beside=[1.2] * 4))
    assert (baseline.age_saves, baseline.iteration_s) == (1, 1.0)
    baseline, changed = after(baseline, interval(1.001, 1.001, beside=[1.2] * 4))
    assert (baseline.age_saves, changed) == (0, False)
    assert baseline.pace.steps == 12


def test_three_iterations_of_another_pace_are_believed_at_once():
    baseline, changed = after(baseline_of(1.0, 50), interval(1.5, 1.5, 1.5))
    assert changed
    assert baseline.paces == (Pace(steps=3, typical_s=1.5, spread_s=0.0),)


def test_a_lone_odd_iteration_is_not_believed_but_two_in_a_row_are():
    baseline, changed = after(baseline_of(1.0, 50), interval(9.0))
    assert (changed, baseline.iteration_s) == (False, 1.0)
    assert after(baseline, interval(1.0), interval(9.0))[0].iteration_s == 1.0
    baseline, changed = after(baseline, interval(9.0))
    assert changed
    assert baseline.iteration_s == 9.0


def test_faster_iterations_beside_a_save_show_that_it_is_too_slow():
    baseline, changed = after(baseline_of(2.0, 50), interval(beside=[1.1] * 4))
    assert changed
    assert (baseline.iteration_s, baseline.age_saves) == (1.1, 1)
    slower, changed = after(baseline_of(1.0, 50), interval(beside=[1.1] * 4))
    assert (changed, slower.iteration_s) == (False, 1.0)  # that is what saves may do


def test_faster_iterations_replace_a_profile_of_fewer_than_they_are():
    baseline, changed = after(baseline_of(1e6, 1), interval(beside=[1.0]))
    assert (changed, baseline.iteration_s) == (True, 1.0)
    baseline, changed = after(baseline_of(1e6, 10), interval(beside=[1.0]))
    assert (changed, baseline.iteration_s) == (False, 1e6)


def test_noise_alone_is_seldom_taken_for_a_change_and_its_size_is_found():
    changes, noises = 0, []
    for seed in range(60):
        chance = random.Random(seed)
        baseline = baseline_of(1.0, 50)
        for number in range(40):
            seen = interval(*[chance.uniform(0.9, 1.1) for _ in range(4)])
            baseline, changed = renewed(baseline, seen, BUDGET)
            changes += changed and number >= 8  # by then the noise is known
        assert baseline.iteration_s == pytest.approx(1.0, abs=0.1)
        noises.append(baseline.noise)
    assert changes <= 0.02 * 60 * 32
    assert statistics.median(noises) == pytest.approx(0.2 / 12**0.5, rel=0.2)


def test_iterations_beside_a_save_say_nothing_about_noise():
    """Those that are only in part beside it are faster, in every save the same."""
    baseline, _ = after(baseline_of(1.0, 10), *[interval(1.0, 1.0, beside=[1.5, 1.5, 1.1])] * 4)
    assert baseline.noise == 0.0
    assert after(baseline_of(1.0, 10), interval(beside=[1.5, 1.1]))[0].noises == ()


def test_noise_is_found_where_no_interval_has_more_than_one_free_iteration():
    noises = []
    for seed in range(40):
        chance = random.Random(seed)
        lone = [interval(chance.uniform(0.9, 1.1), beside=[1.2] * 3) for _ in range(17)]
        noises.append(after(baseline_of(1.0, 10), *lone)[0].noise)
    assert statistics.median(noises) == pytest.approx(0.2 / 12**0.5, rel=0.2)


def test_more_measurements_are_kept_if_they_are_of_a_single_iteration_each():
    lone, _ = after(baseline_of(1.0, 10), *[interval(1.0)] * 30)
    assert lone.pace.steps == 12
    three, _ = after(baseline_of(1.0, 10), *[interval(1.0, 1.0, 1.0)] * 30)
    assert len(three.paces) == 5


def test_a_difference_that_is_small_beside_the_budget_is_none():
    quiet = Baseline(paces=(Pace(steps=50, typical_s=1.0),), noises=(0.0,))
    assert change_s(quiet, Pace(steps=50, typical_s=1.017), BUDGET) == 0.0
    assert change_s(quiet, Pace(steps=50, typical_s=1.018), BUDGET) == pytest.approx(0.018)
    assert change_s(quiet, Pace(steps=50, typical_s=0.9), BUDGET) == pytest.approx(-0.1)
    noisy = Baseline(paces=(Pace(steps=50, typical_s=1.0),), noises=(0.1,))
    assert change_s(noisy, Pace(steps=3, typical_s=1.2), BUDGET) == 0.0


def test_the_error_of_a_baseline_falls_with_its_iterations_and_adds_up_over_those_compared():
    few, many = (Baseline(paces=(Pace(steps=n, typical_s=2.0),), noises=(0.05,)) for n in (4, 16))
    assert baseline_error_s(few, 10) == pytest.approx(2 * baseline_error_s(many, 10))
    assert baseline_error_s(few, 10) == pytest.approx(10 * 1.2533 * 0.05 * 2.0 / 2)


def test_a_baseline_of_nothing_measured_is_replaced_by_the_first_that_is():
    for broken in (0.0, float("nan"), -1.0, float("inf")):
        baseline, _ = after(baseline_of(broken, 0), interval(1.0, 1.0, 1.0))
        assert baseline.iteration_s == 1.0
