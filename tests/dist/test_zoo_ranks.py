"""The rows of the zoo that take several ranks come back exactly, on any number of them."""

import pytest
from jobs_zoo import COMPILED, ROWS
from launch import start, values

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]


def test_the_state_of_several_ranks_comes_back_on_any_number_of_them(tmp_path):
    for ranks, least in ((4, 1), (2, 2), (3, 2), (1, 2)):
        answers = start(ranks, tmp_path, ["zoo"])["zoo"]
        for said in values(answers):
            assert said["differ"] == []
            assert said["compared"] >= least * (len(ROWS) - len(COMPILED)) * 10


@pytest.mark.long
def test_what_is_compiled_comes_back_on_any_number_of_ranks(tmp_path):
    for ranks, least in ((4, 1), (2, 2), (1, 2)):
        answers = start(ranks, tmp_path, ["zoo_compiled"])["zoo_compiled"]
        for said in values(answers):
            assert said["differ"] == []
            assert said["compared"] >= least * len(COMPILED) * 10


def test_talking_parts_are_asked_in_one_order_odd_buffers_are_rank_0s_partial_sums_refused(
    tmp_path,
):
    answers = start(2, tmp_path, ["zoo_talking_parts", "zoo_partial", "zoo_odd"])
    assert values(answers["zoo_talking_parts"]) == [[2, 20]] * 2
    for kind, text, _ in values(answers["zoo_partial"]):
        assert kind == "UnsupportedState"
        assert "'model.weight'" in text
    assert values(answers["zoo_odd"]) == [[None, 0, None]] * 2


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_keeps_extra_state_and_quantised_buffers_and_refuses_old_shards(tmp_path):
    answers = start(2, tmp_path, ["zoo_sharded_tensor", "zoo_extra_under_fsdp1"])
    assert values(answers["zoo_extra_under_fsdp1"]) == [[None, 0, None]] * 2
    for kind, text, _ in values(answers["zoo_sharded_tensor"]):
        assert kind == "UnsupportedState"
        assert "'model.0.scale' is a ShardedTensor" in text
