"""Run pytorch's own tests of DCP with the drop-in, beside stock as control.

python integration/conformance/pytorch.py                        Debian's source package
python integration/conformance/pytorch.py --source ~/pytorch     a checkout of any version
python integration/conformance/pytorch.py test_planner.py e2e    some files or folders

Their text stays where it is: a copy for the CPU goes into a folder that is removed.
The exit code is 1 if a test that stock passes does not pass with ours.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import on_cpu
import typer
from debian import fetch
from page import put, table

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path.append(str(REPOSITORY / "scripts" / "bench"))  # behind: it has a `run`, too

from machine import describe_code, describe_machine, describe_versions  # noqa: E402

SCHEMA = "dcp_checkfreq.conformance/1"
OUT = REPOSITORY / "out" / "conformance"
TESTS = Path("test", "distributed", "checkpoint")
TEST_S = 180  # for one test


@dataclass
class Ended:
    """How a file ended in one arm."""

    outcomes: dict[str, str] = field(default_factory=dict)  # by test
    why: dict[str, str] = field(default_factory=dict)  # of those that did not pass
    made: dict[str, int] = field(default_factory=dict)  # our writers and readers
    wall_s: float = 0.0

    def passed(self) -> set[str]:
        return {test for test, outcome in self.outcomes.items() if outcome == "passed"}


def main(
    files: Annotated[list[str] | None, typer.Argument(help="files or folders of theirs")] = None,
    source: Annotated[Path | None, typer.Option(help="pytorch's source; else Debian's")] = None,
    suite: Annotated[str, typer.Option(help="Debian's release")] = "trixie",
    label: Annotated[str, typer.Option(help="version of that source")] = "",
    out: Annotated[Path, typer.Option(help="for JSON and downloads")] = OUT,
    page: Annotated[Path | None, typer.Option(help="page whose table is written anew")] = None,
) -> None:
    """Run files in both arms; print a line for each, write JSON."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    source = (source or fetch(out / f"debian-{suite}", suite)).resolve()
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "source": label or source.name,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "git": describe_code(),
        "machine": describe_machine(out),
        "versions": describe_versions() | {"torch": _torch_version()},
        "files": {},
    }
    path = out / f"pytorch-{report['source']}-on-{report['versions']['torch']}.json"
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        tree = Path(folder)
        on_cpu.copy(source / TESTS, tree / TESTS)
        paths = [str(HERE), str(REPOSITORY), *_helpers(tree, out)]
        for file in _chosen(tree / TESTS, files or ["."]):
            stock, ours = (_run(tree, file, arm, paths) for arm in ("stock", "ours"))
            report["files"][str(file)] = {"stock": asdict(stock), "ours": asdict(ours)}
            path.write_text(json.dumps(report, indent=1) + "\n")
            print(_line(file, stock, ours), flush=True)
    print(f"written: {path}")
    lost = lost_tests(report)
    for test, why in lost.items():
        print(f"\npassed by stock, not by us: {test}\n    {why}")
    if page is not None:
        put(page, path.stem, lines_of(report))
    raise typer.Exit(1 if lost else 0)


def lost_tests(report: dict[str, Any]) -> dict[str, str]:
    """Return the tests that stock passes and ours do not, with why not."""
    return {
        f"{file}::{test}": arms["ours"]["why"].get(test, "did not end")
        for file, arms in report["files"].items()
        for test, outcome in arms["stock"]["outcomes"].items()
        if outcome == "passed" and arms["ours"]["outcomes"].get(test) != "passed"
    }


def lines_of(report: dict[str, Any]) -> list[str]:
    """Return a run as the lines of a page."""
    rows, totals = [], Counter[str]()
    for file, arms in report["files"].items():
        stock, ours = Ended(**arms["stock"]), Ended(**arms["ours"])
        both = stock.passed() & ours.passed()
        counts = {
            "tests": len(stock.outcomes | ours.outcomes),
            "stock": len(stock.passed()),
            "ours": len(both),
            "writers": ours.made.get("writer", 0),
            "readers": ours.made.get("reader", 0),
        }
        totals.update(counts)
        rows.append([f"`{file}`", *counts.values(), _why(stock)])
    rows.append(["all", *(totals[name] for name in counts), ""] if rows else ["none"])
    code, versions = report["git"], report["versions"]
    head = (
        f"Tests of pytorch {report['source']} on torch {versions['torch']}, "
        f"Python {versions['python']}, {report['when'][:10]}, git {code['hash'][:9]}"
        f"{' (with changes)' if code['dirty'] else ''}."
    )
    columns = ["file", "tests", "passed by stock", "of these by ours", "our writers made",
               "our readers made", "why stock does not pass the others"]  # fmt: skip
    return [head, "", *table(columns, rows)]


