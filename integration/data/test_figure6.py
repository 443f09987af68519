"""Figure 6 runs at a tiny size, through real kills, keeps its promises and writes what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")

pytestmark = [pytest.mark.bench, pytest.mark.slow, pytest.mark.crash, pytest.mark.timeout(300)]

for module, package in (("nvidia.dali", "dali"), ("sklearn", "dev"), ("PIL", "dev")):
    pytest.importorskip(module, reason=f"not installed: pip install -e '.[{package}]'")


def test_an_interrupted_run_with_our_iterator_ends_as_if_it_had_not_been_interrupted(
    tmp_path: Path,
) -> None:
    work = tmp_path / "work"
    done = subprocess.run(
        [sys.executable, RUN, "--quick", "--out", tmp_path, "--folder", work],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(work.iterdir()) == [], "images or checkpoints were left"
    assert (tmp_path / "figure6-quick.png").stat().st_size > 10_000
    report = json.loads((tmp_path / "figure6-quick.json").read_text())
    assert report["schema"] == "dcp_checkfreq.data/1"
    assert {"hash", "dirty"} == set(report["git"])
    assert report["versions"]["nvidia-dali-cuda120"]
    assert [goal for goal in report["goals"] if not goal["met"]] == []
    runs = {run["arm"]: run for run in report["raw"]}
    whole, ours, once = (
        runs[name]
        for name in ("ours, uninterrupted", "ours, interrupted", "ordinary, uninterrupted")
    )
    assert ours["launches"] > 1, "it was not interrupted"
    assert ours["weights"] == whole["weights"]
    assert ours["accuracy"] == whole["accuracy"]
    for run in (whole, ours, once):
        assert (run["lost"], run["repeated"]) == ([0, 0], [0, 0])
    for name in ("ordinary, interrupted, one seed", "ordinary, interrupted, new seeds"):
        assert runs[name]["launches"] == ours["launches"]
        assert sum(runs[name]["lost"]) > 0, "the control shows nothing"
        assert sum(runs[name]["repeated"]) > 0
