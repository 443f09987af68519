"""The state of a `ZeroRedundancyOptimizer` comes back on another number of ranks, bit for bit."""

import pytest
from launch import start, values

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]


def test_zero_goes_on_on_any_number_of_ranks(tmp_path):
    for ranks in (4, 3, 2):
        answers = start(ranks, tmp_path, ["zero"])["zero"]
        assert values(answers) == [[]] * ranks
