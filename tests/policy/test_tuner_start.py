"""The first intervals of a run: what the call costs, cold profiles, clocks that jump."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from simulated_job import Job, steady, stepped

from dcp_checkfreq.policy.constants import PROFILE_STEPS
from dcp_checkfreq.policy.interval import MAX_INTERVAL_STEPS, Mode, interval_steps
from dcp_checkfreq.policy.observation import summarise
from dcp_checkfreq.policy.save_timings import SaveTimings
from dcp_checkfreq.policy.tuner import observe, opening, start

BUDGET = 0.035
FEW = examples(40)
JUMP_S = 1e6


def cold(job_kind, factor):
    """Return a job whose profile found copies and persists ``factor`` times slower."""
    warm = Job(**job_kind).warm_costs()
    profile = {
        "snapshot_cpu_s": factor * warm.snapshot_cpu_s,
        "persist_s": factor * warm.persist_s,
    }
    return Job(profile=profile, **job_kind)


# --- the call itself ---


@FEW
@given(call=st.floats(0, 20), p=st.sampled_from([0.01, 0.035, 0.1]))
def test_the_first_interval_pays_for_the_call(call, p):
    job = Job(p=p, profile={"call_s": call}, blocked=steady(call))
    assert job.decision.interval_steps * p >= call * (1 - 1e-6)
    assert job.decision.forecast.overhead <= p * (1 + 1e-6)
    job.run(6)
    assert max(job.overheads) <= p * 1.02


@FEW
@given(blocked=st.floats(0.2, 20))
def test_a_call_that_the_profile_did_not_see_is_paid_from_the_first_judged_save_on(blocked):
    job = Job(blocked=steady(blocked))
    first, second = job.run(2)  # the first one is cold
    assert first == 4
    assert second * BUDGET >= blocked * (1 - 1e-6)
    assert "the last save cost" in job.decision.reason


@FEW
@given(number=st.sampled_from([1, 2]), blocked=st.floats(0, 1e6))
def test_one_odd_call_at_the_start_is_no_evidence(number, blocked):
    job = Job(blocked=lambda n: blocked if n == number else 0.0)
    assert set(job.run(20)) == {4}


def test_of_the_cold_and_the_first_judged_call_the_shorter_counts():
    job = Job(blocked=lambda n: 5.0 if n == 1 else 1.0)
    assert job.run(2)[-1] == 29
    job = Job(blocked=lambda n: 5.0 if n == 2 else 1.0)
    assert job.run(2)[-1] == 29


# --- cold profiles ---

WARM = {
    "hidden copy": {},
    "long persist": {"ts": steady(30.0)},
    "waits": {"tc": 2.0},
    "blocking": {"tc": 2.0, "mode": Mode.BLOCKING},
    "with a failure rate": {"tc": 2.0, "mtbf_s": 50_000.0},
    "short": {"tc": 0.2, "ts": steady(0.5)},
}


@pytest.mark.parametrize("factor", [2, 10, 100])
@pytest.mark.parametrize("kind", WARM)
def test_three_saves_after_a_cold_profile_k_is_what_warm_costs_need(kind, factor):
    kind = WARM[kind]
    job = cold(kind, factor)
    mode = kind.get("mode", Mode.CPU)
    needed = interval_steps(job.warm_costs(), mode, BUDGET, kind.get("mtbf_s"))
    assert job.decision.interval_steps > needed
    found = job.run(3)
    assert found[-1] == needed
    assert found == sorted(found, reverse=True)
    assert set(job.run(20)) == {needed}
    assert job.save_steps[0] <= PROFILE_STEPS


@pytest.mark.parametrize("still_cold", [1, 2])
def test_later_saves_that_are_cold_too_are_corrected_as_fast(still_cold):
    job = cold({"ts": lambda n: 30.0 if 1 <= n <= still_cold else 3.0}, 10)
    assert job.decision.interval_steps > 100
    assert job.run(still_cold + 1)[-1] == 4
    assert set(job.run(20)) == {4}


@pytest.mark.parametrize("seed", range(6))
def test_a_profile_that_was_right_is_kept_under_noise(seed):
    job = Job(noise=0.05, seed=seed, ts=steady(30.0))
    assert min(job.run(12)) >= 29
    assert sum(one < other for one, other in pairwise(job.intervals())) <= 2


def test_a_slow_down_that_no_profile_shows_still_counts_after_a_cold_one():
    kind = {"slow_persist": steady(0.2), "ts": steady(6.0)}
    warm, late = Job(**kind), cold(kind, 10)
    warm.run(40)
    late.run(8)
    late.overheads.clear()
    late.run(8)
    assert max(late.overheads) <= BUDGET * 1.05
    assert late.decision.interval_steps <= 1.3 * warm.decision.interval_steps


def test_the_first_save_after_a_profile_comes_early_and_only_that_one():
    job = Job(blocked=steady(7.0), profile={"call_s": 7.0})
    assert job.decision.interval_steps == 200
    assert job.decision.gap_steps == PROFILE_STEPS - 200
    job.run(4)
    assert job.save_steps[:3] == [PROFILE_STEPS, PROFILE_STEPS + 200, PROFILE_STEPS + 400]


def test_the_early_save_is_not_asked_for_again_if_nothing_was_seen_of_it():
    job = Job(profile={"persist_s": 300.0})
    seen = SaveTimings(
        interval=summarise([]), mode=Mode.CPU, copy_s=0.5, persist_s=3.0, copied_bytes=1,
        state_bytes=1,
    )  # fmt: skip
    tuning, decision = observe(job.tuning, seen)
    assert job.decision.gap_steps < 0
    assert tuning.gap_steps == decision.gap_steps == 0


def test_an_interval_of_an_earlier_run_is_not_taken_for_a_cold_one():
    costs = Job(slow_persist=steady(0.2)).warm_costs()
    tuning = start(costs, max_overhead=BUDGET, first_interval_steps=300)
    assert opening(tuning).gap_steps == 0
    assert not tuning.warming


def test_what_is_stored_after_a_cold_profile_is_warm():
    job = cold({"tc": 2.0}, 10)
    assert job.tuning.warming
    job.run(5)
    assert not job.tuning.warming
    assert job.tuning.costs.snapshot_cpu_s == pytest.approx(2.0)
    assert job.tuning.costs.persist_s == pytest.approx(3.0)


# --- clocks that jump ---


@pytest.mark.parametrize("which", ["snapshot_cpu_s", "persist_s", "call_s"])
def test_a_clock_that_jumps_in_the_profile_is_corrected_within_three_saves(which):
    job = Job(profile={which: JUMP_S})
    assert job.decision.interval_steps == MAX_INTERVAL_STEPS
    assert job.run(3)[-1] == 4
    assert job.step < 3 * PROFILE_STEPS


def test_a_profile_of_one_iteration_that_took_a_jump_is_corrected_within_three_saves():
    job = Job(profile={"iteration_s": JUMP_S}, base_steps=1)
    assert job.decision.interval_steps == 1
    job.run(3)
    assert job.tuning.baseline.iteration_s == pytest.approx(1.0)
    assert job.run(3)[-1] == 4


JUMPS = {
    "hidden": {},
    "waits": {"tc": 2.0},
    "short": {"tc": 0.2, "ts": steady(0.5)},
    "slows": {"slow_persist": steady(0.2)},
    "blocks": {"blocked": steady(0.3), "profile": {"call_s": 0.3}},
    "long": {"ts": steady(30.0)},
    "two": {"tc": 0.1, "ts": steady(1.8)},
}


@pytest.mark.parametrize("kind", JUMPS)
@pytest.mark.parametrize("where", [*range(1, 30, 3), 60, 100])
def test_a_clock_that_jumps_once_leaves_the_interval_alone(kind, where):
    usual = Job(**JUMPS[kind]).run(40)
    found = Job(odd={where: JUMP_S}, **JUMPS[kind]).run(40)
    assert max(found) <= max(usual)
    assert found[-1] <= 1.4 * usual[-1]  # where a save touches three iterations or four
    assert sum(found) <= sum(usual) * 1.5 + 10


def test_a_jump_between_busy_saves_delays_the_way_back_by_a_few_saves_only():
    kind = {"ts": stepped(3.0, 30.0, 12, 24)}
    usual = Job(**kind).run(50)
    down = usual.index(4, 30)
    odd_step = Job(**kind)
    odd_step.run(27)
    found = Job(odd={odd_step.step: JUMP_S}, **kind).run(60)
    assert found[down + 6] == 4
