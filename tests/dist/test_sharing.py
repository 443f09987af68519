"""Reads that ranks share over gloo. The jobs are in `jobs_sharing.py`."""

import pytest
from launch import start, values

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]

JOBS = [
    "shared_reads",
    "shared_reads_of_damage",
    "shared_reads_with_another_dtype",
    "shared_reads_through_damaged_copies",
    "checkpointer_shares_reads",
]
# All that is in the state of the jobs, in bytes, but for the note.
STATE_BYTES = 4 * (700 * 3001 + 17 + 64 * 1024 + 64 * 999)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    return start(request.param, tmp_path_factory.mktemp("sharing"), JOBS)


def test_every_byte_is_read_once_in_all(ranks):
    alone = [answer["alone"] for answer in values(ranks["shared_reads"])]
    shared = [answer["shared"] for answer in values(ranks["shared_reads"])]
    print("read, received by each rank:", [answer[1:3] for answer in shared])
    assert all(answer[0] for answer in alone + shared)
    assert sum(answer[1] for answer in alone) > (len(alone) - 0.1) * STATE_BYTES
    # reads begin and end at pages
    assert STATE_BYTES <= sum(answer[1] for answer in shared) < 1.03 * STATE_BYTES
    for right, read_bytes, received_bytes, needed_bytes in shared:
        assert right
        assert read_bytes < 1.3 * STATE_BYTES / len(shared)
        assert read_bytes + received_bytes >= needed_bytes


def test_damage_is_an_error_on_all_ranks(ranks):
    for kind, text, _ in (answer["value"] for answer in ranks["shared_reads_of_damage"]):
        assert kind == "BrokenShard"
        assert "fails its digest" in text


def test_a_rank_that_cannot_load_is_an_error_on_all_ranks(ranks):
    for kind, text, _ in (answer["value"] for answer in ranks["shared_reads_with_another_dtype"]):
        assert kind == "DtypeDiffers"
        assert "float64" in text


def test_if_local_copies_are_damaged_all_ranks_read_the_slow_side(ranks):
    for answer in values(ranks["shared_reads_through_damaged_copies"]):
        assert answer[0]


def test_checkpointer_reports_what_each_rank_read(ranks):
    answers = values(ranks["checkpointer_shares_reads"])
    assert all(right for answer in answers for right, _, _ in answer)
    alone, shared = (sum(answer[n][1] for answer in answers) for n in (0, 1))
    assert shared < 1.2 * alone / len(answers)
    assert all(answer[0][2] == 0 for answer in answers)
    assert all(answer[1][2] > 0 for answer in answers)
