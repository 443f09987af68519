"""Two ranks over gloo with local disks in front of a shared root. See `jobs_staged.py`."""

import pytest
from launch import start, values

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("staged")


@pytest.fixture(scope="module")
def two(shared):
    return start(
        2,
        shared,
        [
            "staged_upload_fails_on_one_rank",
            "staged_ranks_change_places",
            "staged_one_node_is_new",
            "staged_on_one_node",
            "staged_one_disk_is_full",
            "staged_upload_outlasts_the_timeout",
        ],
    )


def test_an_upload_that_fails_on_one_rank_is_an_error_on_all_and_is_finished_later(two):
    for answer in values(two["staged_upload_fails_on_one_rank"]):
        assert answer["error"][0] == "WriteFailed"
        assert "rank 1, while uploading" in answer["error"][1]
        step, reasons = answer["seen"]
        assert step == 2
        assert "several nodes" in reasons[0]
        assert (answer["restored"], answer["whole"], answer["wrong"]) == (3, 3, [])


def test_ranks_may_have_changed_places(two):
    for answer in values(two["staged_ranks_change_places"]):
        assert (answer["restored"], answer["whole"], answer["wrong"]) == (3, 4, [])


def test_if_one_node_is_new_all_ranks_go_on_from_the_slow_side(two):
    for answer in values(two["staged_one_node_is_new"]):
        assert (answer["restored"], answer["whole"], answer["wrong"]) == (2, 3, [])


def test_on_one_node_training_goes_on_before_the_upload_is_finished(two):
    for answer in values(two["staged_on_one_node"]):
        assert answer["seen"] == [3, True]
        assert (answer["restored"], answer["before"], answer["after"]) == (3, False, 3)
        assert answer["wrong"] == []
        assert sorted(set(answer["files"])) == ["", ".distcp", ".up"]
        assert answer["files"].count(".distcp") == 2


def test_a_rank_without_a_local_disk_does_not_hold_up_the_others(two):
    for answer in values(two["staged_one_disk_is_full"]):
        assert (answer["restored"], answer["whole"], answer["wrong"]) == (3, 3, [])


def test_an_upload_may_take_longer_than_ranks_wait_for_each_other(two):
    for answer in values(two["staged_upload_outlasts_the_timeout"]):
        assert (answer["whole"], answer["wrong"]) == (1, [])


def test_ranks_that_are_killed_in_their_uploads_lose_nothing(shared):
    start(2, shared, ["staged_ranks_are_killed"], expect_death=(0, 1))
    for answer in values(start(2, shared, ["staged_after_the_kill"])["staged_after_the_kill"]):
        assert (answer["restored"], answer["whole"], answer["wrong"]) == (3, 4, [])
