"""Measure two revisions of this repository in turns: did a change make anything slower?

python scripts/bench/versus.py f96207b HEAD --benches save,call --rounds 5 --out out/versus.json

Each revision is checked out beside this one and runs its own `run.py`. In every round each bench
runs once for both, in random order, so that a busy hour of the machine meets both of them. What
counts is the ratio after / before of each round, and its median.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from machine import REPOSITORY, describe_machine, describe_versions

SCHEMA = "dcp_checkfreq.versus/1"
ARMS = {"save": "ours,stock_t1"}  # of a bench; of those that are not named:
OTHER_ARMS = "ours,stock"
# Of each bench, what a user waits for. The peer's is beside it: what moved both was the machine.
METRICS = {
    "save": "wall_s", "async": "blocked_s", "call": "call_s", "load": "wall_s", "reshard": "wall_s",
}  # fmt: skip
Values = dict[tuple[str, str], dict[str, list[float]]]  # of a bench and arm, by revision


def main(
    before: Annotated[str, typer.Argument(help="a revision")],
    after: Annotated[str, typer.Argument(help="another one")] = "HEAD",
    out: Annotated[Path, typer.Option(help="where the JSON goes")] = Path("out/versus.json"),
    benches: Annotated[str, typer.Option(help="comma-separated")] = ",".join(METRICS),
    rounds: Annotated[int, typer.Option(min=1, help="runs of each bench and revision")] = 5,
    scale: Annotated[str, typer.Option(help="small: for smoke tests")] = "full",
    state: Annotated[str, typer.Option(help="another state than the benches' own")] = "",
    seed: Annotated[int, typer.Option(help="of the order")] = 0,
) -> None:
    """Run the benches of two revisions in turns; print and write the ratios."""
    shuffled, values = random.Random(seed), defaultdict(lambda: defaultdict(list))
    parent = REPOSITORY / "out"  # on the disk of the checkout
    parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="checkfreq-versus-", dir=parent) as scratch:
        trees = [
            _checked_out(revision, Path(scratch) / name)
            for name, revision in (("before", before), ("after", after))
        ]
        turns = [(bench, tree) for bench in benches.split(",") for tree in trees]
        for _ in range(rounds):
            shuffled.shuffle(turns)
            for bench, tree in turns:
                for arm, value in _measured(bench, tree, scale, state).items():
                    values[bench, arm][tree.name].append(value)
        hashes = {tree.name: _git("rev-parse", "HEAD", folder=tree) for tree in trees}
        figures = _figures(values)
        report = {
            "schema": SCHEMA,
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": sys.argv,
            "git": hashes,
            "machine": describe_machine(Path(scratch)),
            "versions": describe_versions(),
            "rounds": rounds,
            "figures": figures,
        }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    _show(figures, before, after)


def _checked_out(revision: str, tree: Path) -> Path:
    """Make a clone of this repository at a revision; it shares the objects."""
    commit = _git("rev-parse", revision)
    _git("clone", "--quiet", "--shared", "--no-checkout", str(REPOSITORY), str(tree))
    _git("checkout", "--quiet", "--detach", commit, folder=tree)
    return tree


def _git(*arguments: str, folder: Path = REPOSITORY) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def _measured(bench: str, tree: Path, scale: str, state: str) -> dict[str, float]:
    """Return each arm's median of a bench that a tree runs with its own package."""
    out = tree / "out" / "one.json"
    command = [
        *(sys.executable, str(tree / "scripts" / "bench" / "run.py"), bench),
        *("--arms", ARMS.get(bench, OTHER_ARMS), "--scale", scale, "--out", str(out)),
        *("--repeats", "11" if bench == "call" else "2"),
        *(("--state", state) if state else ()),
        *(("--cases", "2:1") if bench == "reshard" else ()),
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    subprocess.run(
        command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL, text=True
    )
    (report,) = json.loads(out.read_text())
    return {arm: one[METRICS[bench]]["median"] for arm, one in report["arms"].items()}


def _figures(values: Values) -> list[dict[str, Any]]:
    figures = []
    for (bench, arm), by_tree in sorted(values.items()):
        before, after = by_tree["before"], by_tree["after"]
        ratios = [new / old for old, new in zip(before, after, strict=True)]
        figures.append(
            {
                "bench": bench, "arm": arm, "metric": METRICS[bench],
                "before": before, "after": after,
                "ratio": {"min": min(ratios), "median": median(ratios), "max": max(ratios)},
            }
        )  # fmt: skip
    return figures


def _show(figures: list[dict[str, Any]], before: str, after: str) -> None:
    table = Table("bench", "arm", before, after, "after / before", "from", "to")
    for one in figures:
        ratio = one["ratio"]
        seconds = (f"{median(one[name]):.4g} s" for name in ("before", "after"))
        spread = (f"{ratio[name]:.2f}" for name in ("median", "min", "max"))
        table.add_row(one["bench"], one["arm"], *seconds, *spread)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
