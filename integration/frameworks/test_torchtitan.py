"""torchtitan's `Trainer` is killed and goes on: same samples, same losses, other ranks."""

import functools
import json

import jobs
import pytest

JOB = "titan_job.py"


def run(*arguments, ranks=2, **others):
    return jobs.run(JOB, *arguments, ranks=ranks, launched=True, **others)


def losses(out, rank=0):
    lines = map(json.loads, (out / f"rank{rank}.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return, by options, the output of a run that nothing interrupts."""

    @functools.cache
    def of(*options):
        folder = tmp_path_factory.mktemp("whole")
        run(folder, folder / "out", 4, *options)
        return folder / "out"

    return of


def killed(folder, *options):
    run(folder, folder / "out", 4, *options, "--kill", 11, dies=True)
    return jobs.saved_before(folder / "root", 11)


@pytest.mark.framework("torchtitan", "killed and resumed")
@pytest.mark.parametrize("options", [(), ("--streamed",)], ids=["by position", "torchdata"])
def test_a_killed_trainer_goes_on_as_if_nothing_had_been(tmp_path, whole, options):
    saved = killed(tmp_path, *options)
    run(tmp_path, tmp_path / "out2", 4, *options)
    before, again = jobs.trained(whole(*options)), jobs.trained(tmp_path / "out2")
    jobs.assert_every_sample_once(before)
    assert again == {step: before[step] for step in range(saved + 1, 17)}
    for rank in range(2):
        at_first = losses(whole(*options), rank)
        assert losses(tmp_path / "out2", rank) == {step: at_first[step] for step in again}
    jobs.assert_equal(jobs.end(tmp_path / "out2"), jobs.end(whole(*options)))
    assert jobs.published(tmp_path / "root")[-1] == 16


@pytest.mark.framework("torchtitan", "other ranks")
@pytest.mark.parametrize(("ranks", "per_rank"), [(1, 8), (4, 2)])
def test_it_goes_on_with_other_ranks_and_every_sample_once(tmp_path, whole, ranks, per_rank):
    saved = killed(tmp_path)
    run(tmp_path, tmp_path / "out2", per_rank, ranks=ranks)
    before, again = jobs.trained(whole()), jobs.trained(tmp_path / "out2")
    assert again == {step: before[step] for step in range(saved + 1, 17)}
    every = [sum(losses(whole(), rank)[step] for rank in range(2)) for step in again]
    now = [sum(losses(tmp_path / "out2", rank)[step] for rank in range(ranks)) for step in again]
    assert now == pytest.approx(every, rel=1e-3)  # summed in another order


def test_a_loader_with_a_position_of_each_rank_is_refused_on_other_ranks(tmp_path):
    saved = killed(tmp_path, "--streamed")
    told = run(tmp_path, tmp_path / "out2", 8, "--streamed", ranks=1, fails=True)
    assert "the number of ranks was 2, now it is 1" in told
    run(tmp_path, tmp_path / "out3", 8, "--streamed", "--exclude", "dataloader", ranks=1)
    again = jobs.trained(tmp_path / "out3")
    assert min(again) == saved + 1
    assert again[saved + 1] == list(range(8)), "the data begins anew"


def test_a_job_that_is_done_trains_nothing_more_and_leaves_the_model_alone_too(tmp_path):
    run(tmp_path, tmp_path / "out", 8, "--export", ranks=1)
    assert (tmp_path / "root" / "step-16" / ".metadata").exists(), "torchtitan's own"
    run(tmp_path, tmp_path / "out2", 8, ranks=1)
    assert jobs.trained(tmp_path / "out2") == {}
    jobs.assert_equal(jobs.end(tmp_path / "out2"), jobs.end(tmp_path / "out"))


def test_an_error_in_the_training_is_told_to_the_checkpointer(tmp_path):
    told = run(tmp_path, tmp_path / "out", 8, "--fail", 8, ranks=1, fails=True)
    assert "after ArithmeticError: step " in told
    run(tmp_path, tmp_path / "out2", 8, ranks=1)
    assert min(jobs.trained(tmp_path / "out2")) in (7, 8)
