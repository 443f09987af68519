"""What accelerate has prepared, as parts of a `Checkpointer`; its own saves by the drop-in."""

import json
import shutil

import jobs
import pytest
import torch

JOB = "acc_job.py"


def said(out, rank):
    """Return losses and rates of a rank by step, of the last life that trained it."""
    found = {}
    for line in (out / f"rank{rank}.jsonl").read_text().splitlines():
        one = json.loads(line)
        found.setdefault(one["step"], {}).setdefault(one["pid"], []).append(one["said"])
    return {step: list(lives.values())[-1] for step, lives in found.items()}


@pytest.mark.framework("accelerate", "killed and resumed")
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, [4]), (1, [2, "--accumulate", 2]), (2, [4]), (1, [4, "--dispatch"])],
    ids=["alone", "accumulated", "ddp", "dispatched"],
)
def test_prepared_parts_come_back_bit_for_bit(ranks, options, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    jobs.run(JOB, tmp_path / "a", whole, *options, ranks=ranks)
    every = jobs.trained(whole)
    again = JOB, tmp_path / "b", parts, *options
    jobs.run(*again, "--kill", len(every) // 2 + 2, ranks=ranks, dies=True)
    assert jobs.published(tmp_path / "b" / "root"), "it was killed before its first save"
    jobs.run(*again, ranks=ranks)
    assert jobs.trained(parts) == every
    assert sorted(one for step in every.values() for one in step) == sorted(2 * list(range(32)))
    for rank in range(ranks):
        assert said(parts, rank) == said(whole, rank)
        ends = [torch.load(out / f"end{rank}.pt") for out in (parts, whole)]
        assert ends[0] == ends[1]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Return two of a job that was killed in the second epoch: data by position, and replayed."""

    def killed(name, *options):
        folder = tmp_path_factory.mktemp(name)
        jobs.run(JOB, folder, folder / "out", 4, *options, "--kill", 7, ranks=2, dies=True)
        return folder

    return killed("position", "--by-position"), killed("replayed")


@pytest.mark.framework("accelerate", "other ranks")
@pytest.mark.parametrize(("ranks", "per_rank"), [(1, 8), (4, 2)])
def test_prepared_parts_go_on_with_other_ranks_and_every_sample_once(
    two_ranks, tmp_path, ranks, per_rank
):
    shutil.copytree(two_ranks[0], tmp_path / "b")
    out = tmp_path / "out"
    jobs.run(JOB, tmp_path / "b", out, per_rank, "--by-position", ranks=ranks)
    before, again = jobs.trained(tmp_path / "b" / "out"), jobs.trained(out)
    assert min(again) == 7
    jobs.assert_every_sample_once({**before, **again}, steps=8, per_epoch=4, samples=32)
    # as accelerate has it: a step counts once for each rank
    steps = {7: 12 + ranks, 8: 12 + 2 * ranks}
    for step, [(_loss, rate)] in said(out, 0).items():
        assert rate == pytest.approx(0.01 * 0.97 ** steps[step])


def test_a_prepared_data_loader_has_no_place_for_other_ranks_in_an_epoch(two_ranks, tmp_path):
    shutil.copytree(two_ranks[1], tmp_path / "b")
    told = jobs.run(JOB, tmp_path / "b", tmp_path / "out", 8, fails=True)
    assert "DataStateError" in told
    assert "the number of ranks was 2, now it is 1" in told


@pytest.mark.framework("accelerate", "save_state by the drop-in")
def test_save_state_with_sharded_states_goes_through_the_drop_in(tmp_path):
    job = JOB, tmp_path / "b", tmp_path / "first", 4, "--state"
    jobs.run(*job, "--kill", 1, ranks=2, dies=True)
    folders = [one.parent for one in (tmp_path / "b").rglob(".metadata")]
    assert len(folders) == 2, "model and optimizer"
    for folder in folders:
        names = {one.name for one in folder.glob("*.distcp")}
        assert names
        assert "__0_0.distcp" not in names, "stock's name: ours have the id of the attempt"
    jobs.run(JOB, tmp_path / "b", tmp_path / "second", 4, "--state", "--load", ranks=2)
    ends = [torch.load(tmp_path / one / "end0.pt") for one in ("first", "second")]
    assert ends[0] == ends[1]


@pytest.mark.framework("accelerate", "save_state on other ranks")
@pytest.mark.parametrize("ranks", [1, 4])
def test_what_save_state_has_saved_is_loaded_on_other_ranks(tmp_path, ranks):
    job = JOB, tmp_path / "b", tmp_path / "first", 4, "--state"
    jobs.run(*job, "--kill", 1, ranks=2, dies=True)
    jobs.run(JOB, tmp_path / "b", tmp_path / "second", 4, "--state", "--load", ranks=ranks)
    ends = [torch.load(tmp_path / one / "end0.pt") for one in ("first", "second")]
    assert ends[0]["at save"] == ends[1]["at save"]
