"""What the last saves cost together: steady values are averaged, changes are followed."""

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.policy.baseline import Baseline
from dcp_checkfreq.policy.constants import KEPT
from dcp_checkfreq.policy.costs import Costs
from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.observation import (
    Iteration,
    Pace,
    summarise,
)
from dcp_checkfreq.policy.save_cost import (
    SaveCost,
    estimate,
    judge,
    second,
    swings,
    without_outdated,
)
from dcp_checkfreq.policy.save_timings import SaveTimings, warmer

QUIET = Baseline(paces=(Pace(steps=50, typical_s=1.0),), noises=(0.0,))
ONE = SaveCost(
    cost_s=1.0, error_s=0.0, beside_steps=4, stall_s=0.0, left_s=3.0, finish_s=3.0,
    overlap_s=0.0, fresh=True,
)  # fmt: skip


def fed(costs, error=0.0):
    """Return what is kept after saves with these costs, one after the other."""
    recent = ()
    for cost in costs:
        recent = without_outdated((*recent, replace(ONE, cost_s=cost, error_s=error))[-KEPT:])
    return recent


def cost_of(costs):
    return estimate(fed(costs), QUIET).cost_s


def save_of(*iterations, copy=0.5, persist=3.0, mode=Mode.CPU):
    return SaveTimings(
        interval=summarise(iterations), mode=mode, copy_s=copy, persist_s=persist,
        copied_bytes=1, state_bytes=1,
    )  # fmt: skip


def beside(seconds, waited=0.0, copying=False, blocked=0.0):
    return Iteration(
        seconds=seconds + waited, blocked_s=blocked, waited_s=waited, update_s=0.1, loaded=True,
        copying=copying,
    )  # fmt: skip


def test_one_save_is_no_evidence_and_of_two_the_cheaper_counts():
    assert estimate((), QUIET).cost_s == 0.0
    assert cost_of([5.0]) == 0.0
    assert cost_of([5.0, 2.0]) == 2.0


@given(n=st.integers(3, 40), where=st.integers(0, 39), odd=st.floats(0, 1e6))
def test_one_odd_save_hardly_moves_the_cost(n, where, odd):
    costs = [1.0] * n
    costs[where % n] = odd
    assert cost_of(costs) == 1.0


@given(before=st.integers(1, 30), old=st.floats(0, 10), factor=st.floats(2, 100))
def test_two_of_three_that_differ_are_followed_in_both_directions(before, old, factor):
    old += 0.1
    new = old * factor
    # with a single save before, two new ones are two of three
    found = cost_of([old] * before + [new] * 2)
    assert found == pytest.approx(new) or before < 5
    assert cost_of([old] * before + [new] * 3) == pytest.approx(new)
    assert cost_of([new] * before + [old] * 3) == pytest.approx(old)


@pytest.mark.parametrize("seed", range(30))
def test_noise_is_averaged_out(seed):
    chance = random.Random(seed)
    found = estimate(fed([chance.uniform(0.9, 1.1) for _ in range(60)]), QUIET)
    assert found.cost_s == pytest.approx(1.0, abs=0.08)
    assert 0.005 < found.error_s < 0.1


def test_more_saves_are_surer():
    chance = random.Random(1)
    costs = [chance.uniform(0.9, 1.1) for _ in range(KEPT)]
    assert estimate(fed(costs), QUIET).error_s < estimate(fed(costs[:4]), QUIET).error_s * 0.8


def test_costs_that_agree_are_sure_however_much_iterations_of_one_save_differ():
    assert estimate(fed([1.0] * 5, error=0.5), QUIET).error_s == 0.0
    assert estimate(fed([1.0] * 4, error=0.5), QUIET).error_s > 0.2  # too few to tell


def test_costs_that_differ_are_not_sure_however_quiet_the_iterations_are():
    differ = estimate(fed([0.4, 0.6] * 8), QUIET)
    assert differ.error_s >= 0.1 * 1.2533 / 16**0.5
    most_alike = estimate(fed([0.4] * 9 + [0.6, 0.4, 0.6, 0.4, 0.6, 0.4, 0.6]), QUIET)
    assert most_alike.error_s > 0.02


