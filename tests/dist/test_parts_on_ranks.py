"""All or nothing holds for the ranks together."""

import pytest
from launch import start, values

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def test_a_restore_that_fails_on_one_rank_leaves_all_as_they_were(tmp_path):
    answers = start(2, tmp_path, ["failed_restores_touch_nothing"])
    for of_rank in values(answers["failed_restores_touch_nothing"]):
        assert of_rank == [["LoadFailed", True, True]] * 2
