"""The main job: train, kill -9 in the middle of a background save, resume on other ranks, compare.

Three runs of the same job (`train.py` under torchrun, gloo, CPU) from the same start:

    never killed       on A ranks from the first step to the last
    same ranks         on A ranks, killed, resumed on A ranks: bit-identical to the first
    other ranks        on A ranks, killed, resumed on B, killed, resumed on C: every sample exactly
                       once, the same loss at every step within 1e-4

The driver watches the checkpoint folder from outside. When the folder of a step holds shard files
and no `.metadata`, a save is in flight, and the ranks get SIGKILL at that moment. What is on
storage after their death is looked at again and reported. Exit code 1 if anything is not as told.

Flags that are not listed here go to `train.py` (the size of the model, for example).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch import LaunchFailed, run_launch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from verdict import Check, Kill, Launch, Outcome, Plan, Run, check_against, check_run


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the runs")
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--ranks", type=int, nargs=3, default=[4, 2, 3], metavar=("A", "B", "C"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=8, help="save every so many steps")
    parser.add_argument("--kills", type=int, nargs=2, default=[16, 32], metavar=("FIRST", "SECOND"))
    parser.add_argument("--batch", type=int, default=12, help="samples in one step, over all ranks")
    parser.add_argument("--samples", type=int, default=200, help="samples in one epoch")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds one launch may take")
    return parser.parse_known_args(argv)


def plans_of(args: argparse.Namespace) -> tuple[Plan, ...]:
    first, second, third = args.ranks
    kill_first, kill_second = args.kills
    return (
        Plan("never killed", (Launch(first),)),
        Plan("same ranks", (Launch(first, Kill(kill_first, victim=None)), Launch(first))),
        Plan(
            "other ranks",
            (
                Launch(first, Kill(kill_first, victim=first - 1)),
                Launch(second, Kill(kill_second, victim=None)),
                Launch(third),
            ),
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    args, train_flags = parse(argv)
    for name in ("steps", "every", "batch", "samples"):
        train_flags += [f"--{name}", str(getattr(args, name))]
    console = Console()
    started_s = time.monotonic()
    runs = [Run(plan) for plan in plans_of(args)]
    for run in runs:
        work = args.out.resolve() / run.plan.name.replace(" ", "-")
        try:
            do_run(run, work, train_flags, limit_s=args.limit, console=console)
        except LaunchFailed as failure:
            run.checks.append(Check("every launch ends as planned", False, str(failure)))
            continue
        run.checks += check_run(run, steps=args.steps, batch=args.batch, samples=args.samples)
        if run is not runs[0]:
            same_ranks = len({launch.ranks for launch in run.plan.launches}) == 1
            run.checks += check_against(run, runs[0], bit_identical=same_ranks)

    wall_s = time.monotonic() - started_s
    result = report(runs, wall_s=wall_s, command=sys.argv if argv is None else list(argv))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    show(console, runs)
    console.print(f"{wall_s:.0f} s. Logs and checkpoints: {args.out}", highlight=False)
    return 0 if result["passed"] else 1


def do_run(
    run: Run, work: Path, train_flags: list[str], *, limit_s: float, console: Console
) -> None:
    if work.exists():
        shutil.rmtree(work)
    for number, launch in enumerate(run.plan.launches):
        console.print(f"{run.plan.name}: {launch.ranks} ranks ...", highlight=False)
        outcome = run_launch(
            launch,
            root=work / "checkpoints",
            folder=work / f"launch{number}",
            train_flags=train_flags,
            limit_s=limit_s,
        )
        run.outcomes.append(outcome)
        told = "killed in a save" if outcome.killed else "finished"
        console.print(
            f"  steps {(outcome.restored or 0) + 1} to {outcome.last_step}, {told}, "
            f"{outcome.wall_s:.0f} s",
            highlight=False,
        )


def show(console: Console, runs: Sequence[Run]) -> None:
    table = Table(
        title="kill -9 during a background save, resume, compare",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for column in ("run", "ranks", "steps", "killed in", "from"):
        table.add_column(column, no_wrap=True)
    for column in ("lost", "restore", "loss", "verdict"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        for number, outcome in enumerate(run.outcomes):
            last = number + 1 == len(run.outcomes)
            next_start = None if last else run.outcomes[number + 1].restored or 0
            table.add_row(
                run.plan.name if number == 0 else "",
                str(outcome.ranks),
                f"{(outcome.restored or 0) + 1}-{outcome.last_step}",
                killed_in(outcome),
                str(outcome.restored) if outcome.restored is not None else "",
                "" if next_start is None else str(outcome.last_step - next_start),
                f"{outcome.restore_s:.2f} s" if outcome.restored is not None else "",
                f"{outcome.steps[outcome.last_step].loss:.6f}" if outcome.finish else "",
                ("[green]kept" if run.passed else "[red]BROKEN") if last else "",
            )
        table.add_section()
    console.print(table)
    console.print(
        "killed in: the step whose save was in flight, and the ranks that got the kill\n"
        "from: resumed from that step; lost: steps done again; restore: slowest rank\n",
        highlight=False,
    )
    for run in runs:
        console.print(f"[bold]{run.plan.name}")
        for check in run.checks:
            mark = "[green]kept  " if check.kept else "[red]BROKEN"
            told = f"  {mark}[/] {escape(f'{check.promise} ({check.seen})')}"
            console.print(told, highlight=False, soft_wrap=True)


def killed_in(outcome: Outcome) -> str:
    if outcome.killed is None:
        return ""
    return f"{outcome.killed.saving_step}, {outcome.killed.victim.removesuffix(' ranks')}"


def report(runs: Sequence[Run], *, wall_s: float, command: list[str]) -> dict[str, Any]:
    described = []
    for run in runs:
        launches = []
        for outcome in run.outcomes:
            entry = asdict(outcome)
            del entry["steps"]
            entry["first_step"] = (outcome.restored or 0) + 1
            launches.append(entry)
        for entry, later in zip(launches, run.outcomes[1:], strict=False):
            entry["lost_steps"] = entry["last_step"] - (later.restored or 0)
        described.append(
            {
                "name": run.plan.name,
                "passed": run.passed,
                "launches": launches,
                "checks": [asdict(check) for check in run.checks],
                "losses": [record.loss for record in run.history.values()],
            }
        )
    return {
        "passed": all(run.passed for run in runs),
        "command": command,
        "machine": f"{platform.platform()}, {os.cpu_count()} CPUs",
        "git": git_hash(),
        "wall_s": round(wall_s, 1),
        "runs": described,
    }


def git_hash() -> str | None:
    try:
        asked = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    return asked.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