def _why(ended: Ended) -> str:
    """Return short reasons of an arm, with how many tests have them."""
    reasons = Counter(_short(why) for test, why in ended.why.items() if test in ended.outcomes)
    return "; ".join(f"{number} x {why}" for why, number in reasons.most_common(3))


def _short(why: str) -> str:
    """Return the line of a failure that says the most."""
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"\w*(Error|Exception|Skipped)\b", line)]
    return (errors or lines or ["?"])[-1][:120]


def _line(file: Path, stock: Ended, ours: Ended) -> str:
    lost = sorted(stock.passed() - ours.passed())
    made = ", ".join(f"{number} {name}s" for name, number in sorted(ours.made.items()))
    text = (
        f"{file}: {len(stock.outcomes)} tests, stock passes {len(stock.passed())}, "
        f"ours {len(stock.passed() & ours.passed())} of these; {made or 'none of ours was made'}"
        f" ({stock.wall_s:.0f} s, {ours.wall_s:.0f} s)"
    )
    notes = [f"  not by us: {test}: {_short(ours.why.get(test, ''))}" for test in lost]
    notes += [f"  not by stock: {test}: {_short(why)}" for test, why in sorted(stock.why.items())]
    return "\n".join([text, *notes])


def _chosen(tests: Path, names: Iterable[str]) -> list[Path]:
    chosen: list[Path] = []
    for name in names:
        path = tests / name
        found = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        if not found or not found[0].exists():
            raise typer.BadParameter(f"there are no tests in {TESTS / name} of this source")
        chosen += [one.relative_to(tests) for one in found]
    return chosen


def _helpers(tree: Path, out: Path) -> list[str]:
    """Return where `expecttest` is, which torch's test library imports; install it if missing."""
    if importlib.util.find_spec("expecttest") is not None:
        return []
    target = out / "helpers"
    if not any("torch.testing._internal" in path.read_text() for path in tree.rglob("*.py")):
        return []
    if not target.is_dir():
        install = ["pip", "install", "-q", "--no-deps", "--target", str(target), "expecttest"]
        subprocess.run([sys.executable, "-m", *install], check=True)
    return [str(target)]


def _run(tree: Path, file: Path, arm: str, paths: list[str]) -> Ended:
    """Run one file with one arm, and end its processes if it does not end by itself."""
    with tempfile.TemporaryDirectory(prefix="conformance-run-") as folder:
        results, used = Path(folder, "results"), Path(folder, "used")
        results.touch()
        used.touch()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(":"),
            "CONFORMANCE_ARM": arm,
            "CONFORMANCE_RESULTS": str(results),
            "CONFORMANCE_USED": str(used),
            "TMPDIR": folder,
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-c", os.devnull,
            "--rootdir", str(tree), "-p", "no:cacheprovider", "-p", "conformance_plugin",
            f"--timeout={TEST_S}", str(tree / TESTS / file),
        ]  # fmt: skip
        began_s = time.perf_counter()
        with open(Path(folder, "output"), "w+") as output:
            process = subprocess.Popen(
                command, cwd=tree / TESTS, env=environment, start_new_session=True,
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                process.wait(TEST_S * 10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            text = output.read()
        ended = _read(results.read_text(), used.read_text())
        ended.wall_s = round(time.perf_counter() - began_s, 1)
    if process.returncode not in (0, 1, 2, 5):  # pytest's; else it was cut off
        ended.outcomes["(file)"] = "failed"
        ended.why["(file)"] = f"pytest ended with {process.returncode}: {text[-1500:]}"
    return ended


def _read(results: str, used: str) -> Ended:
    ended = Ended(made=dict(Counter(used.split())))
    for line in results.splitlines():
        test, when, outcome, why = json.loads(line)
        if when == "call" or outcome != "passed":
            ended.outcomes[test] = outcome
        if outcome != "passed":
            ended.why[test] = why
    return ended


def _torch_version() -> str:
    command = [sys.executable, "-c", "import torch; print(torch.__version__)"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    typer.run(main)
