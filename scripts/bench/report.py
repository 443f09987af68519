"""A measured run as JSON and as tables."""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from goals import judge
from machine import describe_code, describe_machine, describe_versions
from spec import Samples

SCHEMA = "dcp_checkfreq.bench/1"
# ratios are given against these
REFERENCE_ARMS = (
    "stock", "stock_t1", "stock_fsspec", "s3torch", "limit", "limit_direct", "limit_http",
    "dataloader", "dali_native",
)  # fmt: skip


def make_report(
    bench: str, samples: Samples, *, config: dict[str, Any], state_bytes: int, folder: Path
) -> dict[str, Any]:
    """Return one run as plain values: what, with what, every raw value, ratios, goals.

    ``config["case"]`` names the ranks: "1", or "2->4" for a reshard; for data, the workers.
    """
    arms = {
        arm: {metric: _spread(values) for metric, values in sorted(metrics.items())}
        for arm, metrics in sorted(samples.items())
    }
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "bench": bench,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "git": describe_code(),
        "machine": describe_machine(folder),
        "versions": describe_versions(),
        "config": config,
        "state_bytes": state_bytes,
        "arms": arms,
        "wall_ratios": _wall_ratios(arms),
    }
    report["goals"] = judge(report)
    return report


def save_reports(reports: list[dict[str, Any]], path: Path) -> None:
    """Write the runs of one command as a JSON list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(reports, indent=1) + "\n")


def read_reports(path: Path) -> list[dict[str, Any]]:
    """Read what `save_reports` wrote.

    Raises:
        ValueError: the file is of another schema.
    """
    reports: list[dict[str, Any]] = json.loads(path.read_text())
    for report in reports:
        if report["schema"] != SCHEMA:
            raise ValueError(f"{path}: schema {report['schema']!r}, expected {SCHEMA!r}")
    return reports


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print every arm's figures, then the goals."""
    config = report["config"]
    title = (
        f"{report['bench']} {config['state']} {config['scale']}, {_human(report['state_bytes'])}, "
        f"{config['place']}, {config.get('case_of', 'ranks')} {config['case']}, "
        f"{config['repeats']} repeats"
    )
    metrics = list(dict.fromkeys(m for figures in report["arms"].values() for m in figures))
    table = Table(title=title, caption="medians; wall seconds with (min to max)")
    table.add_column("arm", no_wrap=True)
    for metric in metrics:
        table.add_column(metric.removesuffix("_bytes").replace("_", " "), justify="right")
    for arm, figures in report["arms"].items():
        table.add_row(arm, *(_cell(metric, figures.get(metric)) for metric in metrics))
    console.print(table)
    code, dirty = report["git"]["hash"][:9], " (dirty)" if report["git"]["dirty"] else ""
    console.print(f"{report['when']}  git {code}{dirty}  {report['machine']['cpu']}, "
                  f"load {report['machine']['load_average_1min']:.1f}")  # fmt: skip
    for arm, reason in config.get("skipped", {}).items():
        console.print(f"{arm} skipped: {reason}")
    if report["goals"]:
        _print_goals(report["goals"], console)


def _print_goals(goals: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="goals")
    for column in ("goal", "measured", "bound", ""):
        table.add_column(column, justify="left" if column in ("goal", "") else "right")
    for row in goals:
        verdict = "[green]met[/]" if row["met"] else "[red]missed[/]"
        bound = f"{row['sense']} {_number(row['bound'])}"
        table.add_row(row["goal"], _number(row["measured"]), bound, verdict)
    console.print(table)


def _spread(values: list[float]) -> dict[str, Any]:
    return {"values": values, "min": min(values), "median": median(values), "max": max(values)}


def _wall_ratios(arms: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return median wall time of every arm over that of each reference arm of the run."""
    walls = {arm: m["wall_s"]["median"] for arm, m in arms.items() if "wall_s" in m}
    return {
        reference: {arm: wall / walls[reference] for arm, wall in walls.items()}
        for reference in REFERENCE_ARMS
        if reference in walls
    }


def _cell(metric: str, figure: dict[str, Any] | None) -> str:
    if figure is None:
        return ""
    show = _human if metric.endswith("_bytes") else _number
    if not metric.endswith("wall_s"):
        return show(figure["median"])
    return f"{show(figure['median'])} ({show(figure['min'])} to {show(figure['max'])})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _human(size_bytes: float) -> str:
    for unit, width in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= width:
            return f"{size_bytes / width:.3g} {unit}"
    return f"{size_bytes:.0f} B"
