"""A wrapped iterable that is registered keeps for each rank what only that rank can tell."""

import pytest
from launch import start, values

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

SAVED = [
    "wrapped_iterables_as_they_are",
    "wrapped_samplers_as_they_are",
    "wrapped_keepers_as_they_are",
    "wrapped_otherwise_than_saved",
    "wrapped_on_more_ranks",
]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrapped")
    answers = start(2, folder, SAVED)
    return folder, {job: values(answers[job]) for job in SAVED}


def test_a_replay_is_compared_with_the_digests_of_its_own_rank(on_two):
    first, second = on_two[1]["wrapped_iterables_as_they_are"]
    assert first["same"]
    assert second["same"]
    for case in ("other on rank 1", "other, per rank"):
        assert len(first[case]) > 1
        assert isinstance(first[case][0], list)
        assert second[case][0] == "DataStateError"
        assert "another way" in second[case][1]
    assert first["not compared"]
    assert second["not compared"]
    assert first["common"] == second["common"]  # by hand: one state for all, as it was


def test_lengths_and_seeds_are_compared_with_those_of_the_rank(on_two):
    for answer in on_two[1]["wrapped_samplers_as_they_are"]:
        assert answer["same"]
        assert "sampler's order was seed=3" in answer["seed of all"][1]
        assert "seed of 'generator' was 31, now it is 41" in answer["seed of rank 1"][1]
        assert "number of items was 60, now it is 68" in answer["grown"][1]


def test_positions_of_the_loaders_own_are_kept_for_each_rank(on_two):
    first, second = on_two[1]["wrapped_keepers_as_they_are"]
    assert first["same"]
    assert second["same"]
    assert first["left"] != second["left"]


def test_it_does_not_matter_whether_a_checkpoint_was_saved_per_rank_or_by_an_earlier_version(
    on_two,
):
    first, second = on_two[1]["wrapped_otherwise_than_saved"]
    for answer in (first, second):
        assert answer["of PerRank"]
        assert answer["of before"]
        assert isinstance(
            answer["ranks swapped"][0], list
        )  # what another rank told is not compared
    assert second["of PerRank, other"][0] == "DataStateError"
    assert [len(first["heard"]), len(second["heard"])] == [1, 0]


def test_on_another_number_of_ranks_only_what_all_have_in_common_counts(on_two):
    assert on_two[1]["wrapped_on_more_ranks"] == [1, 1]
    job = "wrapped_on_other_ranks"
    for answer in values(start(3, on_two[0], [job])[job]):
        assert "number of ranks was 2, now it is 3" in answer["middle"][1]
        assert answer["epoch"] == 1
        assert answer["batches"] == 5
