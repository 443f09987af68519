"""What accelerate has prepared, as parts of a `Checkpointer`; its own saves by the drop-in."""

import json

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
