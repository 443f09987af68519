"""Run the paper's experiments, small, and print ours beside what the paper says.

python integration/policy/run.py table3 --quick
"""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer
from record import REPOSITORY, Settings, is_in_memory, report, save, show
from rich.console import Console

EXPERIMENTS = ("table3", "fig7", "table5", "table6", "fig8")

Which = Enum("Which", {name: name for name in (*EXPERIMENTS, "all")}, type=str)
Repeats = Annotated[Optional[int], typer.Option(min=1, help="default: the experiment's own")]  # noqa: UP045 - evaluated on 3.10

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)  # plain: tests read it


@app.command()
def main(
    which: Annotated[Which, typer.Argument(help="the experiment")],
    quick: Annotated[bool, typer.Option("--quick", help="seconds; for smoke tests")] = False,
    out: Annotated[Path, typer.Option(help="folder for the JSON")] = REPOSITORY / "out" / "policy",
    folder: Annotated[
        Path, typer.Option(help="where checkpoints go for a while; on a real disk")
    ] = REPOSITORY / "out",
    repeats: Repeats = None,
    seed: Annotated[int, typer.Option(help="of orders, kills and interruptions")] = 1,
) -> None:  # fmt: skip
    """Run one experiment, or all of them one after the other."""
    if is_in_memory(folder):
        raise typer.BadParameter(f"{folder} is in memory, not on a disk", param_hint="folder")
    console = Console()
    if not console.is_terminal:
        console = Console(width=170)  # a log file wraps nothing
    # stock DCP says this on every save and load in one process
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable", UserWarning)
    settings = Settings(quick=quick, folder=folder.resolve(), seed=seed, repeats=repeats)
    for name in EXPERIMENTS if which.value == "all" else (which.value,):
        began_s = time.perf_counter()
        result = importlib.import_module(name).run(settings)
        written = report(result, settings, wall_s=time.perf_counter() - began_s)
        path = out / f"{name}{'-quick' if quick else ''}.json"
        save(written, path)
        show(result, written, console)
        console.print(f"[dim]{path}", highlight=False)
        sys.stdout.flush()


if __name__ == "__main__":
    app()
