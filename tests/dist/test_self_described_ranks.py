"""Tensors that say themselves what DCP saves of them lose nothing, on any number of ranks."""

import pytest
from launch import start

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("said")


@pytest.fixture(scope="module")
def two(shared):
    return start(
        2, shared, ["self_described_saves", "self_described_loads", "self_described_parts"]
    )


@pytest.fixture(scope="module")
def four(shared, two):
    jobs = ["self_described_loads", "self_described_replicas", "self_described_parts"]
    return start(4, shared, jobs)


def values(answers):
    assert all("error" not in answer for answer in answers), answers
    return [answer["value"] for answer in answers]


def test_every_way_of_saving_keeps_all_blocks(two):
    assert values(two["self_described_saves"]) == [None, None]
    for answer in values(two["self_described_loads"]):
        assert answer["wrong"] == []
        assert answer["count"] >= 3 * 12 * 9


def test_they_are_read_by_more_ranks(four):
    for answer in values(four["self_described_loads"]):
        assert answer["wrong"] == []


def test_copies_of_one_block_are_compared_and_different_blocks_are_not(four):
    for answer in values(four["self_described_replicas"]):
        for case, error in answer.items():
            if case.endswith("same"):
                assert error is None
            else:
                assert error[0] == "ReplicasDiffer"
                assert "w at [0, 0]" in error[1]


def test_registered_parts_keep_their_blocks(two, four):
    found = values(two["self_described_parts"]) + values(four["self_described_parts"])
    if found == [None] * 6:
        pytest.skip("this torch has no dcp.CheckpointableTensor (2.14 has)")
    assert found == [[True, True]] * 6
