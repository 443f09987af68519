"""The goals of the issue, in one place, and how each is computed from one report.

A goal is a ratio of two figures of the same run, or one figure. Figures are medians over the
repeats unless the goal says "max".
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric of one arm."""

    arm: str
    metric: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """``top / under`` (or ``top`` alone) must be at most, or at least, ``bound``."""

    text: str
    bench: str
    state: str
    place: str = "disk"
    ranks: str = "1"  # for reshard "saved->loaded"; for data the number of workers
    top: Figure
    under: Figure | None = None
    bound: float
    at_least: bool = False
    worst: bool = False  # take the largest value instead of the median

    def applies(self, report: dict[str, Any]) -> bool:
        """Return whether a report measured this goal's case at full size."""
        config = report["config"]
        case = (report["bench"], config["state"], config["place"], config["case"])
        return config["scale"] == "full" and case == (
            self.bench, self.state, self.place, self.ranks,
        )  # fmt: skip

    def value(self, arms: dict[str, Any]) -> float | None:
        """Return the measured value; None if one of its arms was not run."""
        top, under = self._figure(arms, self.top), self._figure(arms, self.under)
        return None if top is None or not under else top / under

    def met(self, value: float) -> bool:
        """Return whether a measured value is on the right side of the bound."""
        return value >= self.bound if self.at_least else value <= self.bound

    def _figure(self, arms: dict[str, Any], figure: Figure | None) -> float | None:
        if figure is None:
            return 1.0
        values = arms.get(figure.arm, {}).get(figure.metric, {}).get("values")
        if not values:
            return None
        return float(max(values) if self.worst else median(values))


def _faster(
    text: str, bench: str, state: str, peer: str, us: str, bound: float, **case: Any
) -> Goal:
    """Return the goal that ``us`` is at least ``bound`` times as fast as ``peer``."""
    return Goal(
        text=text, bench=bench, state=state, bound=bound, at_least=True,
        top=Figure(peer, "wall_s"), under=Figure(us, "wall_s"), **case,
    )  # fmt: skip


def _at_most(
    text: str, bench: str, state: str, top: tuple[str, str], under: tuple[str, str], bound: float
) -> Goal:
    return Goal(
        text=text, bench=bench, state=state, bound=bound, top=Figure(*top), under=Figure(*under)
    )


