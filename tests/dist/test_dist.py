"""Several ranks over gloo. The jobs are in `worker.py`; each launch runs many, processes cost."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import start, values
from torch import nn

from dcp_checkfreq import CheckFreqReader, Checkpointer, find_latest_valid

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]

FIRST_ON_FOUR = [
    "save_shards",
    "save_big",
    "replicated_is_written_once",
    "kept_plans",
    "replicas_differ",
    "one_rank_has_no_space",
    "checkpointer_cleans_up_on_all_ranks",
    "different_roots",
    "one_answer_for_all",
    "refusals_on_all_ranks",
    "train_fsdp",
    "train_ddp",
    "per_rank_values",
    "plain_value_that_differs",
    "replicas_that_drift_apart",
    "saves_beside_collectives",
    "abandoned_branch",
    "left_behind",
    "damage_that_one_rank_reads",
]
THEN_ON_TWO = [
    "the_loops_of_all_ranks_end_by_an_error",
    "the_first_line_says_what_snapshots_take",
    "load_shards",
    "load_big",
    "resume_fsdp",
    "resume_ddp",
    "read_per_rank_values",
    "save_shards",
    "save_big",
]
THEN_ON_THREE = ["load_shards", "resume_fsdp", "save_shards"]
AT_LAST_ON_FOUR = ["load_shards", "load_big", "resume_fsdp", "read_per_rank_values"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("dist")


@pytest.fixture(scope="module")
def four(shared):
    return start(4, shared, FIRST_ON_FOUR)


@pytest.fixture(scope="module")
def two(shared, four):
    return start(2, shared, THEN_ON_TWO)


@pytest.fixture(scope="module")
def three(shared, two):
    return start(3, shared, THEN_ON_THREE)


@pytest.fixture(scope="module")
def four_again(shared, three):
    return start(4, shared, AT_LAST_ON_FOUR)


# --- case 27: save on N, load on M ---


@pytest.mark.parametrize("launch", ["two", "three", "four_again"])
def test_any_sharding_of_any_world_loads_on_any_other(launch, request):
    answers = values(request.getfixturevalue(launch)["load_shards"])
    assert [answer["wrong"] for answer in answers] == [[]] * len(answers)
    assert answers[0]["count"] > 100


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_way_to_save_loads_as_every_sharding(shared, four_again, ranks):
    answers = values(start(ranks, shared, ["load_shards_every_way"])["load_shards_every_way"])
    assert [answer["wrong"] for answer in answers] == [[]] * ranks
    assert answers[0]["count"] > 1000


def test_any_sharding_loads_into_plain_tensors_of_one_process(shared, four_again):
    folders = sorted(shared.glob("shards_*"))
    assert len(folders) == 15
    for folder in folders:
        for reader in (CheckFreqReader(folder), dcp.FileSystemReader(folder)):
            saved = CheckFreqReader(folder).read_metadata().state_dict_metadata
            target = {
                key: torch.zeros(kept.size) for key, kept in saved.items() if hasattr(kept, "size")
            }
            dcp.load(target, storage_reader=reader)
            for key, value in target.items():
                wanted = torch.arange(1, value.numel() + 1, dtype=torch.float32)
                assert torch.equal(value, wanted.reshape(value.shape)), f"{folder.name} {key}"


@pytest.mark.parametrize(("launch", "saved_on"), [("four_again", 2), ("four_again", 4), ("two", 4)])
def test_a_rank_reads_only_the_rows_that_it_needs(launch, saved_on, request):
    for answer in values(request.getfixturevalue(launch)["load_big"]):
        right, read_bytes, needed_bytes, local_bytes = answer[f"big_{saved_on}"]
        assert right
        assert needed_bytes == local_bytes
        assert read_bytes <= 1.05 * needed_bytes


def test_replicated_tensors_are_written_by_one_rank_only(four):
    for size_bytes in values(four["replicated_is_written_once"]):
        assert size_bytes < 1.1 * 2 * 1024 * 512 * 4


# --- item 6: kept plans ---


def test_plans_are_kept_and_made_anew_on_all_ranks_when_one_has_changed(four):
    for answer in values(four["kept_plans"]):
        assert answer["made"] == [1, 1, 1, 2, 2, 3]
        assert answer["wrong"] == []


# --- case 30, item 8: values that differ ---


def test_differing_replicas_are_named_on_all_ranks_and_nothing_is_published(four):
    for answer in values(four["replicas_differ"]):
        for name, key in (
            ("byte item", "rng.seed"),
            ("tensor", "pos"),
            ("byte item later", "rng.seed"),
            ("tensor on request", "w"),
        ):
            (kind, text, _), published = answer[name]
            assert kind == "ReplicasDiffer", text
            assert key in text
            assert "PerRank" in text
            assert not published, name
        for name in ("same", "same again", "same at last"):
            assert answer[name] == [None, True], name


def test_a_plain_value_that_differs_fails_the_save_by_name(four):
    for error in values(four["plain_value_that_differs"]):
        assert error[0] == "ReplicasDiffer"
        assert "seed" in error[1]


def test_tensors_that_drift_apart_are_found_when_the_save_is_asked_to_look(four):
    for first, unasked, asked, later in values(four["replicas_that_drift_apart"]):
        assert (first, unasked) == (None, None)
        for error in (asked, later):  # once asked, saves are refused until one passes
            assert error[0] == "ReplicasDiffer"
            assert "values of w;" in error[1]


def test_per_rank_values_come_back_to_their_ranks(four, two, four_again):
    assert values(four["per_rank_values"]) == [[100 + r, r] for r in range(4)]
    assert values(two["read_per_rank_values"]) == [[100 + r, r] for r in range(2)]
    assert values(four_again["read_per_rank_values"]) == [[100 + r, r] for r in range(4)]


# --- case 24: failures of one rank ---


@pytest.mark.parametrize("planner", ["default", "ours"])
def test_one_rank_without_space_fails_the_save_on_all_and_the_next_works(four, planner):
    for answer in values(four["one_rank_has_no_space"]):
        first, published, second, right, after_first, left = answer[planner]
        assert first[0] == "WriteFailed"
        assert "rank 2" in first[1]
        assert "No space left" in first[1]
        assert first[2] == 2
        assert not published
        assert second is None
        assert right
        # DCP told ranks 0, 1 and 3 nothing; the next save has removed what they had written.
        assert after_first == 3
        assert len([name for name in left if name.endswith(".distcp")]) == 4
        assert [name for name in left if not name.endswith(".distcp")] == [".metadata"]


def test_a_failed_save_of_checkpointer_leaves_no_file_of_any_rank(four):
    for answer in values(four["checkpointer_cleans_up_on_all_ranks"]):
        assert answer == {"failures": 1, "left": [], "last": 3}


def test_a_rank_killed_while_writing_is_an_error_on_the_others_and_nothing_is_published(shared):
    answers = start(3, shared, ["one_rank_is_killed"], expect_death=[1], timeout_s=90)
    ended = answers["one_rank_is_killed"]
    assert ended[1] is None
    for error, published in values([ended[0], ended[2]]):
        assert error is not None
        assert not published
    assert find_latest_valid(shared / "killed") is None


def test_checkpointer_that_loses_a_rank_raises_and_keeps_the_step_before(shared):
    answers = start(3, shared, ["checkpointer_loses_a_rank"], expect_death=[1], timeout_s=90)
    ended = answers["checkpointer_loses_a_rank"]
    for error, newest in values([ended[0], ended[2]]):
        assert error[0] == "RankLost", error
        assert "another rank did not answer" in error[1]
        assert "not saved" not in error[1], "the last save may have been"
        assert newest == 1


def test_a_rank_that_cannot_copy_its_state_fails_the_save_on_all_and_the_next_works(shared):
    answers = start(2, shared, ["one_rank_cannot_copy_its_state"], timeout_s=90)
    for first, second, newest in values(answers["one_rank_cannot_copy_its_state"]):
        assert first[0] == "SnapshotFailed"
        assert second is None
        assert newest == 2


def test_an_error_ends_the_loop_of_all_ranks_at_the_same_step(shared):
    answers = start(2, shared, ["errors_come_at_the_same_step"], timeout_s=90)
    steps = values(answers["errors_come_at_the_same_step"])
    assert steps[0] is not None
    assert steps[0] == steps[1]


def test_the_older_checkpoint_is_restored_on_all_ranks_when_one_reads_damage(four):
    for step, passed_over, found in values(four["damage_that_one_rank_reads"]):
        assert (step, passed_over, found) == (1, 1, [1.0])


# --- one answer for all ranks (cases 09, 16) ---


def test_ranks_that_see_different_roots_are_told_at_the_start(four):
    for kind, text, _ in values(four["different_roots"]):
        assert kind == "RootDiffers"
        assert "ranks [1, 2, 3]" in text


def test_all_ranks_get_the_answer_and_the_error_of_rank_0(four):
    for step, rejected, error, nothing, alone in values(four["one_answer_for_all"]):
        assert (step, rejected, nothing, alone) == (7, 1, None, 7)
        assert error[0] == "OSError"


def test_refusals_are_the_same_on_all_ranks(four):
    for not_found, foreign, none_whole in values(four["refusals_on_all_ranks"]):
        assert not_found[0] == "StepNotFound"
        assert foreign[0] == "StepsExist"
        assert none_whole[0] == "NoValidCheckpoint"


def test_an_abandoned_branch_is_not_latest_for_any_rank(four):
    assert values(four["abandoned_branch"]) == [[2, 3, 3, 33]] * 4


def test_a_run_that_was_left_behind_hears_it_on_all_ranks(four):
    said = values(four["left_behind"])
    assert [run_ids for _, run_ids in said] == [said[0][1]] * 4, "the same on all ranks"
    assert len(said[0][1]) == 2
    for name, text, _ in [answer for answers, _ in said for answer in answers]:
        assert name == "LeftBehind"
        assert "went on from step 1" in text


# --- item 8: models ---


@pytest.mark.parametrize(("launch", "ranks"), [("two", 2), ("three", 3), ("four_again", 4)])
def test_fsdp_resumes_on_another_number_of_ranks(launch, ranks, request):
    values(request.getfixturevalue("four")["train_fsdp"])
    for rank, answer in enumerate(values(request.getfixturevalue(launch)["resume_fsdp"])):
        assert (answer["step"], answer["world"]) == (6, 4)
        assert answer["bits"], "restored weights differ from the saved ones"
        assert answer["close"], "training on gave other weights"
        assert answer["own"] == rank
        assert answer["note"] == "n"
        assert answer["lr"] == pytest.approx(0.05 * 0.01)
        assert answer["milestones"] == ["2", "4"]


@pytest.mark.parametrize("name", ["fsdp", "ddp"])
def test_what_many_ranks_saved_resumes_in_one_plain_process(shared, four, name):
    values(four[f"train_{name}"])
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    with Checkpointer(shared / name, {"model": model, "optim": optimizer}, every=1000) as ckpt:
        assert ckpt.restore().world_size == 4
    wanted = torch.load(shared / ("fsdp_at_6.pt" if name == "fsdp" else "ddp.pt"))
    for ours, theirs in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(ours, theirs)
    assert len(optimizer.state) == 4


def test_ddp_resumes_on_another_number_of_ranks_under_plain_names(four, two):
    assert all("module" not in key for key in values(four["train_ddp"])[0])
    assert values(two["resume_ddp"]) == [[2, True]] * 2


def test_background_saves_do_not_mix_with_the_collectives_of_the_training(four):
    for answer in values(four["saves_beside_collectives"]):
        assert answer["bad"] == 0
        assert answer["saved"] == 12
        assert answer["steps"] == ["step_00000011", "step_00000012"]


# --- item 1: process mode ---


def test_async_save_in_process_mode_publishes_and_loads_equal(shared):
    answers = start(2, shared, ["process_mode"], timeout_s=120)
    for answer in values(answers["process_mode"]):
        assert answer["right"] == [True] * 6
        assert "CheckpointExists" in answer["again"][0]
    assert find_latest_valid(shared / "process", depth="digest").step == 2


def test_the_first_line_of_a_run_says_what_snapshots_take_on_this_node(two):
    first, second = values(two["the_first_line_says_what_snapshots_take"])
    line, taken = first["first"]
    assert taken == 0, "it was said before"
    node_bytes = first["taken"] + second["taken"]
    assert second["taken"] > 2.9 * first["taken"] > 0
    assert line == (
        f"snapshots take {node_bytes} bytes of host memory and 0 bytes of GPU memory on this node "
        "(2 ranks), the first one now"
    )
    assert first["lines"] == [line], "once"
    assert second["lines"] == [], "for each node"
    for rank in (first, second):
        assert rank["ahead"] == {
            "host_bytes": rank["taken"],
            "gpu_bytes": 0,
            "node_host_bytes": node_bytes,
            "node_gpu_bytes": 0,
            "node_ranks": 2,
            "without_state": [],
        }
        assert rank["is_the_same_later"]


def test_several_ranks_say_that_they_do_not_agree_on_last_words_yet(two):
    for rank, answer in enumerate(values(two["the_loops_of_all_ranks_end_by_an_error"])):
        error, said, steps = answer
        assert error == f"of rank {rank}"
        assert said == [
            "after ArithmeticError: step 3 is not saved: several ranks do not agree on a save "
            "after an error yet. The last published step is 2"
        ]
        assert steps == ["step_00000002"], "the save in flight was finished"
