"""`docs/zoo.md` says what the tables of the zoo say. `ZOO_PAGE=write pytest` writes it anew."""

import os
import pathlib
import re
import sys

import pytest
import torch
from zoo_modules import MODULES
from zoo_optimizers import OPTIMIZERS, REGROUPED
from zoo_others import OTHERS, SCHEDULERS

TESTS = pathlib.Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "zoo.md"


def rows_of_ranks():
    sys.path.append(str(TESTS / "dist"))
    try:
        from jobs_zoo import ROWS
    finally:
        sys.path.remove(str(TESTS / "dist"))
    return list(ROWS)


def section(title, exact, note=""):
    lines = "\n".join(f"- {name}" for name in exact)
    return f"\n## {title}\n\n{note}{len(exact)} rows come back exactly.\n\n{lines}\n"


def page():
    one_rank = {
        "Modules": MODULES,
        "Optimizers": OPTIMIZERS,
        "Schedulers": SCHEDULERS,
        "Scalers, samplers, several of each": OTHERS,
    }
    tables = {
        title: [name for name, row in table.items() if row.refused is None]
        for title, table in one_rank.items()
    }
    refused = [
        f"| {name} | {row.when} | {row.why} |"
        for table in one_rank.values()
        for name, row in table.items()
        if row.refused is not None
    ]
    refused.append(
        "| a DTensor with `Partial` placements | registered | each rank has a summand, and no rank "
        "the value: redistribute it first |"
    )
    refused.append(
        "| `FullyShardedDataParallel` without a `device_mesh` | registered | no snapshot can be "
        "taken of a `ShardedTensor`: give it a device mesh |"
    )
    ranks = rows_of_ranks()
    exact = sum(map(len, tables.values())) + len(REGROUPED) + len(ranks)
    head, *_ = re.split(r"^\d+ rows: ", PAGE.read_text("utf-8"), maxsplit=1, flags=re.M)
    text = f"{head}{exact + len(refused)} rows: {exact} exact, {len(refused)} refused.\n"
    for title, names in tables.items():
        text += section(title, names)
    text += section("Groups that are others now than when they were saved", REGROUPED)
    note = (
        "Saved on 4 and on 2 ranks, restored on 4, 3, 2 and 1. All values are the same.\n"
        "On the same ranks the next step is the same as well, "
        "except under DDP, which cuts its buckets anew after its first step and rounds otherwise.\n"
    )
    text += section("Several ranks", ranks, note)
    table = "\n".join(["| what | when | why |", "|---|---|---|", *refused])
    return f"{text}\n## Refused\n\n{table}\n"


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page is of torch 2.13")
def test_the_page_says_what_the_tables_say():
    if os.environ.get("ZOO_PAGE") == "write":
        PAGE.write_text(page(), "utf-8")
    assert PAGE.read_text("utf-8") == page()


def test_every_refused_row_says_why():
    for table in (MODULES, OPTIMIZERS, SCHEDULERS, OTHERS):
        assert [name for name, row in table.items() if row.refused and not row.why] == []
