"""The interval keeps both promises and is the shortest that does."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dcp_checkfreq.policy.costs import Costs, worst
from dcp_checkfreq.policy.interval import (
    MAX_INTERVAL_STEPS,
    Mode,
    choose_mode,
    forecast,
    interval_steps,
    least_waste_interval_steps,
    stall_s,
    steps_for,
)

GB = 10**9
SECONDS = st.floats(0, 500)
ITERATION = st.floats(0.01, 20)
BUDGET = st.floats(0.005, 1)
MODES = st.sampled_from(Mode)
BROKEN = st.floats() | st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf])


def costs_of(ti=1.0, tw=0.1, tg=0.2, tc=0.5, ts=2.0, m=GB, used=10 * GB, total=80 * GB, call=0.0):
    return Costs(
        iteration_s=ti, update_s=tw, snapshot_gpu_s=tg, snapshot_cpu_s=tc, persist_s=ts,
        state_bytes=m, gpu_used_bytes=used, gpu_total_bytes=total,
        call_s=call,
    )  # fmt: skip


COSTS = st.builds(
    costs_of, ti=ITERATION, tw=st.floats(0, 5), tg=SECONDS, tc=SECONDS, ts=SECONDS,
    call=st.just(0.0) | st.floats(0, 20),
)  # fmt: skip


def finished(costs, mode, k):
    """Whether a save that starts now is published before the one after ``k`` iterations starts."""
    copies = costs.snapshot_cpu_s + (costs.snapshot_gpu_s if mode is Mode.GPU else 0.0)
    left = costs.call_s + copies + costs.persist_s - stall_s(costs, mode)
    return left <= k * costs.iteration_s * (1 + 1e-8)


def affordable(costs, mode, k, p):
    return stall_s(costs, mode) <= p * k * costs.iteration_s * (1 + 1e-8)


@given(costs=COSTS, mode=MODES, p=BUDGET)
def test_both_promises_hold_at_k_and_one_fails_at_one_less(costs, mode, p):
    k = interval_steps(costs, mode, p)
    assume(k < MAX_INTERVAL_STEPS)
    assert finished(costs, mode, k)
    assert affordable(costs, mode, k, p)
    shorter = k - 1
    assert shorter == 0 or not (
        finished(costs, mode, shorter * (1 - 2e-8)) and affordable(costs, mode, shorter, p)
    )


@given(costs=COSTS, mode=MODES, p=BUDGET, more=st.floats(0, 100),
       which=st.sampled_from(["tc", "tg", "ts", "call"]))  # fmt: skip
def test_a_dearer_save_never_shortens_the_interval(costs, mode, p, more, which):
    values = {"tg": costs.snapshot_gpu_s, "tc": costs.snapshot_cpu_s, "ts": costs.persist_s,
              "call": costs.call_s}  # fmt: skip
    values[which] += more
    dearer = costs_of(ti=costs.iteration_s, tw=costs.update_s, **values)
    assert interval_steps(dearer, mode, p) >= interval_steps(costs, mode, p)


@given(costs=COSTS, mode=MODES, p=BUDGET, factor=st.floats(1, 50))
def test_a_longer_iteration_never_lengthens_the_interval(costs, mode, p, factor):
    slower = costs_of(
        ti=costs.iteration_s * factor, tw=costs.update_s,
        tg=costs.snapshot_gpu_s, tc=costs.snapshot_cpu_s, ts=costs.persist_s, call=costs.call_s,
    )  # fmt: skip
    assert interval_steps(slower, mode, p) <= interval_steps(costs, mode, p)


@given(costs=COSTS, mode=MODES, p=BUDGET, q=BUDGET)
def test_a_larger_budget_never_lengthens_the_interval(costs, mode, p, q):
    tight, wide = sorted([p, q])
    assert interval_steps(costs, mode, wide) <= interval_steps(costs, mode, tight)


@given(ranks=st.lists(COSTS, min_size=1, max_size=6), mode=MODES, p=BUDGET)
def test_the_interval_of_the_worst_suits_every_rank(ranks, mode, p):
    same_update = [costs_of(ti=r.iteration_s, tc=r.snapshot_cpu_s, tg=r.snapshot_cpu_s / 2,
                            ts=r.persist_s) for r in ranks]  # fmt: skip
    k = interval_steps(worst(same_update), mode, p)
    assert all(k >= interval_steps(rank, mode, p) for rank in same_update)


def test_a_cost_of_one_iteration_at_five_percent_is_every_twentieth():
    costs = costs_of(ti=1.0, tw=1.0, tc=1.0, ts=0.0)
    assert interval_steps(costs, Mode.CPU, 0.05) == 20
    assert interval_steps(costs, Mode.BLOCKING, 0.05) == 20


@pytest.mark.parametrize("mode", Mode)
def test_starting_a_save_counts_though_the_copy_is_hidden(mode):
    costs = costs_of(ti=1.0, tg=0.2, tc=0.5, ts=2.0, call=0.7)
    hidden = 0.5 if mode is Mode.BLOCKING else 0.0
    assert stall_s(costs, mode) == pytest.approx(0.7 + hidden)
    assert interval_steps(costs, mode, 0.07) == 10 + (mode is Mode.BLOCKING) * 8
    # It comes before the copy, so it leaves no less to be done beside the loop.
    assert interval_steps(costs, mode, 1.0) == 3 - (mode is Mode.BLOCKING)


def test_sums_that_are_whole_but_for_rounding_are_whole():
    assert 0.1 * 3 > 0.3  # why this is needed
    assert steps_for(0.1 * 3, 0.0, 0.1, 0.5) == 3
    assert steps_for(0.0, 0.7, 0.1, 0.1) == 70
    assert steps_for(3.001, 0.0, 1.0, 0.5) == 4


@given(values=st.tuples(*[BROKEN] * 6), mode=MODES, p=BUDGET)
def test_whatever_was_measured_the_interval_is_usable(values, mode, p):
    ti, tw, tg, tc, ts, call = values
    broken = costs_of(ti=ti, tw=tw, tg=tg, tc=tc, ts=ts, call=call)
    for mtbf_s in (None, 1e-9, 3600.0, 1e300):
        k = interval_steps(broken, mode, p, mtbf_s)
        assert type(k) is int
        assert 1 <= k <= MAX_INTERVAL_STEPS
    assert choose_mode(broken) in Mode
    assert stall_s(broken, mode) >= 0


def test_a_save_that_costs_nothing_is_made_every_iteration():
    for ti in (0.0, 1.0, math.nan):
        free = costs_of(ti=ti, tg=0.0, tc=0.0, ts=0.0)
        assert interval_steps(free, Mode.CPU, 0.035) == 1


@pytest.mark.parametrize("p", [0, -0.1, 1.1, math.nan, math.inf])
def test_a_budget_that_is_none_is_refused(p):
    with pytest.raises(ValueError, match="max_overhead"):
        interval_steps(costs_of(), Mode.CPU, p)


@pytest.mark.parametrize(
    ("mode", "stall"), [(Mode.GPU, 0.0), (Mode.CPU, 1.1), (Mode.BLOCKING, 2.0)]
)
def test_a_copy_stalls_for_what_does_not_fit_before_the_weight_update(mode, stall):
    assert stall_s(costs_of(ti=1.0, tw=0.1, tg=0.2, tc=2.0), mode) == pytest.approx(stall)


def test_a_slow_copy_on_the_gpu_stalls_too():
    assert stall_s(costs_of(ti=1.0, tw=0.75, tg=1.0), Mode.GPU) == pytest.approx(0.75)
    with pytest.raises(ValueError, match="mode GPU"):
        stall_s(costs_of(tg=None), Mode.GPU)


def test_the_gpu_is_used_only_if_the_copy_fits_and_stalls_less():
    dear = {"tc": 5.0, "tg": 0.1}
    assert choose_mode(costs_of(**dear)) is Mode.GPU
    assert choose_mode(costs_of(**dear, m=63 * GB)) is Mode.GPU
    assert choose_mode(costs_of(**dear, m=64 * GB)) is Mode.CPU  # 70 free, less a tenth
    assert choose_mode(costs_of(**dear, m=64 * GB), headroom=0.0) is Mode.GPU
    assert choose_mode(costs_of(**dear, used=81 * GB)) is Mode.CPU
    assert choose_mode(costs_of(tc=0.5, tg=0.1)) is Mode.CPU  # both hide behind the iteration
    assert choose_mode(costs_of(tc=5.0, tg=6.0)) is Mode.CPU
    assert choose_mode(costs_of(tc=5.0, tg=None)) is Mode.CPU
    assert choose_mode(costs_of(**dear, m=0, used=0, total=0)) is Mode.CPU
    with pytest.raises(ValueError, match="headroom"):
        choose_mode(costs_of(), headroom=1.0)


@given(cost=st.floats(0, 100), ti=ITERATION, mtbf=st.floats(1, 1e7))
def test_no_neighbour_wastes_less(cost, ti, mtbf):
    def waste(k):
        return cost / (k * ti) + k * ti / (2 * mtbf)

    k = least_waste_interval_steps(cost, ti, mtbf)
    assume(k < MAX_INTERVAL_STEPS)
    assert waste(k) <= waste(k + 1) * (1 + 1e-9)
    assert k == 1 or waste(k) <= waste(k - 1) * (1 + 1e-9)


def test_the_textbook_interval():
    assert least_waste_interval_steps(2.0, 1.0, 10_000.0) == 200  # sqrt(2 * 2 * 10000)


@given(costs=COSTS, mode=MODES, p=BUDGET, mtbf=st.floats(1, 1e7))
def test_a_failure_rate_only_ever_lengthens_the_interval(costs, mode, p, mtbf):
    k = interval_steps(costs, mode, p, mtbf)
    assert k >= interval_steps(costs, mode, p)
    least = least_waste_interval_steps(stall_s(costs, mode), costs.iteration_s, mtbf)
    assert k == max(least, interval_steps(costs, mode, p))


@pytest.mark.parametrize("mtbf", [0, -1, math.nan, math.inf])
def test_a_failure_rate_that_is_none_is_refused(mtbf):
    with pytest.raises(ValueError, match="mtbf_s"):
        interval_steps(costs_of(), Mode.CPU, 0.035, mtbf)
    with pytest.raises(ValueError, match="mtbf_s"):
        forecast(3, iteration_s=1.0, cost_s=0.0, save_s=0.0, mtbf_s=mtbf)


def test_a_forecast_by_hand():
    seen = forecast(10, iteration_s=2.0, cost_s=0.5, save_s=4.0, mtbf_s=1400.0)
    assert seen.lost_work_s == 14.0  # half of 20 s, and a save of 4 s that was not finished
    assert seen.recovery_bound_s == 40.0
    assert seen.overhead == 0.025
    assert seen.goodput == pytest.approx(0.99 / 1.025)
    assert forecast(10, iteration_s=2.0, cost_s=0.5, save_s=4.0).goodput is None


@given(k=st.integers(1, 10**4), ti=ITERATION, stall=SECONDS, finish=SECONDS, mtbf=st.floats(1, 1e9))
def test_what_is_expected_stays_within_what_is_promised(k, ti, stall, finish, mtbf):
    seen = forecast(k, iteration_s=ti, cost_s=stall, save_s=finish, mtbf_s=mtbf)
    assert 0 < seen.lost_work_s <= seen.recovery_bound_s
    assert 0 <= seen.goodput <= 1


def test_no_iteration_is_no_interval():
    with pytest.raises(ValueError, match="at least one"):
        forecast(0, iteration_s=1.0, cost_s=0.0, save_s=0.0)
