"""Values that differ between ranks are named by their inner paths; those that do not, are saved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import start, values

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]
WORKER = Path(__file__).with_name("worker.py")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    jobs = [
        "differing_values_are_named",
        "differing_values_in_the_background",
        "a_rank_cannot_look_into_its_values",
    ]
    return start(2, tmp_path_factory.mktemp("replicas"), jobs)


def paths(error):
    return {path: [text for _, text in held] for path, held in error["found"]}


def test_the_fields_that_differ_are_named_with_what_two_ranks_have(two):
    for said in values(two["differing_values_are_named"]):
        assert paths(said["waiting"]) == {
            "optim.param_groups[1].lr": ["0.1", "1.1"],
            "trainer.progress.seen_samples": ["640", "672"],
            "trainer.progress.host": ["'node-0'", "'node-1'"],
            "trainer.hooks[2].lr": ["0.1", "0.2"],
            "trainer.averages.fast": ["a tensor of shape [9000]"] * 2,
        }
        assert "trainer.hooks[2].lr (rank 0: 0.1, rank 1: 0.2)" in said["waiting"]["text"]
        assert "PerRank" in said["waiting"]["text"]
        assert said["waiting"]["keys"] == [
            "optim.param_groups.1.lr", "trainer.tensors.0", "trainer.tree"
        ]  # fmt: skip


def test_a_weight_is_named_and_a_save_whose_values_agree_works_after_it(two):
    for said in values(two["differing_values_are_named"]):
        assert list(paths(said["weights"])) == ["model.0.weight"]
        assert paths(said["once more"]) == {"trainer.hooks[0].lr": ["0", "1"]}
        assert said["agreed"] is None
        assert list(paths(said["kept plan"])) == ["trainer.progress.host"]
        assert said["agreed again"] is None
        assert len(said["published"]) == 2


def test_a_save_in_the_background_says_it_and_the_loop_goes_on(two):
    for heard, saved in values(two["differing_values_in_the_background"]):
        assert heard
        assert "trainer.seen (rank 0: 0, rank 1: 1)" in heard[0]
        assert saved == 8


def test_a_rank_that_cannot_look_leaves_the_keys_and_nobody_waits(two):
    for first, second in values(two["a_rank_cannot_look_into_its_values"]):
        assert first["keys"] == ["trainer.tree"]
        assert first["found"] == []
        assert "trainer.tree" in first["text"]
        assert second is None


def test_ranks_with_hash_seeds_of_their_own_hold_the_same_sets(tmp_path):
    """As under torchrun; the ranks of other tests are forks of one process, with one seed."""
    (tmp_path / "run").mkdir()
    arguments = [str(tmp_path / "run"), str(tmp_path), "values_that_only_look_different"]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), *arguments],
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": "2", "PYTHONHASHSEED": str(rank + 1)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        assert [one.wait(100) for one in ranks] == [0, 0]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    said = [json.loads((tmp_path / "run" / f"{rank}.json").read_text()) for rank in range(2)]
    answers = values([of_rank["values_that_only_look_different"] for of_rank in said])
    for ours, plain, _ in answers:
        assert ours == [None, None]
        assert plain == [None, None]
    assert answers[0][2] != answers[1][2]
