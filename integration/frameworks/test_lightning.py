"""Lightning is killed and goes on: same samples, same losses, other ranks."""

import functools

import jobs
import pytest

JOB = "pl_job.py"
RANKS = {"alone": 1, "ddp": 2, "fsdp2": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return, by layout, the output of a run that nothing interrupts."""

    @functools.cache
    def of(layout):
        folder = tmp_path_factory.mktemp(layout)
        jobs.run(JOB, folder, folder / "out", layout, ranks=RANKS[layout])
        return folder / "out"

    return of


def killed(folder, layout, every, step):
    options = ("--every", every, "--kill", step)
    jobs.run(JOB, folder, folder / "out", layout, *options, ranks=RANKS[layout], dies=True)
    return jobs.saved_before(folder / "root", step)


@pytest.mark.framework("lightning", "killed and resumed")
@pytest.mark.parametrize(
    ("layout", "every", "kill"),
    [("alone", 3, 8), ("alone", 8, 11), ("ddp", 3, 11), ("fsdp2", 3, 11)],
)
def test_a_killed_fit_goes_on_as_if_nothing_had_been(tmp_path, whole, layout, every, kill):
    saved = killed(tmp_path, layout, every, kill)
    jobs.run(JOB, tmp_path, tmp_path / "out2", layout, ranks=RANKS[layout])
    before, again = jobs.trained(whole(layout)), jobs.trained(tmp_path / "out2")
    jobs.assert_every_sample_once(before)
    assert again == {step: before[step] for step in range(saved + 1, 17)}
    end, at_first = jobs.end(tmp_path / "out2"), jobs.end(whole(layout))
    jobs.assert_equal({**at_first, "losses": at_first["losses"][saved:]}, end)


@pytest.mark.framework("lightning", "other ranks")
@pytest.mark.parametrize(
    ("layout", "ranks", "as_layout"),
    [("ddp", 4, "ddp"), ("ddp", 1, "alone"), ("fsdp2", 4, "fsdp2"), ("fsdp2", 1, "alone")],
)
def test_it_goes_on_with_other_ranks_and_every_sample_once(
    tmp_path, whole, layout, ranks, as_layout
):
    saved = killed(tmp_path, layout, 3, 11)
    jobs.run(JOB, tmp_path, tmp_path / "out2", as_layout, ranks=ranks)
    before, again = jobs.trained(whole(layout)), jobs.trained(tmp_path / "out2")
    assert min(again) == saved + 1
    jobs.assert_every_sample_once({**before, **again})


def test_a_newest_checkpoint_that_is_damaged_is_passed_over(tmp_path):
    killed(tmp_path, "alone", 3, 14)
    *_, before, newest = jobs.published(tmp_path / "root")
    for shard in (tmp_path / "root" / f"step_{newest:08d}").glob("*.distcp"):
        shard.write_bytes(bytes(shard.stat().st_size))
    jobs.run(JOB, tmp_path, tmp_path / "out2", "alone")
    assert min(jobs.trained(tmp_path / "out2")) == before + 1
