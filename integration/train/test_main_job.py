"""The main job with a tiny model: same driver, same kills, same promises as `scripts/demo`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "tests"))

from forked_torchrun import run_driver  # noqa: E402

TINY = "--layers 2 --width 64 --heads 2 --length 32"
JOB = "--steps 30 --every 5 --kills 10 20 --samples 110 --limit 120"


@pytest.mark.dist
@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "ranks",
    [
        (1, 2, 1),
        pytest.param((2, 3, 1), marks=pytest.mark.long),
        pytest.param((4, 2, 3), marks=pytest.mark.long),
    ],
)
def test_a_job_killed_in_a_save_resumes_on_any_number_of_ranks(
    tmp_path: Path, ranks: tuple[int, int, int]
) -> None:
    first, second, third = ranks
    result = run_run_driver(tmp_path, f"{JOB} {TINY} --ranks {first} {second} {third}")

    broken = [
        f"{run['name']}: {check['promise']} ({check['seen']})"
        for run in result["runs"]
        for check in run["checks"]
        if not check["kept"]
    ]
    assert broken == []
    assert [[launch["ranks"] for launch in run["launches"]] for run in result["runs"]] == [
        [first],
        [first, first],
        [first, second, third],
    ]
    kills = [launch["killed"] for run in result["runs"] for launch in run["launches"]]
    assert sum(kill is not None for kill in kills) == 3
    assert result["passed"]


def run_run_driver(tmp_path: Path, flags: str) -> dict[str, Any]:
    told = tmp_path / "result.json"
    arguments = [HERE / "run_demo.py", "--out", tmp_path, "--json", told, *flags.split()]
    code, said = run_driver(tmp_path, *arguments)
    assert told.exists(), said
    result = json.loads(told.read_text())
    assert (code == 0) == result["passed"], said
    return result
