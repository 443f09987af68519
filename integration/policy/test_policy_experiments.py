"""Every experiment runs at a tiny size, keeps its promises, and writes the report it promises.

No test here gates on a time: what is measured is for `run.py` on a machine that does nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = Path(__file__).with_name("run.py")
sys.path.append(str(RUN.parents[2] / "tests"))

from forked_torchrun import run_driver  # noqa: E402

LONGEST_GAP_STEPS = 3  # docs/policy.md: now and then one interval is longer by so much
SAVING_ARMS = {"stock_sync", "sync", "persist_overlap", "both_overlap"}

pytestmark = [pytest.mark.bench, pytest.mark.slow, pytest.mark.timeout(300)]


def experiment(tmp_path: Path, name: str) -> dict[str, Any]:
    """Run one experiment and check what all reports have."""
    work = tmp_path / "work"
    work.mkdir()
    code, said = run_driver(tmp_path, RUN, name, "--quick", "--out", tmp_path, "--folder", work)
    assert code == 0, said
    assert list(work.iterdir()) == [], "checkpoints were left"
    report = json.loads((tmp_path / f"{name}-quick.json").read_text())
    assert report["schema"] == "dcp_checkfreq.policy/1"
    assert report["quick"]
    assert "a step that sleeps" in report["note"]
    assert report["note"] in said
    assert {"hash", "dirty"} == set(report["git"])
    assert report["machine"]["cores"] >= 1
    assert report["versions"]["torch"]
    assert report["seed"] == 1
    assert report["paper"]
    assert report["goals"]
    for figure in spreads(report["figures"]):
        assert figure["min"] <= figure["median"] <= figure["max"]
        assert len(figure["values"]) >= 1
    return report


def spreads(tree: Any) -> list[dict[str, Any]]:
    if isinstance(tree, dict):
        if {"values", "min", "median", "max"} <= tree.keys():
            return [tree]
        return [found for inner in tree.values() for found in spreads(inner)]
    if isinstance(tree, list):
        return [found for inner in tree for found in spreads(inner)]
    return []


def test_table3_measures_one_save_a_turn_for_every_way_to_save(tmp_path: Path) -> None:
    report = experiment(tmp_path, "table3")
    assert len(report["figures"]) == 2, "one case with Tc < Ti, one with Tc > Ti"
    for case in report["figures"].values():
        assert case.keys() >= SAVING_ARMS
    assert {turn["arm"] for turn in report["raw"]} == SAVING_ARMS | {"none"}
    for turn in report["raw"]:
        ours = turn["arm"] in SAVING_ARMS - {"stock_sync"}
        assert len(turn["history"]) == ours, turn["arm"]
        assert all(record["error"] is None for record in turn["history"])
        assert len(turn["iterations_s"]) == turn["iterations"]


@pytest.mark.long
def test_fig7_measures_ours_and_synchronous_saves_at_the_interval_that_was_chosen(
    tmp_path: Path,
) -> None:
    report = experiment(tmp_path, "fig7")
    (measured,) = report["figures"].values()
    assert {"auto", "sync", "iteration_s", "interval_steps"} == measured.keys()
    assert measured["interval_steps"]["min"] >= 1
    by_arm = {run["arm"]: run for run in report["raw"]}
    assert by_arm.keys() == {"none", "auto", "sync"}
    auto, sync = by_arm["auto"], by_arm["sync"]
    assert auto["iterations"] % auto["interval_steps"] == 0, "whole intervals"
    assert sync["iterations"] % sync["interval_steps"] == 0
    assert len(auto["history"]) >= 2
    assert all(record["error"] is None for record in auto["history"])


@pytest.mark.long
def test_table5_shows_overhead_and_interval_before_under_and_after_a_load(tmp_path: Path) -> None:
    report = experiment(tmp_path, "table5")
    by_arm = {run["arm"]: run for run in report["raw"]}
    assert by_arm.keys() == {"none", "adaptive", "static"}
    for run in by_arm.values():
        phases = [one["phase"] for one in run["iterations"]]
        assert list(dict.fromkeys(phases)) == ["alone", "loaded", "alone again"]
        assert run["load"]["written_bytes"] > 0, "there was no load"
    fixed = {one["interval_steps"] for one in by_arm["static"]["iterations"]}
    assert fixed == {report["figures"]["adaptive"]["interval_before"]["values"][0]}
    adaptive = [one["interval_steps"] for one in by_arm["adaptive"]["iterations"]]
    assert adaptive[0] is None, "it profiles first"
    assert all(k is not None and k >= 1 for k in adaptive[len(adaptive) // 3 :])


@pytest.mark.dist
@pytest.mark.crash
def test_table6_kills_lose_at_most_two_intervals_and_ranks_agree_on_the_interval(
    tmp_path: Path,
) -> None:
    report = experiment(tmp_path, "table6")
    (two_ranks, epoch) = report["figures"].values()
    assert two_ranks["mode"] == "auto"
    assert two_ranks["ranks_agree"]
    assert epoch["mode"] == "epoch"
    for group in report["raw"]:
        assert all(launch["killed_s"] for launch in group["launches"])
        for one in group["recoveries"]:
            assert one["lost_iterations"] <= 2 * one["interval_steps"] + LONGEST_GAP_STEPS
            assert one["lost_iterations"] == one["killed_after_step"] - (one["resumed_from"] or 0)
            parts = [one[f"{part}_s"] for part in ("detect", "start", "find", "load", "redo")]
            assert all(part >= 0 for part in parts)
            assert one["total_s"] > 0


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.long  # a resume that is exact is what test_main_job and the demo show, too
def test_fig8_ends_with_the_same_loss_however_often_it_was_interrupted(tmp_path: Path) -> None:
    report = experiment(tmp_path, "fig8")
    by_arm = {run["arm"]: run for run in report["raw"]}
    assert by_arm.keys() == {"never", "auto", "epoch"}
    assert by_arm["never"]["interruptions"] == 0
    assert by_arm["auto"]["interruptions"] >= 1
    losses = {run["final_loss"] for run in by_arm.values()}
    assert len(losses) == 1
    assert losses != {None}
    for run in by_arm.values():
        assert run["launches"][-1]["last_step"] == 60


def test_the_grid_of_simulated_jobs_compares_two_trees(tmp_path):
    command = [sys.executable, RUN.with_name("grid.py"), "--jobs", "9"]
    first = tmp_path / "first.json"
    for more in (["--out", first], ["--against", first]):
        ran = subprocess.run([*command, *more], capture_output=True, text=True, check=True)
    lines = ran.stdout.splitlines()
    assert lines[0] == "9 jobs, each figure here and there"
    kinds = ["all", "steady", "noisy", "jump", "busy", "swing", "cold", "contention", "drift"]
    assert [line.split()[0] for line in lines[1:]] == [*kinds, "long"]
    for line in lines[1:]:
        _, _, here, there, *_ = line.split()
        assert here == there
