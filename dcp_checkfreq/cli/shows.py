"""Prints what was found: tables for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dcp_checkfreq.cli.looks import Choice, Step, Verdict
from dcp_checkfreq.cli.summary import Summary

_STATES = {"newest": "bold green", "whole": "green", "broken": "red", "unpublished": "yellow"}


def console() -> Console:
    """Return where tables go. A pipe or a file gets lines that are not wrapped."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=200, soft_wrap=True)


def as_json(value: Any) -> None:
    """Print dataclasses, or lists of them, as one JSON document."""
    json.dump(value, sys.stdout, indent=2, default=_plain)
    sys.stdout.write("\n")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def steps(found: Sequence[Step], now_s: float) -> None:
    """Print the steps of a root."""
    table = _table("step", "state", "size", "saved", "ranks", "why")
    for one in found:
        table.add_row(
            one.name,
            Text(one.state, style=_STATES.get(one.state, "")),
            size_text(one.size_bytes),
            "" if one.saved_s is None else f"{age_text(now_s - one.saved_s)} ago",
            str(one.ranks or ""),
            one.why,
        )
    console().print(table)


def choice(found: Choice) -> None:
    """Print what a restart would do."""
    out = console()
    for name, reason in found.passed_over:
        out.print(f"passes over {name}: {reason}", markup=False)
    if found.path is None:
        out.print("no checkpoint is whole: a restart is an error unless fresh_start=True")
    else:
        out.print(f"resumes from {found.path}", markup=False)


def verdicts(found: Iterable[Verdict]) -> None:
    """Print which checkpoints are as they were saved."""
    out = console()
    for one in found:
        if one.problem is not None:
            out.print(Text(f"{one.name}: {one.problem}", style="red"))
        else:
            how = "all digests match" if one.is_checked else "sizes are right"
            out.print(f"{one.name}: {how}", markup=False)


def summary(found: Summary, most: int) -> None:
    """Print what a checkpoint holds, at most so many items of it."""
    out = console()
    out.print(f"{found.path}", markup=False)
    facts = [
        ("step", found.step),
        ("run", found.run_id),
        ("written by", found.written_by or "stock DCP"),
        ("ranks", found.ranks),
        ("items", f"{len(found.items)}, {size_text(found.size_bytes)}"),
        ("files", f"{len(found.files)}, {size_text(sum(found.files.values()))}"),
    ]
    for name, fact in facts:
        if fact not in (None, ""):
            out.print(f"  {name}: {fact}", markup=False)
    by_rank = found.bytes_by_rank
    if len(by_rank) > 1:
        least, largest = min(by_rank.values()), max(by_rank.values())
        out.print(f"  bytes by rank: {size_text(least)} to {size_text(largest)}")
    table = _table("key", "shape", "dtype", "size", "chunks")
    for item in found.items[:most]:
        table.add_row(
            Text(item.key),
            "value" if item.shape is None else str(list(item.shape)),
            item.dtype.removeprefix("torch."),
            size_text(item.size_bytes),
            "" if item.shape is None else str(item.chunks),
        )
    out.print(table)
    if len(found.items) > most:
        out.print(f"and {len(found.items) - most} more: --all shows them")


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        right = name in ("size", "ranks", "chunks")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table


def size_text(size_bytes: int) -> str:
    """Return a size as people say it: "1.7 GB"."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.3g} {unit}"


def age_text(age_s: float) -> str:
    """Return an age in its largest unit or two: "3 min", "2 d 4 h"."""
    left = timedelta(seconds=max(0, round(age_s)))
    hours, rest = divmod(left.seconds, 3600)
    parts = [(left.days, "d"), (hours, "h"), (rest // 60, "min"), (rest % 60, "s")]
    first = next((at for at, (number, _) in enumerate(parts) if number), len(parts) - 1)
    shown = parts[first : first + (2 if first == 0 else 1)]
    return " ".join(f"{number} {unit}" for number, unit in shown if number or first)