def test_the_error_of_the_baseline_is_shared_and_does_not_average_out():
    noisy = replace(QUIET, noises=(0.1,))
    few, many = fed([1.0] * 3), fed([1.0] * KEPT)
    shared = 4 * 1.2533 * 0.1 / 50**0.5
    assert estimate(many, noisy).error_s == pytest.approx(shared)
    assert estimate(few, noisy).error_s == pytest.approx(shared)


def test_costs_of_two_kinds_are_averaged_and_not_chosen_between():
    costs = [0.4, 0.6] * 8
    assert cost_of(costs) == pytest.approx(0.5)
    assert abs(cost_of(costs[1:]) - cost_of(costs)) < 0.02
    assert abs(statistics.median(costs[1:]) - statistics.median(costs)) > 0.09  # why


def test_a_save_that_is_cut_off_by_the_next_one_counts_in_full():
    cut = judge(QUIET, save_of(beside(1.2), beside(1.2), persist=5.5))  # 6 s of save in 2.4 s
    assert cut.cost_s == pytest.approx(0.4 * 6 / 2.4)
    free = Iteration(seconds=1.0, blocked_s=0.0, waited_s=0.0, update_s=0.1, loaded=False)
    whole = judge(QUIET, save_of(beside(1.2), beside(1.2), free, persist=5.5))
    assert whole.cost_s == pytest.approx(0.4)
    assert (cut.fresh, whole.fresh) == (False, True)


def test_a_baseline_that_is_too_slow_does_not_hide_a_stall():
    slow = replace(QUIET, paces=(Pace(steps=50, typical_s=3.0),))
    assert judge(slow, save_of(*[beside(1.0)] * 3, beside(1.0, blocked=0.4))).cost_s == 0.4


def test_what_an_overlapped_copy_cost_is_its_wait_and_its_slow_down():
    seen = save_of(beside(1.5, waited=0.7, copying=True), beside(1.2))
    assert judge(QUIET, seen).overlap_s == pytest.approx(1.2)
    assert judge(QUIET, replace(seen, mode=Mode.BLOCKING)).overlap_s == 0.0


def test_the_second_highest():
    assert second([]) == second([7.0]) == 0.0
    assert second([7.0, 3.0]) == 3.0
    assert second([1.0, 9.0, 2.0]) == 2.0


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([], False),
        ([3.0], False),
        ([3.0, 3.0, 9.0, 3.0, 3.0], False),  # one outlier
        ([3.0, 9.0, 9.0, 9.0, 3.0, 3.0, 3.0, 3.0], False),  # a busy period
        ([9.0, 9.0, 9.0, 9.0, 3.0, 3.0], False),
        ([3.0, 9.0, 3.0, 3.0, 9.0, 3.0], True),
        ([9.0, 3.0, 3.0, 3.0, 3.0, 9.0], True),
        ([3.0, 3.2, 3.0, 3.2, 3.1, 3.2], False),  # noise
    ],
)
def test_values_swing_if_high_ones_come_back(values, found):
    assert swings(values) is found


def test_what_a_save_did_faster_than_a_cold_profile_is_kept_and_what_it_did_slower_is_not():
    cold = Costs(
        iteration_s=1.0, update_s=0.1, snapshot_gpu_s=2.0, snapshot_cpu_s=5.0, persist_s=30.0,
        state_bytes=1, gpu_used_bytes=0, gpu_total_bytes=0, call_s=1.0,
    )  # fmt: skip
    seen = replace(save_of(beside(1.0), copy=0.5, persist=40.0), call_s=0.25)
    assert warmer(cold, seen) == replace(cold, snapshot_cpu_s=0.5, call_s=0.25)
    on_gpu = replace(save_of(beside(1.0), copy=0.5, persist=4.0, mode=Mode.GPU), call_s=3.0)
    assert warmer(cold, on_gpu) == replace(
        cold, snapshot_gpu_s=0.5, snapshot_cpu_s=4.0, persist_s=0.0
    )  # the copy to the host is part of what was seen, and not known by itself
    assert warmer(cold, replace(on_gpu, persist_s=40.0)) == replace(cold, snapshot_gpu_s=0.5)
    for broken in (float("nan"), -1.0, float("inf")):
        odd = replace(seen, copy_s=broken, persist_s=broken, call_s=broken)
        assert warmer(cold, odd).snapshot_cpu_s == 5.0
        assert warmer(cold, odd).call_s == 1.0
