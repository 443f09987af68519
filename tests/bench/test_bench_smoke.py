"""Every benchmark command runs at a tiny size and writes the report it promises.

With `-m long` all arms of it do.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "scripts" / "bench" / "run.py"
SAVE_ARMS = {
    "ours", "ours_kept_planner", "stock_t1", "stock_t2", "stock_fsspec", "torch_save",
    "safetensors", "limit",
}  # fmt: skip
LOAD_ARMS = {
    "ours", "ours_own_planner", "stock", "stock_on_ours", "stock_fsspec", "torch_load",
    "safetensors", "limit_pread", "limit_direct",
}  # fmt: skip
CONVERT_ARMS = {
    "export_safetensors", "export_torch_save", "stock_to_torch_save", "open_one", "stock_one",
    "limit_read", "limit_write",
}  # fmt: skip
ASYNC_ARMS = {"ours", "ours_kept_planner", "stock", "stock_kept_stager"}
DATA_ARMS = {
    "decode": {"dataloader", "ours_global", "ours_explicit", "ours_none"},
    "trivial": {"dataloader", "ours_global", "ours_explicit", "ours_none"},
    "dali": {"dali_native", "ours_dali", "ours_dali_reader"},
    "resume": {
        "ours_1e6",
        "ours_1e8",
        "ours_1e9",
        "dataloader_1e3",
        "dataloader_1e6",
        "dataloader_1e7",
    },
}  # fmt: skip
MAY_BE_ZERO = {
    "extra_peak_bytes", "first_extra_peak_bytes", "syscall_read_bytes", "cpu_s",
    "cpu_us_per_sample",
}  # fmt: skip
MAY_BE_NEGATIVE = {"py_lost_s", "mm_lost_s"}  # a difference of two measured times

pytestmark = [pytest.mark.bench, pytest.mark.slow, pytest.mark.timeout(300)]
long = pytest.mark.long


def bench(tmp_path, command, *options):
    out = tmp_path / "out.json"
    arguments = [command, *options, "--scale", "small", "--repeats", "1", "--folder", str(tmp_path)]
    subprocess.run([sys.executable, str(RUN), *arguments, "--out", str(out)], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"], "checkpoints were left"
    return out, json.loads(out.read_text())


def assert_sound(report, arms):
    assert report["schema"] == "dcp_checkfreq.bench/1"
    assert {"hash", "dirty"} == set(report["git"])
    assert report["machine"]["cores"] >= 1
    assert report["versions"]["torch"]
    assert report["config"]["repeats"] == 1
    assert set(report["arms"]) == arms
    for arm, metrics in report["arms"].items():
        for metric, figure in metrics.items():
            assert figure["min"] <= figure["median"] <= figure["max"], (arm, metric)
            if metric in MAY_BE_ZERO:
                assert figure["min"] >= 0, (arm, metric)
            elif metric not in MAY_BE_NEGATIVE:
                assert figure["min"] > 0, (arm, metric)


@pytest.mark.long  # a process for each arm
def test_save_measures_every_arm(tmp_path):
    _, (report,) = bench(tmp_path, "save")
    assert_sound(report, SAVE_ARMS)
    assert_is_of_saves(report)


def test_save_measures_only_what_is_asked_for_and_report_prints_it_again(tmp_path):
    out, (report,) = bench(tmp_path, "save", "--state", "many", "--arms", "ours,stock_t1")
    assert_sound(report, {"ours", "stock_t1"})
    assert_is_of_saves(report)
    shown = subprocess.run(
        [sys.executable, str(RUN), "report", str(out)], check=True, capture_output=True, text=True
    )
    assert "stock_t1" in shown.stdout


def assert_is_of_saves(report):
    assert {"wall_s", "first_extra_peak_bytes"} <= set(report["arms"]["ours"])
    assert report["wall_ratios"]["stock_t1"]["stock_t1"] == 1
    assert report["goals"] == [], "goals are for the full size only"


@pytest.mark.parametrize("arms", [{"ours", "stock"}, pytest.param(ASYNC_ARMS, marks=long)])
def test_async_measures_the_first_save_the_later_ones_and_the_training(tmp_path, arms):
    _, (report,) = bench(tmp_path, "async", "--arms", ",".join(sorted(arms)))
    assert_sound(report, arms)
    for metrics in report["arms"].values():
        assert {"first_blocked_s", "blocked_s", "bg_idle_s", "bg_py_s", "mm_lost_s"} <= set(metrics)


def test_call_measures_the_start_of_a_save_and_the_step_after_it(tmp_path):
    _, (report,) = bench(tmp_path, "call")
    assert_sound(report, {"ours", "stock", "floor"})
    for metrics in report["arms"].values():
        assert set(metrics) == {"call_s", "next_step_s"}


def test_convert_measures_exports_and_one_tensor_out_of_a_checkpoint(tmp_path):
    _, (report,) = bench(tmp_path, "convert")
    assert_sound(report, CONVERT_ARMS)


def test_versus_measures_two_revisions_in_turns(tmp_path):
    out = tmp_path / "versus.json"
    arguments = ["HEAD", "HEAD", "--benches", "call", "--rounds", "1", "--scale", "small"]
    subprocess.run(
        [sys.executable, str(RUN.with_name("versus.py")), *arguments, "--out", str(out)], check=True
    )
    report = json.loads(out.read_text())
    assert report["schema"] == "dcp_checkfreq.versus/1"
    assert report["git"]["before"] == report["git"]["after"]
    assert [(one["bench"], one["arm"]) for one in report["figures"]] == [
        ("call", "ours"),
        ("call", "stock"),
    ]
    for one in report["figures"]:
        (before,), (after,) = one["before"], one["after"]
        assert one["ratio"]["median"] == after / before > 0


def test_load_measures_every_arm_and_checks_what_was_loaded(tmp_path):
    _, (report,) = bench(tmp_path, "load")
    assert_sound(report, LOAD_ARMS)
    assert report["arms"]["ours"]["counted_per_needed"]["max"] >= 1


@pytest.mark.dist
def test_reshard_measures_loads_on_another_number_of_ranks(tmp_path):
    _, (report,) = bench(tmp_path, "reshard", "--cases", "2:1")
    assert report["config"]["case"] == "2->1"
    assert_sound(report, {"ours", "stock"})


@pytest.mark.parametrize(
    ("load", "workers"),
    [
        ("trivial", "0,1"),
        ("dali", "1"),
        pytest.param("dali", "0", marks=long),
        pytest.param("resume", "0,1", marks=long),
        pytest.param("decode", "0,1", marks=long),
    ],
)
def test_data_measures_epochs_and_resumes_with_the_peers_that_are_installed(
    tmp_path, load, workers
):
    if load == "dali":
        pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    _, reports = bench(tmp_path, "data", "--load", load, "--workers", workers)
    assert [report["config"]["case"] for report in reports] == workers.split(",")
    for report in reports:
        arms = set(report["arms"])
        assert DATA_ARMS[load] <= arms, "what needs no peer always runs"
        assert not arms & set(report["config"]["skipped"])
        assert_sound(report, arms)
        for arm, metrics in report["arms"].items():
            if arm.startswith("ours") and arm != "ours_dali_reader":
                assert metrics["state_bytes"]["max"] < 200
            if load == "resume" and arm.startswith("ours"):
                assert {"fresh_s", "at_10_s", "at_50_s", "at_99_s"} <= set(metrics)
            elif load != "resume":
                assert {"samples_per_s", "cpu_us_per_sample"} <= set(metrics)


def test_an_unknown_arm_is_refused(tmp_path):
    arguments = ["save", "--arms", "nosuch", "--folder", str(tmp_path), "--out", "unused.json"]
    done = subprocess.run(
        [sys.executable, str(RUN), *arguments], check=False, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "nosuch" in done.stderr
