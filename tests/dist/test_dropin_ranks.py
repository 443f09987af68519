"""The drop-in on two ranks: stock's calls and classes, whatever thread or process saves."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import start, values

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]

JOBS = [
    "dropin_saves_and_loads",
    "dropin_refuses_on_all_ranks",
    "dropin_kept_plans",
    "dropin_async_beside_training",
    "dropin_async_goes_on_after_a_failure",
    "dropin_process",
    "dropin_ends_with_the_group",
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("dropin")


@pytest.fixture(scope="module")
def answers(shared):
    return start(2, shared, JOBS)


def test_stocks_calls_are_ours_and_stock_reads_what_they_wrote(answers):
    for said in values(answers["dropin_saves_and_loads"]):
        assert said["ours"] == said["stock"] == [[[2.0], 2.0], [[3.0], 3.0]]
        assert said["alone"]
        assert said["are_ours"] == [True] * 3
        assert said["files"] == 2  # one for each rank; those of the first save are gone


def test_overwrite_false_is_refused_on_all_ranks(answers):
    for error, there in values(answers["dropin_refuses_on_all_ranks"]):
        assert error[0] == "CheckpointExists"
        assert "Checkpoint already exists" in error[1]
        assert there == [[1.0], 1]


def test_plans_that_stocks_planner_keeps_are_used(answers):
    for said in values(answers["dropin_kept_plans"]):
        assert said == [[[float(step)], step] for step in range(3)]


def test_asynchronous_saves_without_a_group_do_not_meet_the_training_loop(answers):
    for said, are_ours in values(answers["dropin_async_beside_training"]):
        assert said == [[[float(step)], step] for step in range(4)]
        assert are_ours == [True] * 4


def test_a_failed_one_does_not_hold_up_the_next(answers):
    for error, is_there, good in values(answers["dropin_async_goes_on_after_a_failure"]):
        assert error == ["of rank 1", 1]
        assert not is_there
        assert good == [[2.0], 2]


def test_it_acts_in_the_process_that_saves_and_not_after_it_is_off(answers):
    for got, are_ours, after in values(answers["dropin_process"]):
        assert got == [[[1.0], 1], [[3.0], 3]]
        assert are_ours == [True, True, False, False]
        assert after == [[4.0], 4]


def test_a_save_under_way_is_finished_before_its_group_is_destroyed(answers, shared):
    values(answers["dropin_ends_with_the_group"])
    target = {"w": torch.zeros(64, 8), "n": None}
    dcp.load(target, checkpoint_id=shared / "dropin-end")
    assert target["n"] == 5
