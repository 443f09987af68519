"""What one rank measured becomes what one save cost the job."""

import math
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.policy.interval import Mode
from dcp_checkfreq.policy.observation import (
    IntervalSeen,
    Iteration,
    Pace,
    cost_per_save_s,
    slow_down_s,
    summarise,
)
from dcp_checkfreq.policy.save_timings import SaveTimings, worst_seen

SECONDS = st.floats(0, 100)


def free(seconds=1.0, blocked=0.0):
    return Iteration(
        seconds=seconds, blocked_s=blocked, waited_s=0.0, update_s=0.1, loaded=False
    )  # fmt: skip


def beside(seconds=1.0, waited=0.0, blocked=0.0, copying=False, queued=0.0):
    return Iteration(
        seconds=seconds + waited, blocked_s=blocked, waited_s=waited, update_s=0.1, loaded=True,
        copying=copying, queued_s=queued,
    )  # fmt: skip


def save_of(iterations, mode=Mode.CPU, copy=0.5, persist=3.0, copied=100, **more):
    return SaveTimings(
        interval=summarise(iterations), mode=mode, copy_s=copy, persist_s=persist,
        copied_bytes=copied, state_bytes=400, **more,
    )  # fmt: skip


ITERATIONS = st.lists(
    st.builds(
        Iteration, seconds=st.floats(1, 100), blocked_s=SECONDS, waited_s=st.floats(0, 1),
        update_s=SECONDS, loaded=st.booleans(), copying=st.booleans(),
    ),
    max_size=20,
)  # fmt: skip


@given(ITERATIONS)
def test_every_iteration_is_of_one_kind_and_all_time_is_counted(iterations):
    seen = summarise(iterations)
    assert seen.steps == len(iterations)
    assert seen.elapsed_s == pytest.approx(sum(i.seconds + i.blocked_s for i in iterations))
    assert seen.blocked_s + seen.waited_s == pytest.approx(
        sum(i.blocked_s + i.waited_s for i in iterations)
    )
    assert seen.pace_s <= max((i.seconds for i in iterations), default=0.0) + 1e-9


def test_kinds_are_told_apart_and_waiting_is_not_work():
    seen = summarise([beside(1.5, waited=2.0, copying=True), beside(1.2), beside(1.2), free(1.0)])
    assert (seen.copying.steps, seen.loaded.steps, seen.unloaded.steps) == (1, 2, 1)
    assert seen.copying.typical_s == pytest.approx(1.5)
    assert seen.loaded.typical_s == pytest.approx(1.2)
    assert seen.unloaded.typical_s == 1.0
    assert seen.waited_s == 2.0
    assert seen.update_s == pytest.approx(0.1)


def test_an_interval_of_nothing_is_all_zeros():
    seen = summarise([])
    assert (seen.steps, seen.elapsed_s, seen.stall_s, seen.pace_s) == (0, 0, 0, 0.0)
    assert cost_per_save_s(seen, 1.0) == 0.0


def test_a_cost_by_hand():
    iterations = [beside(1.5, waited=2.0, copying=True), *[beside(1.2)] * 5, *[free()] * 3]
    seen = summarise([*iterations, free(blocked=0.25)])
    assert slow_down_s(seen, 1.0) == pytest.approx(0.5 + 5 * 0.2)
    assert cost_per_save_s(seen, 1.0) == pytest.approx(0.25 + 2.0 + 0.5 + 1.0)
    assert seen.stall_s == 2.25


def test_waiting_for_the_save_before_costs_but_is_no_stall_of_this_save():
    seen = summarise([beside(), beside(blocked=3.0, queued=2.5)])
    assert cost_per_save_s(seen, 1.0) == 3.0
    assert seen.stall_s == 0.5


@given(slow=st.floats(0, 1e6), where=st.integers(0, 9))
def test_one_slow_iteration_does_not_count(slow, where):
    steady = [beside(1.1)] * 10
    odd = [*steady[:where], beside(1.1 + slow), *steady[where + 1 :]]
    usual = cost_per_save_s(summarise(steady), 1.0)
    assert cost_per_save_s(summarise(odd), 1.0) == pytest.approx(usual)


