"""Reproduce Figure 6 of CheckFreq, small: train on through kills, with and without a position.

python integration/data/run.py --quick
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from figure6 import ARMS, FULL, QUICK, Runner, figures, goals
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "scripts" / "bench"))  # behind: it has a `run`, too

from machine import describe_code, describe_machine, describe_versions  # noqa: E402

SCHEMA = "dcp_checkfreq.data/1"
PACKAGES = ("nvidia-dali-cuda120", "numpy", "pillow", "scikit-learn")
OUT = REPOSITORY / "out" / "data"


def main(
    quick: Annotated[bool, typer.Option("--quick", help="seconds; for smoke tests")] = False,
    out: Annotated[Path, typer.Option(help="folder for JSON and plot")] = OUT,
    folder: Annotated[Path, typer.Option(help="for images and checkpoints, for a while")] = OUT,
    seed: Annotated[int, typer.Option(help="the first of the seeds")] = 1,
) -> None:
    """Run all arms over all seeds; write JSON and a plot, print a table."""
    scale = QUICK if quick else FULL
    began_s, code = time.perf_counter(), describe_code()
    raw = Runner(scale, folder.resolve(), seed).run(lambda text: print(text, file=sys.stderr))
    found = figures(raw)
    report = {
        "schema": SCHEMA,
        "experiment": "figure6",
        "quick": quick,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "git": code,  # as it was at the begin
        "machine": describe_machine(folder),
        "versions": describe_versions() | {name: version(name) for name in PACKAGES},
        "config": asdict(scale),
        "seed": seed,
        "wall_s": round(time.perf_counter() - began_s, 1),
        "figures": found,
        "goals": goals(found),
        "raw": raw,
    }
    name = f"figure6{'-quick' if quick else ''}"
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    plot(raw, out / f"{name}.png")
    console = Console()
    show(report, console if console.is_terminal else Console(width=170))


def show(report: dict[str, Any], console: Console) -> None:
    if report["quick"]:
        console.print("[bold]--quick: shows that it runs; the figures mean nothing")
    table = Table(title="Figure 6, small: digits through DALI; means over seeds (min to max)")
    columns = ("", "test accuracy", "test loss", "kills", "lost per epoch", "repeated per epoch",
               "times an item came", "weights as uninterrupted")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for name, arm in report["figures"].items():
        accuracy, loss = arm["accuracy"], arm["loss"]
        table.add_row(
            name,
            f"{accuracy['mean']:.2%} ({accuracy['min']:.1%} to {accuracy['max']:.1%})",
            f"{loss['mean']:.3f} ({loss['min']:.3f} to {loss['max']:.3f})",
            f"{arm['kills']['mean']:.1f}",
            f"{arm['lost_per_epoch']:.1f}",
            f"{arm['repeated_per_epoch']:.1f}",
            f"{arm['fewest_times']} to {arm['most_times']}",
            f"{arm['same_weights_as_uninterrupted']} of {arm['runs']}",
        )
    console.print(table)
    for goal in report["goals"]:
        verdict = "[green]met" if goal["met"] else "[red]missed"
        console.print(f"{verdict}[/] {goal['goal']}: {goal['measured']:.3g}", highlight=False)
    machine, config = report["machine"], report["config"]
    console.print(
        f"{report['when']}  git {report['git']['hash'][:9]}"
        f"{' (dirty)' if report['git']['dirty'] else ''}  {machine['cpu']}, {machine['cores']} "
        f"cores, {config['seeds']} seeds, {config['epochs']} epochs of {report['raw'][0]['items']}"
        f" images, {report['wall_s']:.0f} s",
        highlight=False,
    )


def plot(raw: list[dict[str, Any]], path: Path) -> None:
    """Draw test accuracy and loss over the epochs: mean of the seeds, and their range."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for number, arm in enumerate(ARMS):
        runs = [run for run in raw if run["arm"] == arm.name]
        style = "--" if arm.interrupted else "-"
        for axis, key in zip(axes, ("accuracy", "loss"), strict=True):
            curves = list(zip(*(run[key] for run in runs), strict=True))
            epochs = range(1, len(curves) + 1)
            means = [sum(values) / len(values) for values in curves]
            axis.plot(epochs, means, style, color=f"C{number}", label=arm.name, linewidth=1.8)
            lows, highs = [min(v) for v in curves], [max(v) for v in curves]
            axis.fill_between(epochs, lows, highs, color=f"C{number}", alpha=0.12)
    for axis, text in zip(axes, ("test accuracy", "test loss"), strict=True):
        axis.set_xlabel("epoch")
        axis.set_ylabel(text)
    axes[1].set_yscale("log")
    axes[0].legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    typer.run(main)
