"""Tables of a page of docs, between two marks, written from a run's JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def put(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace what a page has between ``<!-- name -->`` and ``<!-- /name -->``."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text("\n".join([before + begin, "", *lines, "", end + after]))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table."""
    return [
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |"
        for row in [head, ["---"] * len(head), *rows]
    ]