@given(iterations=ITERATIONS, base=st.floats(0, 200))
def test_a_cost_is_never_negative_and_falls_with_the_baseline(iterations, base):
    seen = summarise(iterations)
    assert cost_per_save_s(seen, base) >= 0
    assert cost_per_save_s(seen, base) >= cost_per_save_s(seen, base + 1)


def test_faster_iterations_than_the_baseline_never_make_a_cost_negative():
    seen = summarise([beside(0.5, blocked=0.2)] * 4)
    assert slow_down_s(seen, 1.0) == -2.0
    assert cost_per_save_s(seen, 1.0) == 0.0


@given(st.lists(st.floats(), min_size=1, max_size=8))
def test_broken_clocks_give_a_cost_all_the_same(values):
    iterations = [
        Iteration(seconds=v, blocked_s=0.0, waited_s=0.0, update_s=v, loaded=True) for v in values
    ]
    cost = cost_per_save_s(summarise(iterations), 1.0)
    assert cost >= 0
    assert not math.isnan(cost)


def test_it_pickles_plainly():
    seen = save_of([beside(), free()], failed=True)
    assert pickle.loads(pickle.dumps(seen)) == seen
    assert len(pickle.dumps(seen)) < 1000  # every rank sends one with every save


def test_every_rank_counts_for_copy_persist_and_bytes():
    ranks = [save_of([free()], copy=c, persist=10 - c, copied=n)
             for c, n in [(1.0, 5), (3.0, 1), (2.0, 9)]]  # fmt: skip
    found = worst_seen(ranks)
    assert (found.copy_s, found.persist_s, found.copied_bytes) == (3.0, 9.0, 9)
    assert not found.failed
    assert not found.is_first
    assert worst_seen([*ranks, replace(ranks[0], failed=True)]).failed
    assert worst_seen([*ranks, replace(ranks[0], is_first=True)]).is_first
    assert worst_seen([*ranks, replace(ranks[0], mode=Mode.BLOCKING)]).mode is Mode.BLOCKING
    with pytest.raises(ValueError, match="no rank"):
        worst_seen([])


def test_what_one_rank_waits_for_is_not_counted_again_on_another():
    """Rank 0 waits for its copy; rank 1 sees that as a slow iteration, in its all-reduce."""
    waits = save_of([beside(1.0, waited=2.0, copying=True), free(), free()])
    sees = save_of([beside(3.0, copying=True), free(), free()])
    found = worst_seen([waits, sees])
    assert cost_per_save_s(found.interval, 1.0) == pytest.approx(2.0)


def test_the_dearest_rank_counts():
    cheap, dear = save_of([free(blocked=0.1)] * 5), save_of([free(blocked=0.3)] * 5)
    for ranks in ([cheap, dear, cheap], [dear, cheap]):
        assert worst_seen(ranks).interval == dear.interval


def test_a_fast_rank_that_waits_for_a_slow_one_at_the_save_is_no_cost():
    """No collective in the iterations: the fast rank is done early and waits inside the save."""
    slow = save_of([*[free(5.0)] * 9, free(5.0, blocked=0.1)])
    fast = save_of([*[free(1.0)] * 9, free(1.0, blocked=40.1)])
    found = worst_seen([fast, slow, fast])
    assert found.interval == slow.interval
    assert cost_per_save_s(found.interval, 5.0) == pytest.approx(0.1)


@given(st.lists(ITERATIONS.filter(bool), min_size=1, max_size=5))
def test_the_job_saw_what_one_rank_saw(intervals):
    ranks = [save_of(iterations) for iterations in intervals]
    found = worst_seen(ranks)
    assert found.interval in [rank.interval for rank in ranks]
    assert found.interval.pace_s >= 0.9 * max(rank.interval.pace_s for rank in ranks)
    assert worst_seen([found]) == found


def test_a_pace_of_nothing_adds_nothing():
    assert Pace().sum_s == Pace().excess_s(3.0) == 0.0
    zero = IntervalSeen(
        elapsed_s=0.0, blocked_s=0.0, queued_s=0.0, waited_s=0.0, update_s=0.0,
        unloaded=Pace(), copying=Pace(), loaded=Pace(),
    )  # fmt: skip
    assert summarise([]) == zero
