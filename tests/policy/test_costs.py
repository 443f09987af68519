"""Estimates that a few wild samples do not move, and the worst of all ranks."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.policy.costs import Costs, profile_steps, spread_s, typical_s, worst

ANYTHING = st.lists(st.floats() | st.just(0.0), max_size=40)
SECONDS = st.floats(0, 1e4)
COSTS = st.builds(
    Costs,
    iteration_s=SECONDS,
    update_s=SECONDS,
    snapshot_gpu_s=st.none() | SECONDS,
    snapshot_cpu_s=SECONDS,
    persist_s=SECONDS,
    state_bytes=st.integers(0, 10**12),
    gpu_used_bytes=st.integers(0, 10**11),
    gpu_total_bytes=st.integers(0, 10**11),
    call_s=SECONDS,
)


@pytest.mark.parametrize(
    ("epoch", "steps"),
    [
        *[(None, 50), (0, 50), (-3, 50), (10**6, 50), (5000, 50), (4999, 49), (2000, 20)],
        *[(1000, 10), (999, 10), (100, 10), (10, 10), (7, 7), (1, 1)],
    ],
)
def test_one_in_a_hundred_is_measured_at_most_fifty_and_at_least_ten(epoch, steps):
    assert profile_steps(epoch) == steps


@given(ANYTHING)
def test_a_typical_duration_is_one_whatever_was_measured(samples):
    good = [s for s in samples if math.isfinite(s) and s >= 0]
    found = typical_s(samples)
    assert min(good, default=0.0) <= found <= max(good, default=0.0)
    assert 0 <= spread_s(samples) < math.inf or not good


@pytest.mark.parametrize("samples", [[], [math.nan], [-1.0, math.inf], [math.nan, -math.inf]])
def test_nothing_usable_is_zero(samples):
    assert typical_s(samples) == 0.0
    assert spread_s(samples) == 0.0


def test_zero_counts_and_what_is_no_duration_does_not():
    assert typical_s([0.0, 0.0, 4.0]) == 0.0
    assert typical_s([math.nan, 2.0, -5.0, 2.0, math.inf]) == 2.0


@given(
    good=st.lists(st.floats(0.9, 1.1), min_size=9, max_size=40),
    wild=st.lists(st.floats(2, 1e6) | st.just(math.nan) | st.just(0.0), max_size=3),
)
def test_a_few_wild_samples_do_not_leave_the_range_of_the_others(good, wild):
    assert 0.9 <= typical_s(good + wild) <= 1.1


def test_samples_far_off_on_one_side_do_not_pull_the_middle():
    samples = [1.0, 1.01, 1.02, 1.03, 1.04, 9.0, 9.0, 9.0]
    assert typical_s(samples) == 1.02
    assert typical_s(samples) < statistics.median(samples) < statistics.mean(samples)


@given(samples=st.lists(SECONDS, max_size=30), factor=st.sampled_from([0.25, 2.0, 1024.0]))
def test_other_units_give_the_same_time(samples, factor):
    assert typical_s([s * factor for s in samples]) == pytest.approx(typical_s(samples) * factor)


@given(st.lists(COSTS, min_size=1, max_size=8))
def test_the_worst_is_no_better_than_any_rank(ranks):
    found = worst(ranks)
    for rank in ranks:
        assert found.iteration_s <= rank.iteration_s
        assert found.update_s >= rank.update_s
        assert found.snapshot_cpu_s >= rank.snapshot_cpu_s
        assert found.persist_s >= rank.persist_s
        assert found.state_bytes >= rank.state_bytes
        assert found.gpu_free_bytes <= rank.gpu_free_bytes
        assert found.call_s <= rank.call_s  # the others wait for the last one to start
        assert found.snapshot_gpu_s is None or found.snapshot_gpu_s >= rank.snapshot_gpu_s
    assert (found.snapshot_gpu_s is None) == any(r.snapshot_gpu_s is None for r in ranks)


@given(st.lists(COSTS, min_size=1, max_size=6))
def test_the_worst_of_the_worst_is_the_same(ranks):
    found = worst(ranks)
    assert worst([found]) == found
    assert worst([found, *ranks]).gpu_free_bytes == found.gpu_free_bytes
    assert worst(ranks[::-1]).iteration_s == found.iteration_s


def test_no_rank_is_refused():
    with pytest.raises(ValueError, match="no rank"):
        worst([])
