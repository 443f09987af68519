"""Table 5: a second job loads the disk in the middle of the run; fixed against adaptive interval.

Three phases: alone, loaded, alone again. The adaptive run comes first, and is loaded once its
interval has settled; the fixed run gets that interval. A third run saves nothing.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from noise import noise
from record import Goal, Grid, Paper, Raw, Result, Settings, megabytes, percent, spread
from savers import NoSaver, Ours
from sim import SimJob, SimSpec

MB = 1_000_000
PHASES = ("alone", "loaded", "alone again")
PAPER = [
    Paper("adaptive interval under load", "back within the budget", "issue 3, as the goal"),
    Paper("after the load", "the original never comes down again", "issue 3"),
    Paper("original code, above 5 % overhead", "k += 2, never lowered", "reference/peers.md, 2.8"),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """How long, how loaded."""

    phase_s: tuple[float, float, float]
    settle_s: float  # more in the first phase, at most, until the interval has settled
    steady_saves: int  # it has, when so many saves in a row left it as it is
    window_s: float
    writers: int
    file_bytes: int


def run(settings: Settings) -> Result:
    repeats = settings.repeats or (1 if settings.quick else 2)
    if settings.quick:
        spec = SimSpec(state_bytes=12 * MB, iteration_s=0.02, update_s=0.002)
        shape = Shape((1.5, 1.5, 1.5), 1.0, 2, 0.5, 2, 64 << 20)
    else:
        spec = SimSpec(state_bytes=150 * MB, iteration_s=0.1, update_s=0.01)
        shape = Shape((15.0, 30.0, 60.0), 30.0, 4, 5.0, 4, 512 << 20)
    raw: list[Raw] = []
    for repeat in range(1, repeats + 1):
        settings.say(f"table5: repeat {repeat} of {repeats}")
        raw += [{"repeat": repeat, **one} for one in _repeat(spec, shape, settings)]
    windows = [_windows(one, raw, shape) for one in raw if one["arm"] != "none"]
    figures = _figures(raw, windows)
    config = {"spec": spec.fields(), "shape": asdict(shape)}
    return Result(
        "table5", config, repeats, raw, figures | {"windows": windows},
        _goals(figures, settings), PAPER, _grids(spec, figures, windows),
    )  # fmt: skip


def _repeat(spec: SimSpec, shape: Shape, settings: Settings) -> list[Raw]:
    job = SimJob(spec)
    with settings.scratch() as folder:
        adaptive = _through_phases(
            job, shape, folder / "adaptive", "adaptive",
            max_overhead=settings.max_overhead, steps_per_epoch=1000, snapshot="auto",
        )  # fmt: skip
        before_load = [one for one in adaptive["iterations"] if one["phase"] == PHASES[0]]
        fixed = before_load[-1]["interval_steps"]
        if fixed is None:
            raise RuntimeError("no interval was chosen before the load began")
        static = _through_phases(
            job, shape, folder / "static", "static", every=fixed, snapshot="auto"
        )  # fmt: skip
        return [adaptive, static, _through_phases(job, shape, folder / "none", "none")]


def _through_phases(job: SimJob, shape: Shape, root: Path, arm: str, **options: Any) -> Raw:
    saver = Ours(root, job, **options) if options else NoSaver()
    ours = saver if isinstance(saver, Ours) else None
    timeline: list[Raw] = []
    load: Raw = {}
    began_s = time.perf_counter()
    try:
        for phase, seconds in zip(PHASES, shape.phase_s, strict=True):
            loaded = phase == "loaded"
            with noise(
                root.parent / "noise", writers=shape.writers, file_bytes=shape.file_bytes
            ) if loaded else nullcontext() as told:  # fmt: skip
                until_s = time.perf_counter() + seconds
                settled_by_s = until_s + shape.settle_s if phase == PHASES[0] else until_s
                while (now_s := time.perf_counter()) < until_s or (
                    ours and now_s < settled_by_s and not ours.has_settled(shape.steady_saves)
                ):
                    one = job.iterate(lambda: saver.after(due=False))
                    timeline.append(
                        {
                            "phase": phase,
                            "at_s": time.perf_counter() - began_s,
                            "total_s": one.total_s,
                            "waited_s": one.guard_s + one.after_s,
                            "interval_steps": ours and ours.checkpointer.interval_steps,
                        }
                    )
            load = told if loaded else load
        saver.drain()
        history = saver.history()
    finally:
        saver.close()
    return {"arm": arm, "iterations": timeline, "load": load, "history": history}


def _windows(one: Raw, raw: list[Raw], shape: Shape) -> Raw:
    """Cut a run into windows of about ``window_s`` that lie within one phase."""
    plain = next(r for r in raw if r["arm"] == "none" and r["repeat"] == one["repeat"])
    cut: list[Raw] = []
    for phase in PHASES:
        base_s = median(i["total_s"] for i in plain["iterations"] if i["phase"] == phase)
        mine = [i for i in one["iterations"] if i["phase"] == phase]
        size = max(1, round(shape.window_s / base_s))
        for start in range(0, max(1, len(mine) - size // 2), size):
            window = mine[start : start + size]
            cut.append(
                {
                    "phase": phase,
                    "from_s": window[0]["at_s"],
                    "overhead": sum(i["total_s"] for i in window) / len(window) / base_s - 1,
                    "interval_steps": window[-1]["interval_steps"],
                }
            )
    return {"arm": one["arm"], "repeat": one["repeat"], "windows": cut}


def _figures(raw: list[Raw], windows: list[Raw]) -> Raw:
    figures: Raw = {}
    for arm in ("adaptive", "static"):
        cuts = [w["windows"] for w in windows if w["arm"] == arm]
        runs = [one for one in raw if one["arm"] == arm]
        late = [_late(cut, "loaded") for cut in cuts]
        figures[arm] = {
            "overhead_loaded_late": spread([median(w["overhead"] for w in cut) for cut in late]),
            "overhead_loaded_all": spread(
                [_mean(w["overhead"] for w in cut if w["phase"] == "loaded") for cut in cuts]
            ),
            "overhead_after": spread(
                [median(w["overhead"] for w in _late(cut, "alone again")) for cut in cuts]
            ),
            "interval_before": spread([_last(one, "alone") for one in runs]),
            "interval_loaded": spread(
                [max(i["interval_steps"] for i in _of(one, "loaded")) for one in runs]
            ),
            "interval_after": spread([_last(one, "alone again") for one in runs]),
            "back_after_s": spread([_back_after_s(one) for one in runs]),
        }  # fmt: skip
    return figures


def _mean(values: Any) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _late(cut: list[Raw], phase: str) -> list[Raw]:
    """The later half of a phase's windows: the policy has had time to answer."""
    mine = [w for w in cut if w["phase"] == phase]
    return mine[len(mine) // 2 :]


def _of(one: Raw, phase: str) -> list[Raw]:
    return [i for i in one["iterations"] if i["phase"] == phase]


def _last(one: Raw, phase: str) -> int:
    return _of(one, phase)[-1]["interval_steps"]


def _back_after_s(one: Raw) -> float:
    """Return how long after the load k was at most 1 above what it was before it, for good."""
    after = _of(one, "alone again")
    far = [i["at_s"] for i in after if i["interval_steps"] > _last(one, "alone") + 1]
    return far[-1] - after[0]["at_s"] if far else 0.0


def _goals(figures: Raw, settings: Settings) -> list[Goal]:
    adaptive = figures["adaptive"]
    return [
        Goal(
            "adaptive: overhead in the later half of the load",
            adaptive["overhead_loaded_late"]["max"], settings.max_overhead,
        ),
        Goal(
            "adaptive: k after the load - k before it",
            max(_differences(adaptive["interval_after"], adaptive["interval_before"])), 1,
        ),
    ]  # fmt: skip


def _differences(later: Raw, earlier: Raw) -> list[float]:
    return [b - a for a, b in zip(earlier["values"], later["values"], strict=True)]


def _grids(spec: SimSpec, figures: Raw, windows: list[Raw]) -> list[Grid]:
    summary = Grid(
        f"a second job loads the disk; {megabytes(spec.state_bytes)}, "
        f"Ti {spec.iteration_s * 1e3:.0f} ms, medians over the repeats",
        ("interval", "k alone", "k loaded, largest", "k alone again",
         "back after, s", "overhead, all of the load", "later half of it", "after it"),
    )  # fmt: skip
    for arm in ("static", "adaptive"):
        figure = figures[arm]
        summary.rows.append(
            (
                arm,
                *(f"{figure[f'interval_{when}']['median']:g}"
                  for when in ("before", "loaded", "after")),
                f"{figure['back_after_s']['median']:.0f}",
                *(percent(figure[f"overhead_{when}"]["median"])
                  for when in ("loaded_all", "loaded_late", "after")),
            )
        )  # fmt: skip
    over_time = Grid("over time, first repeat", ("phase", "from s", *_over_time_columns()))
    first = {w["arm"]: w["windows"] for w in windows if w["repeat"] == 1}
    for phase in PHASES:
        static, adaptive = (
            [w for w in first[arm] if w["phase"] == phase] for arm in ("static", "adaptive")
        )
        # a stalled run has fewer iterations, and so fewer windows
        for number in range(max(len(static), len(adaptive))):
            cells = [_cell(cut, number) for cut in (static, adaptive)]
            longer = max(static, adaptive, key=len)
            over_time.rows.append(
                (phase, f"{longer[number]['from_s']:.0f}", *cells[0], *cells[1])
            )  # fmt: skip
    return [summary, over_time]


def _over_time_columns() -> tuple[str, ...]:
    return ("static overhead", "k", "adaptive overhead", "k")


def _cell(cut: list[Raw], number: int) -> tuple[str, str]:
    if number >= len(cut):
        return "", ""
    return percent(cut[number]["overhead"]), str(cut[number]["interval_steps"])
