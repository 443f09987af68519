"""What an experiment returns: raw measurements, figures, goals; as JSON and as tables."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from sim import NOTE

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "scripts" / "bench"))  # behind: it has a `run`, too

from machine import describe_code, describe_machine, describe_versions  # noqa: E402

SCHEMA = "dcp_checkfreq.policy/1"
IN_MEMORY = ("tmpfs", "ramfs")
Raw = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run one experiment."""

    quick: bool  # seconds, and measures nothing
    folder: Path  # on a real disk; checkpoints go into folders below it, which are removed
    seed: int
    repeats: int | None  # None: the experiment's own
    max_overhead: float = 0.035

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for one experiment's checkpoints."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="policy-", dir=self.folder) as folder:
            yield Path(folder)


@dataclass(frozen=True, slots=True)
class Paper:
    """A claim of the paper, and where we have it from. We do not have its tables at hand."""

    what: str
    claim: str
    source: str


@dataclass(frozen=True, slots=True)
class Goal:
    text: str
    measured: float
    bound: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def fields(self) -> Raw:
        sense = "at least" if self.at_least else "at most"
        return {
            "goal": self.text, "measured": self.measured, "sense": sense, "bound": self.bound,
            "met": self.met,
        }  # fmt: skip


@dataclass(slots=True)
class Grid:
    """One table, ready to print."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    caption: str = ""


@dataclass(slots=True)
class Result:
    """One experiment's outcome."""

    experiment: str
    config: Raw
    repeats: int
    raw: list[Raw]  # every single measurement
    figures: dict[str, Any]  # medians with spread, by name
    goals: list[Goal]
    paper: list[Paper]
    grids: list[Grid]


def spread(values: Sequence[float]) -> Raw:
    """Return the values with their smallest, middle and largest."""
    return {
        "values": list(values), "min": min(values), "median": median(values), "max": max(values),
    }  # fmt: skip


def report(result: Result, settings: Settings, *, wall_s: float) -> Raw:
    """Return a result as plain values, with code, machine and versions."""
    return {
        "schema": SCHEMA,
        "experiment": result.experiment,
        "note": NOTE,
        "quick": settings.quick,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "git": describe_code(),
        "machine": describe_machine(settings.folder),
        "versions": describe_versions(),
        "config": result.config | {"max_overhead": settings.max_overhead},
        "seed": settings.seed,
        "repeats": result.repeats,
        "wall_s": round(wall_s, 1),
        "figures": result.figures,
        "goals": [goal.fields() for goal in result.goals],
        "paper": [{"what": p.what, "claim": p.claim, "source": p.source} for p in result.paper],
        "raw": result.raw,
    }


def save(written: Raw, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=1) + "\n")


def show(result: Result, written: Raw, console: Console) -> None:
    """Print the tables, what the paper says, and the goals."""
    console.rule(result.experiment)
    console.print(NOTE, highlight=False)
    if written["quick"]:
        console.print("[bold]--quick: shows that it runs; the figures mean nothing")
    for grid in result.grids:
        table = Table(title=grid.title, caption=grid.caption or None)
        for number, column in enumerate(grid.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in grid.rows:
            table.add_row(*row)
        console.print(table)
    paper = Table(title="the paper (CheckFreq, FAST '21)")
    for column in ("what", "claim", "as given in"):
        paper.add_column(column)
    for claim in result.paper:
        paper.add_row(claim.what, claim.claim, claim.source)
    console.print(paper)
    goals = Table(title="goals")
    for column in ("goal", "measured", "bound", ""):
        goals.add_column(column, justify="left" if column in ("goal", "") else "right")
    for goal in result.goals:
        sense = "at least" if goal.at_least else "at most"
        verdict = "[green]met" if goal.met else "[red]missed"
        goals.add_row(goal.text, f"{goal.measured:.3g}", f"{sense} {goal.bound:.3g}", verdict)
    console.print(goals)
    code = written["git"]["hash"][:9] + (" (dirty)" if written["git"]["dirty"] else "")
    machine = written["machine"]
    console.print(
        f"{written['when']}  git {code}  {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['file_system']}, load {machine['load_average_1min']:.1f}, "
        f"{written['repeats']} repeats, {written['wall_s']:.0f} s",
        highlight=False,
    )


def is_in_memory(folder: Path) -> bool:
    """Return whether a folder (or its nearest parent that exists) is not on a disk."""
    while not folder.exists():
        folder = folder.parent
    return describe_machine(folder)["file_system"] in IN_MEMORY


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def percent(share: float) -> str:
    return f"{share * 100:.2f} %"


def megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.0f} MB"