GOALS = (
    _at_most("save, x raw limit", "save", "gpt", ("ours", "wall_s"), ("limit", "wall_s"), 1.05),
    _faster("save, times faster than FileSystemWriter", "save", "gpt", "stock_t1", "ours", 1.4),
    _at_most("save, CPU against FileSystemWriter", "save", "gpt", ("ours", "cpu_s"),
             ("stock_t1", "cpu_s"), 0.3),
    _faster("save on 4 ranks, times faster", "save", "gpt", "stock_t1", "ours", 1.35, ranks="4"),
    Goal(text="save, peak memory above state (worst, bytes)", bench="save", state="gpt",
         top=Figure("ours", "first_extra_peak_bytes"), bound=128 * MIB, worst=True),
    Goal(text="envelope of a large item (worst, bytes)", bench="save", state="gpt",
         top=Figure("ours", "large_item_envelope_bytes"), bound=5 * 1024, worst=True),
    _faster("second save, default planner", "save", "many", "stock_t1", "ours", 3.2),
    _faster("second save, kept planner", "save", "many", "stock_t1", "ours_kept_planner", 8),
    _faster("second save, kept planner, against safetensors", "save", "many", "safetensors",
            "ours_kept_planner", 1),
    _at_most("blocked, steady, x stock default", "async", "gpt", ("ours", "blocked_s"),
             ("stock", "blocked_s"), 0.2),
    _at_most("blocked, steady, x kept DefaultStager", "async", "gpt", ("ours", "blocked_s"),
             ("stock_kept_stager", "blocked_s"), 1),
    _at_most("blocked, first, x stock default", "async", "gpt", ("ours", "first_blocked_s"),
             ("stock", "first_blocked_s"), 1),
    _at_most("save under a Python loop, x idle", "async", "gpt", ("ours", "bg_py_s"),
             ("ours", "bg_idle_s"), 1.7),
    _at_most("the same, kept planner", "async", "gpt", ("ours_kept_planner", "bg_py_s"),
             ("ours_kept_planner", "bg_idle_s"), 1.7),
    _at_most("training lost under a matmul loop, x stock", "async", "gpt", ("ours", "mm_lost_s"),
             ("stock", "mm_lost_s"), 0.4),
    Goal(text="async, peak memory above state and snapshot (worst, bytes)", bench="async",
         state="gpt", top=Figure("ours", "first_extra_peak_bytes"), bound=128 * MIB, worst=True),
    *(
        _at_most(f"{text}, {tensors} tensors, x {peer}", "call", f"tensors{tensors}",
                 ("ours", metric), (peer, metric), bound)
        for tensors in (160, 1600)
        for text, peer, metric, bound in (
            ("start of a save", "stock", "call_s", 0.25),
            ("start of a save", "floor", "call_s", 10),
            ("step after it", "stock", "next_step_s", 0.5),
        )
    ),
    _at_most("load cold, x direct-read limit", "load", "gpt", ("ours", "wall_s"),
             ("limit_direct", "wall_s"), 1.35),
    _faster("load cold, times faster", "load", "gpt", "stock", "ours", 3),
    _at_most("FileSystemReader on ours, x on its own", "load", "gpt", ("stock_on_ours", "wall_s"),
             ("stock", "wall_s"), 1.1),
    _faster("load, default planner", "load", "many", "stock", "ours", 4.6),
    _faster("load, CheckFreqLoadPlanner", "load", "many", "stock", "ours_own_planner", 10),
    Goal(text="bytes read / needed", bench="reshard", state="gpt", ranks="2->4",
         top=Figure("ours", "read_per_needed"), bound=1.05),
    _faster("reshard, times faster", "reshard", "gpt", "stock", "ours", 2.3, ranks="2->4"),
    Goal(text="images per second, x DataLoader", bench="data", state="decode", ranks="0",
         top=Figure("ours_global", "samples_per_s"), under=Figure("dataloader", "samples_per_s"),
         bound=0.95, at_least=True),
    Goal(text="the same, 2 workers", bench="data", state="decode", ranks="2",
         top=Figure("ours_global", "samples_per_s"), under=Figure("dataloader", "samples_per_s"),
         bound=0.95, at_least=True),
    *(Goal(text=f"resume at {percent} % of 1e9 items (s)", bench="data", state="resume",
           ranks="0", top=Figure("ours_1e9", f"at_{percent}_s"), bound=0.01)
      for percent in (10, 50, 99)),
    Goal(text="resume in 1e9 items with the start of 2 workers (s)", bench="data",
         state="resume", ranks="2", top=Figure("ours_1e9", "resume_s"), bound=0.01),
    Goal(text="position in the data (worst, bytes)", bench="data", state="resume", ranks="0",
         top=Figure("ours_1e9", "state_bytes"), bound=199, worst=True),
    _faster("save to S3, against the client floor", "s3_save", "gpt", "limit_http", "ours", 0.9,
            place="s3"),
    _faster("save to S3, times faster than FsspecWriter", "s3_save", "gpt", "stock_fsspec", "ours",
            3, place="s3"),
    _faster("save to S3, against s3torchconnector", "s3_save", "gpt", "s3torch", "ours", 1,
            place="s3"),
    Goal(text="save to S3, CPU against s3torchconnector", bench="s3_save", state="gpt", place="s3",
         top=Figure("ours", "cpu_s"), under=Figure("s3torch", "cpu_s"), bound=0.5),
    Goal(text="save to S3, peak memory above state (worst, bytes)", bench="s3_save", state="gpt",
         place="s3", top=Figure("ours", "extra_peak_bytes"), bound=256 * MIB, worst=True),
    _faster("load from S3, against the floor", "s3_load", "gpt", "limit_http", "ours", 0.7,
            place="s3"),
    _faster("load from S3, times faster than s3torchconnector", "s3_load", "gpt", "s3torch", "ours",
            2.5, place="s3"),
    Goal(text="load from S3, peak memory above state (worst, bytes)", bench="s3_load", state="gpt",
         place="s3", top=Figure("ours", "extra_peak_bytes"), bound=256 * MIB, worst=True),
    Goal(text="reshard from S3, bytes read / needed", bench="s3_reshard", state="gpt", place="s3",
         ranks="4->2", top=Figure("ours", "counted_per_needed"), bound=1.05),
    Goal(text="staged, store at 20 MB/s, training held up, x local disk", bench="staged",
         state="gpt", place="s3", top=Figure("staged", "blocked_s"),
         under=Figure("local", "blocked_s"), bound=1.1),
)  # fmt: skip


def judge(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the goals that a report measured: text, measured value, bound, met or not."""
    rows = []
    for goal in GOALS:
        if not goal.applies(report):
            continue
        value = goal.value(report["arms"])
        if value is not None:
            sense = "at least" if goal.at_least else "at most"
            rows.append({
                "goal": goal.text, "measured": value, "sense": sense, "bound": goal.bound,
                "met": goal.met(value),
            })  # fmt: skip
    return rows
