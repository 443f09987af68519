"""Figure 7: what checkpointing costs the whole run, at the interval that the policy chose.

Runs with ``max_overhead``, runs that save synchronously at the same interval, and runs that save
nothing take turns in random order. Overhead is the mean iteration of the one over that of the
other, in the same round, from where the interval is known and has settled.

The three jobs are those of Table 3 in which Tc < Ti. Three more have iterations so short that what
a save costs whatever its size is 3 to 5 % of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

from harness import order
from record import Goal, Grid, Paper, Raw, Result, Settings, megabytes, percent, spread
from savers import NoSaver, Ours, OursSync
from sim import SimJob, SimSpec

MB = 1_000_000
ARMS = ("none", "auto", "sync")
MAX_PROFILE_ITERATIONS = 400
PAPER = [
    Paper("run-time overhead of any model", "at most 3.5 %", "reference/peers.md, section 3"),
]


@dataclass(frozen=True, slots=True)
class Length:
    """How long the measured part of a run is, and what of it is left out."""

    steady_saves: int  # settled when so many saves in a row left the interval as it is
    most_saves: int  # until then
    intervals: int  # measured, at least
    least_iterations: int
    least_sync_iterations: int  # they are slow, and all alike


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs whose runs are judged together."""

    name: str
    megabytes_and_iteration_s: tuple[tuple[int, float], ...]

    def specs(self) -> list[SimSpec]:
        return [
            SimSpec(state_bytes=size * MB, iteration_s=seconds, update_s=seconds / 10)
            for size, seconds in self.megabytes_and_iteration_s
        ]


def groups(quick: bool) -> list[Group]:
    if quick:
        return [Group("quick", ((6, 0.02),))]
    return [
        Group("jobs of Table 3", ((150, 0.3), (400, 0.4), (1000, 0.8))),
        Group("short iterations", ((50, 0.05), (150, 0.08), (400, 0.15))),
    ]


def name_of(spec: SimSpec) -> str:
    return f"{megabytes(spec.state_bytes)}, Ti {spec.iteration_s * 1e3:.0f} ms"


def run(settings: Settings) -> Result:
    repeats = settings.repeats or (1 if settings.quick else 5)
    length = Length(2, 3, 2, 6, 6) if settings.quick else Length(4, 14, 3, 60, 20)
    raw: list[Raw] = []
    figures: Raw = {}
    goals: list[Goal] = []
    grid = Grid(
        "overhead of the run at the chosen interval",
        ("state", "Ti, ms", "k", "ours: median", "min", "max", "sync: median", "min", "max"),
        caption=f"p = {percent(settings.max_overhead)}; negative: within the noise of the machine",
    )
    for group in groups(settings.quick):
        of_group: list[float] = []
        for spec in group.specs():
            settings.say(f"fig7: {name_of(spec)}")
            runs = _measure(spec, settings, repeats, length)
            raw += runs
            measured = figures[name_of(spec)] = _figures(runs)
            ours, sync, chosen = measured["auto"], measured["sync"], measured["interval_steps"]
            of_group += ours["values"]
            grid.rows.append(
                (
                    megabytes(spec.state_bytes), f"{measured['iteration_s']['median'] * 1e3:.0f}",
                    f"{chosen['min']:.0f} to {chosen['max']:.0f}",
                    *(percent(ours[key]) for key in ("median", "min", "max")),
                    *(percent(sync[key]) for key in ("median", "min", "max")),
                )
            )  # fmt: skip
        goals += [
            Goal(f"{group.name}: overhead, worst run", max(of_group), settings.max_overhead),
            Goal(f"{group.name}: overhead, median of all runs", median(of_group), 0.01),
        ]
    specs = [spec.fields() for group in groups(settings.quick) for spec in group.specs()]
    config = {"specs": specs, "arms": ARMS}
    return Result("fig7", config, repeats, raw, figures, goals, PAPER, [grid])


def _measure(spec: SimSpec, settings: Settings, repeats: int, length: Length) -> list[Raw]:
    job = SimJob(spec)
    runs: list[Raw] = []
    with settings.scratch() as folder:
        first = _auto(job, folder / "first", settings, length)  # warms up, and gives a first k
        interval, iterations = first["interval_steps"], first["iterations"]
        for round_number, arm in order(ARMS, repeats, settings.seed):
            if not round_number:
                continue  # has warmed up
            root = folder / f"{arm}{round_number}"
            if arm == "auto":
                done = _auto(job, root, settings, length)
                interval, iterations = done["interval_steps"], done["iterations"]
            elif arm == "sync":
                whole = -(-length.least_sync_iterations // interval)
                done = _sync(job, root, interval, min(iterations, whole * interval))
            else:
                done = _window(job, NoSaver(), iterations)
            runs.append({"state": name_of(spec), "round": round_number, "arm": arm, **done})
    return runs


def _auto(job: SimJob, root: Path, settings: Settings, length: Length) -> Raw:
    """Start like a new job: profile, choose, settle; then measure whole intervals."""
    job.position.samples = 0
    # 1 % of the epoch is profiled: six iterations
    saver = Ours(
        root, job, max_overhead=settings.max_overhead, steps_per_epoch=600, snapshot="auto"
    )  # fmt: skip
    ckpt = saver.checkpointer
    try:
        for before in count(1):
            job.iterate(lambda: saver.after(due=False))
            if ckpt.interval_steps is not None:
                break
            if before >= MAX_PROFILE_ITERATIONS:
                raise RuntimeError(f"no interval was chosen in {before} iterations")
        first_chosen, saves_before = ckpt.interval_steps, len(ckpt.history)
        while (
            len(ckpt.history) < saves_before + length.most_saves
            and not saver.has_settled(length.steady_saves)
        ):  # fmt: skip
            job.iterate(lambda: saver.after(due=False))
        interval = ckpt.interval_steps
        whole = max(length.intervals, -(-length.least_iterations // interval))
        done = _window(job, saver, whole * interval)
        saver.drain()
        profiled = {
            "iterations_until_chosen": before, "first_interval_steps": first_chosen,
            "history": saver.history(),
        }  # fmt: skip
        return done | profiled | {"interval_steps": interval}
    finally:
        saver.close()


def _sync(job: SimJob, root: Path, interval: int, iterations: int) -> Raw:
    saver = OursSync(root, job)
    try:
        return _window(job, saver, iterations, interval) | {"interval_steps": interval}
    finally:
        saver.close()


def _window(job: SimJob, saver: NoSaver, iterations: int, interval: int = 1) -> Raw:
    done = [
        job.iterate(lambda n=n: saver.after(due=(n + 1) % interval == 0)) for n in range(iterations)
    ]
    return {
        "iterations": iterations,
        "wall_s": sum(one.total_s for one in done),
        "iterations_s": [one.total_s for one in done],
        "waited_s": sum(one.guard_s + one.after_s for one in done),
    }


def _figures(runs: list[Raw]) -> Raw:
    def mean_s(run: Raw) -> float:
        return run["wall_s"] / run["iterations"]

    plain_s = {run["round"]: mean_s(run) for run in runs if run["arm"] == "none"}
    figures: Raw = {
        arm: spread([mean_s(r) / plain_s[r["round"]] - 1 for r in runs if r["arm"] == arm])
        for arm in ("auto", "sync")
    }
    figures["iteration_s"] = spread(list(plain_s.values()))
    figures["interval_steps"] = spread([r["interval_steps"] for r in runs if r["arm"] == "auto"])
    return figures
