"""Table 6: kill -9 at random iterations; how long recovery takes, and how many iterations are lost.

Every launch is killed at a random iteration, a quarter of an epoch to five quarters beyond the step
that it went on from, and started again. The same kills meet our saves and saves at the epoch's end.
Recovery goes from the kill until the iteration that was the last one is done again.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import mean

from job import JobSpec
from record import Goal, Grid, Paper, Raw, Result, Settings, megabytes, spread
from sim import SimSpec
from supervise import Kill, Launch, run_launch

MB = 1_000_000
NO_END = 1_000_000
PARTS = ("detect", "start", "find", "load", "redo")
PAPER = [
    Paper("recovery", "from hours to seconds", "reference/peers.md, section 3"),
    Paper("lost iterations", "at most 2k, about k on average", "issue 3, as the goal"),
]


@dataclass(frozen=True, slots=True)
class Group:
    """One kind of run: how it saves, on how many ranks, how often it is killed."""

    mode: str
    ranks: int
    kills: int

    @property
    def name(self) -> str:
        saves = {"auto": "ours, chosen k", "epoch": "end of epoch"}[self.mode]
        return f"{saves}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"


def run(settings: Settings) -> Result:
    if settings.quick:
        spec = SimSpec(state_bytes=6 * MB, iteration_s=0.02, update_s=0.002)
        epoch = 40
        groups = [Group("auto", 2, 2), Group("epoch", 1, 1)]
    else:
        spec = SimSpec(state_bytes=100 * MB, iteration_s=0.06, update_s=0.006)
        epoch = 60
        kills = settings.repeats or 10
        groups = [
            Group(mode, ranks, kills if ranks == 1 else max(1, kills // 2))
            for ranks in (1, 2)
            for mode in ("auto", "epoch")
        ]
    raw: list[Raw] = []
    figures: Raw = {}
    for group in groups:
        settings.say(f"table6: {group.name}, {group.kills} kills")
        launches, recoveries = _kill_again_and_again(group, spec, epoch, settings)
        raw.append(
            {
                "group": group.name,
                "launches": [one.fields() for one in launches],
                "recoveries": recoveries,
            }
        )
        figures[group.name] = {
            "mode": group.mode,
            "ranks": group.ranks,
            **_figures(launches, recoveries),
        }
    config = {
        "spec": spec.fields(),
        "steps_per_epoch": epoch,
        "groups": [asdict(g) for g in groups],
    }
    return Result(
        "table6", config, max(g.kills for g in groups), raw, figures, _goals(figures), PAPER,
        [_grid(spec, figures)],
    )  # fmt: skip


def _kill_again_and_again(
    group: Group, sim: SimSpec, epoch: int, settings: Settings
) -> tuple[list[Launch], list[Raw]]:
    rng = random.Random(settings.seed)  # the same kills for all groups
    launches: list[Launch] = []
    with settings.scratch() as folder:
        journal = folder / "journal"
        journal.mkdir()
        spec = JobSpec(
            mode=group.mode, root=str(folder / "root"), journal=str(journal), steps=NO_END,
            steps_per_epoch=epoch, max_overhead=settings.max_overhead, sim=sim.fields(),
        )  # fmt: skip
        # One launch more than recoveries: each shows how the one before recovered.
        for number in range(group.kills + 1):
            kill = Kill(
                steps=epoch // 4 + rng.randrange(1, epoch + 1),
                not_before=launches[-1].last_step + 2 if launches else 0,  # all is done again
                after_s=rng.random() * sim.iteration_s,
            )
            launches.append(
                run_launch(spec, ranks=group.ranks, kill=kill, folder=folder / f"launch{number}")
            )
    return launches, [_recovery(killed, again) for killed, again in pairwise(launches)]


def _recovery(killed: Launch, again: Launch) -> Raw:
    """Return what one kill cost."""
    assert killed.killed_s is not None
    redone_s = next(line["at_s"] for line in again.steps if line["step"] >= killed.last_step)
    known = [line["interval_steps"] for line in killed.steps if line["interval_steps"]]
    return {
        "killed_after_step": killed.last_step,
        "resumed_from": again.restored,
        "lost_iterations": killed.last_step - again.start_step,
        # the bound is about the k that held while the lost iterations ran
        "interval_steps": max(known[-2 * known[-1] :]) if known else None,
        "detect_s": killed.ended_s - killed.killed_s,
        "start_s": again.ready_s - again.find_s - killed.ended_s,
        "find_s": again.find_s,
        "load_s": max(0.0, again.restore_s - again.find_s),
        "redo_s": redone_s - again.loop_s,
        "total_s": redone_s - killed.killed_s,
    }


def _figures(launches: list[Launch], recoveries: list[Raw]) -> Raw:
    lost = [one["lost_iterations"] for one in recoveries]
    over = [
        one["lost_iterations"] / one["interval_steps"]
        for one in recoveries
        if one["interval_steps"]
    ]
    chosen = [one["interval_steps"] for one in recoveries if one["interval_steps"]]
    figures = {f"{part}_s": spread([one[f"{part}_s"] for one in recoveries]) for part in PARTS}
    return figures | {
        "total_s": spread([one["total_s"] for one in recoveries]),
        "lost_iterations": spread(lost) | {"mean": mean(lost)},
        "interval_steps": spread(chosen) if chosen else None,
        "lost_over_interval": spread(over) | {"mean": mean(over)} if over else None,
        "ranks_agree": all(_ranks_agree(launch) for launch in launches),
    }


def _ranks_agree(launch: Launch) -> bool:
    """Return whether all ranks had the same interval and loss at each step that they both did."""
    mine = {line["step"]: (line["interval_steps"], line["loss"]) for line in launch.steps}
    return all(
        mine[line["step"]] == (line["interval_steps"], line["loss"])
        for other in launch.others
        for line in other
        if line["step"] in mine
    )


def _goals(figures: Raw) -> list[Goal]:
    goals = []
    for name, figure in figures.items():
        if figure["ranks"] > 1:
            agree = figure["ranks_agree"]
            goals.append(Goal(f"{name}: ranks agree on k at each step", agree, 1, at_least=True))
        if figure["mode"] == "auto":
            lost = figure["lost_over_interval"]
            goals.append(Goal(f"{name}: lost iterations / k, worst", lost["max"], 2))
            # Uniform kills lose k / 2, and what a save takes: up to k where k is at its shortest.
            goals.append(Goal(f"{name}: lost iterations / k, mean", lost["mean"], 1.5))
    return goals


def _grid(spec: SimSpec, figures: Raw) -> Grid:
    grid = Grid(
        f"recovery after kill -9, medians in s; {megabytes(spec.state_bytes)}, "
        f"Ti {spec.iteration_s * 1e3:.0f} ms",
        ("saves", "k", *PARTS, "total", "lost: mean", "max", "mean / k", "max / k"),
        caption="start: a new process imports torch and builds its state; "
        "redo: until the iteration that was the last is done again",
    )
    for name, figure in figures.items():
        chosen, ratio = figure["interval_steps"], figure["lost_over_interval"]
        lost = figure["lost_iterations"]
        grid.rows.append(
            (
                name, f"{chosen['min']:g} to {chosen['max']:g}" if chosen else "",
                *(f"{figure[f'{part}_s']['median']:.2f}" for part in (*PARTS, "total")),
                f"{lost['mean']:.1f}", f"{lost['max']}",
                *(f"{ratio[key]:.2f}" if ratio else "" for key in ("mean", "max")),
            )
        )  # fmt: skip
    return grid
