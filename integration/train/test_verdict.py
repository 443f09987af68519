"""The verdicts of the main job: a run that broke a promise is told from one that kept them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from verdict import (
    Check,
    Kill,
    Killed,
    Launch,
    Outcome,
    Plan,
    Run,
    StepRecord,
    check_against,
    check_run,
)

STEPS, BATCH, SAMPLES = 6, 4, 10


def record(step: int) -> StepRecord:
    places = range((step - 1) * BATCH, step * BATCH)
    return StepRecord(1 / step, tuple(divmod(place, SAMPLES) for place in places))


def outcome(first: int, last: int, *, killed_in: int | None = None) -> Outcome:
    ended = {"model_sha256": "m", "optimizer_sha256": "o"}
    return Outcome(
        ranks=2,
        restored=first - 1 or None,
        newest_whole=first - 1 or None,
        restore_s=0.1,
        last_step=last,
        killed=Killed(killed_in, "all ranks", 2, 2, 100, False) if killed_in else None,
        wall_s=1.0,
        steps={step: record(step) for step in range(first, last + 1)},
        finish=None if killed_in else ended,
    )


def whole() -> Run:
    return Run(Plan("whole", (Launch(2),)), [outcome(1, STEPS)])


def killed() -> Run:
    plan = Plan("killed", (Launch(2, Kill(4, None)), Launch(2)))
    return Run(plan, [outcome(1, 5, killed_in=4), outcome(3, STEPS)])


def broken(run: Run, *, bit_identical: bool = True) -> list[str]:
    checks: list[Check] = check_run(run, steps=STEPS, batch=BATCH, samples=SAMPLES)
    checks += check_against(run, whole(), bit_identical=bit_identical)
    return [check.promise for check in checks if not check.kept]


@pytest.mark.parametrize("run", [whole(), killed()])
@pytest.mark.parametrize("bit_identical", [True, False])
def test_a_run_that_kept_its_promises_passes(run: Run, bit_identical: bool) -> None:
    assert broken(run, bit_identical=bit_identical) == []


def test_steps_that_a_restore_took_back_do_not_count() -> None:
    run = killed()
    run.outcomes[0].steps[5] = StepRecord(99.0, ((7, 7),) * BATCH)  # lost, then redone
    assert broken(run) == []


def test_a_sample_trained_twice_is_found() -> None:
    run = killed()
    run.outcomes[1].steps[4] = replace(record(4), ids=record(3).ids)
    assert "every sample exactly once per epoch" in broken(run)


def test_a_missing_step_is_found() -> None:
    run = killed()
    del run.outcomes[1].steps[3]
    assert f"every step from 1 to {STEPS} is in the surviving history" in broken(run)


def test_another_loss_is_found() -> None:
    run = killed()
    run.outcomes[1].steps[4] = replace(record(4), loss=record(4).loss + 2e-4)
    assert broken(run, bit_identical=False) == ["loss equal within 0.0001 at every step"]
    run.outcomes[1].steps[4] = replace(record(4), loss=record(4).loss + 1e-9)
    assert broken(run, bit_identical=False) == []
    assert broken(run) == ["loss equal to the last bit at every step"]


def test_other_final_parameters_are_found() -> None:
    run = killed()
    run.outcomes[1].finish = {"model_sha256": "x", "optimizer_sha256": "o"}
    assert broken(run) == ["final parameters bit-identical"]


def test_a_kill_that_came_after_the_commit_is_found() -> None:
    run = killed()
    assert run.outcomes[0].killed is not None
    run.outcomes[0].killed = replace(run.outcomes[0].killed, published=True)
    assert broken(run) == ["kill -9 of all ranks came during the save of step 4"]


def test_of_a_kill_of_all_ranks_the_shards_stay_and_of_one_rank_they_need_not() -> None:
    for victim, found in (("all ranks", True), ("rank 1", False)):
        run = killed()
        assert run.outcomes[0].killed is not None
        run.outcomes[0].killed = replace(run.outcomes[0].killed, victim=victim, files_left=0)
        assert bool(broken(run)) is found
        run.outcomes[0].killed = replace(run.outcomes[0].killed, files_seen=0)
        assert broken(run)


def test_a_resume_from_an_older_step_than_the_newest_whole_one_is_found() -> None:
    run = killed()
    run.outcomes[1].newest_whole = 4
    assert broken(run) == ["resumed from the newest whole checkpoint"]
