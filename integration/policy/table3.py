"""Table 3: what one save costs the training loop: synchronous, persist overlapped, both overlapped.

All arms of a case take turns in random order, one save a turn, followed by enough iterations for
the save to end. Stall is the wall time of the turn beyond as many iterations without a save.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from harness import order
from record import Goal, Grid, Paper, Raw, Result, Settings, megabytes, ms, spread
from savers import NoSaver, Ours, OursSync, StockSync
from sim import SimJob, SimSpec

MB = 1_000_000
ARMS = ("none", "stock_sync", "sync", "persist_overlap", "both_overlap")
NAMES = {
    "stock_sync": "synchronous, stock dcp.save",
    "sync": "synchronous, ours",
    "persist_overlap": "persist overlapped, ours",
    "both_overlap": "both overlapped, ours",
}
LEAST_STALL_S = 1e-4  # below it a turn's wall time tells nothing: keeps the ratio finite
PAPER = [
    Paper("stall, both phases overlapped against persist only", "5 to 18 times less", "issue 3"),
]


@dataclass(frozen=True, slots=True)
class Case:
    spec: SimSpec
    copy_fits: bool  # Tc < Ti - Tw is meant to hold

    @property
    def name(self) -> str:
        return f"{megabytes(self.spec.state_bytes)}, Ti {self.spec.iteration_s * 1e3:.0f} ms"


def cases(quick: bool) -> list[Case]:
    def case(megabytes_: int, iteration_s: float, fits: bool) -> Case:
        spec = SimSpec(
            state_bytes=megabytes_ * MB, iteration_s=iteration_s, update_s=iteration_s / 10
        )
        return Case(spec, fits)

    if quick:
        return [case(12, 0.06, True), case(60, 0.01, False)]
    return [
        case(150, 0.3, True),
        case(400, 0.4, True),
        case(1000, 0.8, True),
        case(1000, 0.05, False),
    ]


def run(settings: Settings) -> Result:
    repeats = settings.repeats or (1 if settings.quick else 5)
    raw: list[Raw] = []
    figures: Raw = {}
    goals = []
    grid = Grid(
        "stall per save, ms",
        ("case", "arm", "median", "min", "max", "waited", "history", "times less", "Tc", "Ts"),
        caption="waited: in the step hook and after the step; history: what ckpt.history says; "
        "times less: than with only the persist phase overlapped",
    )
    for case in cases(settings.quick):
        turns = _measure(case, settings, repeats)
        raw += turns
        measured = _figures(turns)
        figures[case.name] = measured
        _rows(grid, case, measured)
        goals.append(_goal(case, measured))
    config = {"cases": [case.spec.fields() for case in cases(settings.quick)], "arms": ARMS}
    return Result("table3", config, repeats, raw, figures, goals, PAPER, [grid])


def _measure(case: Case, settings: Settings, repeats: int) -> list[Raw]:
    job = SimJob(case.spec)
    turns: list[Raw] = []
    with settings.scratch() as folder:
        iterations = _iterations_of_a_turn(job, folder / "calibrate")
        settings.say(f"table3: {case.name}, {iterations} iterations a turn")
        savers: dict[str, NoSaver] = {
            "none": NoSaver(),
            "stock_sync": StockSync(folder / "stock", job),
            "sync": OursSync(folder / "sync", job),
            "persist_overlap": Ours(
                folder / "persist", job, every=iterations, snapshot="blocking"
            ),
            "both_overlap": Ours(folder / "both", job, every=iterations, snapshot="cpu"),
        }  # fmt: skip
        try:
            for name in ("persist_overlap", "both_overlap"):
                savers[name].skip(iterations - 1)
            for round_number, arm in order(ARMS, repeats, settings.seed):
                turn = _turn(job, savers[arm], iterations)
                if round_number:  # round 0 warms up
                    turns.append({"case": case.name, "round": round_number, "arm": arm, **turn})
        finally:
            for saver in savers.values():
                saver.close()
    return turns


def _iterations_of_a_turn(job: SimJob, root: Path) -> int:
    saver = OursSync(root, job)
    job.run(2, lambda: saver.after(due=False))
    began_s = time.perf_counter()
    saver.checkpointer.save(wait=True)
    save_s = time.perf_counter() - began_s
    saver.close()
    return 2 + math.ceil(1.5 * save_s / job.spec.iteration_s)


def _turn(job: SimJob, saver: NoSaver, iterations: int) -> Raw:
    before = len(saver.history())
    done = [job.iterate(lambda n=n: saver.after(due=n == 0)) for n in range(iterations)]
    saver.drain()
    return {
        "iterations": iterations,
        "wall_s": sum(one.total_s for one in done),
        "waited_s": sum(one.guard_s + one.after_s for one in done),
        "iterations_s": [one.total_s for one in done],
        "history": saver.history()[before:],
    }


def _figures(turns: list[Raw]) -> Raw:
    """Return stall per arm. A turn is compared with the turn without saves of the same round."""
    plain = {turn["round"]: turn for turn in turns if turn["arm"] == "none"}
    base_s = median(turn["wall_s"] / turn["iterations"] for turn in plain.values())
    figures: Raw = {"iteration_s": base_s}
    for arm in NAMES:
        mine = [turn for turn in turns if turn["arm"] == arm]
        saves = [one for turn in mine for one in turn["history"]]
        figures[arm] = {
            "stall_s": spread([t["wall_s"] - plain[t["round"]]["wall_s"] for t in mine]),
            "waited_s": spread([t["waited_s"] - plain[t["round"]]["waited_s"] for t in mine]),
        }
        if saves:
            figures[arm] |= {
                "history_s": spread([one["blocked_s"] + one["waited_s"] for one in saves]),
                "copy_s": spread([one["copy_s"] for one in saves]),
                "persist_s": spread([one["persist_s"] for one in saves]),
            }
    return figures


def stall_s(figure: Raw) -> float:
    """The larger of the two measures: wall time of the whole turn, and time seen waiting."""
    return max(figure["stall_s"]["median"], figure["waited_s"]["median"], LEAST_STALL_S)


def _rows(grid: Grid, case: Case, measured: Raw) -> None:
    for arm, name in NAMES.items():
        figure = measured[arm]
        ratio = stall_s(measured["persist_overlap"]) / stall_s(figure)
        optional = [
            ms(figure[key]["median"]) if key in figure else ""
            for key in ("history_s", "copy_s", "persist_s")
        ]
        stall = figure["stall_s"]
        grid.rows.append(
            (
                case.name if arm == "stock_sync" else "", name,
                *(ms(stall[key]) for key in ("median", "min", "max")),
                ms(figure["waited_s"]["median"]), optional[0], f"{ratio:.1f}", *optional[1:],
            )
        )  # fmt: skip


def _goal(case: Case, measured: Raw) -> Goal:
    persist, both = stall_s(measured["persist_overlap"]), stall_s(measured["both_overlap"])
    if case.copy_fits:
        return Goal(f"{case.name} (Tc < Ti): times less stall", persist / both, 20, at_least=True)
    return Goal(f"{case.name} (Tc > Ti): stall of both / of persist only", both / persist, 1)
