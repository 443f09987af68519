"""Figure 8: the same training with the same interruptions, to the same step and loss.

Interruptions come after seconds of training drawn from a seeded exponential. Saving at the chosen
interval is compared with saving at the epoch's end, and with a run that is never interrupted.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

from job import JobSpec
from record import Goal, Grid, Paper, Raw, Result, Settings, megabytes, spread
from sim import SimSpec
from supervise import Kill, Launch, LaunchFailed, run_launch

MB = 1_000_000
MAX_LAUNCHES = 60
ARMS = ("never", "auto", "epoch")
NAMES = {
    "never": "ours, never interrupted",
    "auto": "ours, interrupted",
    "epoch": "end of epoch, interrupted",
}
PAPER = [
    Paper(
        "training with interruptions",
        "its figure compares with saving at the epoch's end; no number at hand",
        "issue 3",
    )
]


@dataclass(frozen=True, slots=True)
class Course:
    steps: int
    steps_per_epoch: int
    mean_between_s: float  # of training, between interruptions


def run(settings: Settings) -> Result:
    repeats = settings.repeats or (1 if settings.quick else 3)
    if settings.quick:
        spec = SimSpec(state_bytes=6 * MB, iteration_s=0.02, update_s=0.002)
        course = Course(steps=60, steps_per_epoch=20, mean_between_s=0.6)
    else:
        spec = SimSpec(state_bytes=100 * MB, iteration_s=0.06, update_s=0.006)
        course = Course(steps=300, steps_per_epoch=80, mean_between_s=6.0)
    raw = []
    for repeat in range(1, repeats + 1):
        for arm in ARMS:
            settings.say(f"fig8: repeat {repeat} of {repeats}, {NAMES[arm]}")
            launches = _train(arm, spec, course, settings, seed=settings.seed * 1000 + repeat)
            raw.append({"repeat": repeat, "arm": arm, **_outcome(launches)})
    figures = _figures(raw)
    goals = [
        Goal(
            f"{text}, ours / end of epoch, both interrupted",
            figures[f"{key}_ratio"]["median"], 1,
        )
        for key, text in (("training_s", "time of training"), ("wall_s", "time with all restarts"))
    ] + [Goal("different final losses", len({run["final_loss"] for run in raw}), 1)]  # fmt: skip
    config = {"spec": spec.fields(), "course": asdict(course)}
    return Result(
        "fig8", config, repeats, raw, figures, goals, PAPER, [_grid(spec, course, figures, raw)]
    )


def _train(
    arm: str, sim: SimSpec, course: Course, settings: Settings, *, seed: int
) -> list[Launch]:
    rng = random.Random(seed)  # the same interruptions for all arms
    launches: list[Launch] = []
    with settings.scratch() as folder:
        (folder / "journal").mkdir()
        spec = JobSpec(
            mode="auto" if arm == "never" else arm, root=str(folder / "root"),
            journal=str(folder / "journal"), steps=course.steps,
            steps_per_epoch=course.steps_per_epoch, max_overhead=settings.max_overhead,
            sim=sim.fields(),
        )  # fmt: skip
        while not launches or launches[-1].final_loss is None:
            if len(launches) == MAX_LAUNCHES:
                raise LaunchFailed(f"{NAMES[arm]}: not finished after {MAX_LAUNCHES} launches")
            kill = Kill(after_s=rng.expovariate(1 / course.mean_between_s))
            launches.append(
                run_launch(
                    spec, ranks=1, kill=None if arm == "never" else kill,
                    folder=folder / f"launch{len(launches)}",
                )
            )  # fmt: skip
    return launches


def _outcome(launches: list[Launch]) -> Raw:
    done = sum(len(one.steps) for one in launches)
    return {
        "wall_s": launches[-1].ended_s - launches[0].started_s,
        # without the starts of processes, which say more about Python than about saving
        "training_s": sum(_training_s(one) for one in launches),
        "interruptions": len(launches) - 1,
        "iterations_done": done,
        "iterations_redone": done - launches[-1].last_step,
        "final_loss": launches[-1].final_loss,
        "launches": [one.fields() for one in launches],
    }


def _training_s(launch: Launch) -> float:
    end_s = launch.finished_s or launch.killed_s
    assert end_s is not None
    return end_s - launch.loop_s


def _figures(raw: list[Raw]) -> Raw:
    figures: Raw = {
        arm: {
            key: spread([run[key] for run in raw if run["arm"] == arm])
            for key in ("wall_s", "training_s", "interruptions", "iterations_redone")
        }
        for arm in ARMS
    }
    for key in ("wall_s", "training_s"):
        ours, epoch = figures["auto"][key]["values"], figures["epoch"][key]["values"]
        figures[f"{key}_ratio"] = spread([a / b for a, b in zip(ours, epoch, strict=True)])
    return figures


def _grid(spec: SimSpec, course: Course, figures: Raw, raw: list[Raw]) -> Grid:
    grid = Grid(
        f"{course.steps} steps, {course.steps_per_epoch} an epoch, an interruption every "
        f"{course.mean_between_s:g} s of training on average; {megabytes(spec.state_bytes)}, "
        f"Ti {spec.iteration_s * 1e3:.0f} ms",
        ("run", "wall s", "min", "max", "training s", "interruptions", "done again", "final loss"),
        caption="wall: with the starts of new processes; training: without; "
        "done again: iterations whose work was lost",
    )
    for arm in ARMS:
        figure = figures[arm]
        losses = sorted({run["final_loss"] for run in raw if run["arm"] == arm})
        grid.rows.append(
            (
                NAMES[arm], *(f"{figure['wall_s'][key]:.1f}" for key in ("median", "min", "max")),
                f"{figure['training_s']['median']:.1f}",
                f"{figure['interruptions']['median']:g}",
                f"{figure['iterations_redone']['median']:g}",
                ", ".join(f"{loss:.9g}" for loss in losses),
            )
        )  # fmt: skip
    return grid
