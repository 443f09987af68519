"""Ranks with different clocks and costs do the same at the same step, and each copies its part."""

import pytest
import torch
from forked_ranks import ForkedRanks
from launch import start, values

from dcp_checkfreq import Checkpointer, PerRank

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]

ON_FOUR = [
    "partial_copies_ddp",
    "partial_copies_fsdp",
    "partial_copies_hsdp",
    "structure_changes",
    "replicas_are_checked",
    "a_piece_that_was_not_copied",
    "sharded_weights_change_outside_of_a_step",
    "errors_reach_all_ranks_at_one_step",
    "a_failed_decision_at_one_step",
    "too_many_failures_at_one_step",
    "a_log_handler_raises_on_one_rank",
    "ranks_agree_beside_collectives",
    "ranks_agree_without_collectives",
    "ranks_agree_whatever_their_clocks_say",
    "a_restart_knows_its_interval",
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("agreement")


@pytest.fixture(scope="module")
def four(shared):
    return start(4, shared, ON_FOUR, timeout_s=300)


# --- each rank copies what it writes, and the whole is whole ---


def test_with_ddp_each_of_four_ranks_copies_a_quarter(four):
    answers = values(four["partial_copies_ddp"])
    for answer in answers:
        m = answer["local"]
        assert answer["state"] == [m] * 3
        assert answer["copied"][0] == m, "the first save compares all of it between ranks"
        for copied in answer["copied"][1:]:
            assert abs(copied - m / 4) <= 0.05 * m / 4
    assert [sum(a["copied"][n] for a in answers) for n in (1, 2)] == [answers[0]["local"]] * 2


def test_with_fsdp_each_rank_copies_all_of_its_shards(four):
    for answer in values(four["partial_copies_fsdp"]):
        assert answer["copied"][0] == answer["state"][0]
        # What is not sharded (step counters) is written by one rank.
        assert answer["copied"][2] == pytest.approx(answer["local"], rel=0.01)


def test_with_hsdp_each_rank_copies_half_of_its_shards(four):
    for answer in values(four["partial_copies_hsdp"]):
        for copied in answer["copied"][1:]:
            assert copied == pytest.approx(answer["local"] / 2, rel=0.05)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_partial_copies_make_whole_checkpoints_that_no_update_has_torn(four, kind):
    for answer in values(four[f"partial_copies_{kind}"]):
        assert answer["errors"] == [None] * 3
        assert answer["overlapped"] > 0
        assert answer["wrong"] == [[]] * 3
        assert answer["newest"] == 3


def test_a_changed_structure_on_any_rank_is_copied_and_planned_anew(four):
    for answer in values(four["structure_changes"]):
        assert answer["wrong"] == [[]] * 8
        assert answer["newest"] == 8
        for name, copied, state, error in answer["said"]:
            assert error is None, (name, error)
            if name == "same":
                assert copied < 0.5 * state, name
            else:
                assert copied == state, name


def test_comparing_replicas_copies_all_of_them(four):
    for saves in values(four["replicas_are_checked"]):
        first, second, checked, after = (copied / state for copied, state in saves)
        assert (first, checked) == (1.0, 1.0)
        assert second < 0.3
        assert after < 0.3


def test_a_piece_that_was_not_copied_fails_the_save_before_the_commit(four):
    for said in values(four["a_piece_that_was_not_copied"]):
        kinds = [error and error[0] for error, *_ in said]
        assert kinds == [None, None, "PlanCacheStale", None, None]
        assert "was not copied" in said[2][0][1]
        assert [found for _, found, *_ in said] == [1, 2, 2, 4, 5]
        shares = [copied / state for _, _, copied, state, _ in said]
        assert shares[3] == 1.0, "after an error everything is copied"
        assert max(shares[1], shares[2]) < 0.3
        assert [wrong for *_, wrong in said] == [[]] * 5


def test_sharded_weights_that_change_outside_of_a_step_fail_the_save(four):
    for begun, error, wrong in values(four["sharded_weights_change_outside_of_a_step"]):
        assert begun
        assert wrong == []
        assert "was changed while it was being copied" in error


# --- one k, one step (case 23) ---


AT_LEAST_SAVES = {  # on any machine; on one that is not busy 60 and 140
    "beside_collectives": 20,
    "without_collectives": 40,
    "whatever_their_clocks_say": 3,
}


@pytest.mark.parametrize("kind", AT_LEAST_SAVES)
def test_all_ranks_have_the_same_interval_at_every_step(four, kind):
    answers = values(four[f"ranks_agree_{kind}"])
    steps = min(len(answer["k"]) for answer in answers)
    for answer in answers[1:]:
        differing = [n for n in range(steps) if answer["k"][n] != answers[0]["k"][n]]
        assert differing == []
        saves = min(len(answer["saved"]), len(answers[0]["saved"]))
        assert answer["saved"][:saves] == answers[0]["saved"][:saves]
    chosen = {k for k in answers[0]["k"] if k is not None}
    assert len(chosen) > 1 or kind == "whatever_their_clocks_say", "k was to change"
    assert len(answers[0]["saved"]) >= AT_LEAST_SAVES[kind]
    assert all(error is None for _, _, error in answers[0]["saved"])
    assert all(answer["right"] for answer in answers)


@pytest.mark.parametrize("kind", ["beside_collectives", "whatever_their_clocks_say"])
def test_background_collectives_never_mix_with_those_of_the_training(four, kind):
    assert [answer["bad"] for answer in values(four[f"ranks_agree_{kind}"])] == [0] * 4


def test_a_restart_on_all_ranks_knows_the_interval_unless_a_rank_or_the_world_differs(shared, four):
    answers = values(four["a_restart_knows_its_interval"])
    last = values(four["ranks_agree_without_collectives"])[0]["last"]
    assert answers == [[last, None]] * 4
    parts = {"w": torch.zeros(5000), "own": PerRank(0)}
    with Checkpointer(shared / "agree_2", parts, max_overhead=0.9) as ckpt:
        assert ckpt.interval_steps is None, "one process is not four"


# --- errors ---


def test_errors_of_any_rank_are_raised_on_all_at_the_same_steps(four):
    answers = values(four["errors_reach_all_ranks_at_one_step"])
    assert sum(answer["struck"] for answer in answers) >= 8
    for answer in answers:
        assert answer["raised"] == answers[0]["raised"]
        assert {kind for _, kind in answer["raised"]} == {"WriteFailed"}
    assert len(answers[0]["raised"]) >= 8


def test_a_decision_that_fails_is_raised_on_all_ranks_at_the_same_step(four):
    answers = values(four["a_failed_decision_at_one_step"])
    assert answers[0]
    for raised in answers:
        assert raised == answers[0]
        assert all("this rule has a bug" in text for _, text in raised)
        assert all("rank 0" in text for _, text in raised)


def test_too_many_failures_end_all_ranks_at_the_same_step(four):
    answers = values(four["too_many_failures_at_one_step"])
    for step, last, text, closing, newest in answers:
        assert step == answers[0][0]
        assert (last, newest) == (8, 8)
        assert "last published step: 8" in text
        assert closing is None or closing[0] == "WriteFailed"


def test_the_exit_code_of_a_run_whose_last_save_failed_tells(tmp_path):
    script = (
        "import errno, sys, torch\n"
        "from dcp_checkfreq import Checkpointer\n"
        "from dcp_checkfreq.storage.local.tier import LocalTier\n"
        "from dcp_checkfreq.testing import Fault, FaultyTier\n"
        "fault = Fault(verb='write_shard', error=errno.ENOSPC, nth=int(sys.argv[2]))\n"
        "tier = FaultyTier(LocalTier(sys.argv[1]), [fault])\n"
        "with Checkpointer(tier, {'x': torch.ones(3)}, every=1) as ckpt:\n"
        "    for _ in range(3):\n"
        "        ckpt.after_step()\n"
    )

    (tmp_path / "script.py").write_text(script)

    def run(failing_save):
        arguments = [tmp_path / str(failing_save), failing_save]
        with ForkedRanks(tmp_path / "script.py", 1, arguments, tmp_path, timeout_s=100) as job:
            (code,) = job.wait()
        return code, (tmp_path / "0.out").read_text()

    assert run(1)[0] == 0, "a later save worked"
    code, said = run(2)
    assert code != 0
    assert "No space left" in said


def test_a_log_handler_that_raises_on_one_rank_leaves_no_other_alone(four):
    answers = values(four["a_log_handler_raises_on_one_rank"])
    assert [answer[:2] for answer in answers] == [[[1], 3]] * 4
    assert [raised for _, _, raised in answers] == [False, True, False, False]


# --- ranks that are gone ---


def test_a_rank_that_hangs_in_a_save_is_lost_for_the_others_in_time(shared):
    answers = start(3, shared, ["a_rank_hangs_in_a_save"], timeout_s=100)
    for rank, said in enumerate(values(answers["a_rank_hangs_in_a_save"])):
        (error, after_s), (_, closing_s), last, found = said
        assert error[0] == "RankLost", error
        assert (last, found) == (1, 1)
        assert closing_s < 5
        if rank != 1:
            assert after_s < 5 + 6


def test_a_rank_that_dies_between_saves_is_noticed_at_the_next_one(shared):
    answers = start(3, shared, ["a_rank_dies_between_saves"], expect_death=[2], timeout_s=100)
    ended = answers["a_rank_dies_between_saves"]
    for (error, after_s), (_, closing_s), step, found in values(ended[:2]):
        assert error[0] == "RankLost", error
        assert after_s < 10 + 6
        assert closing_s < 5
        assert (step, found) == (9, 6)
