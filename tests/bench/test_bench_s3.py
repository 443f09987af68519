"""The benchmarks that need an S3 server run at a tiny size and write the reports they promise."""

import pytest
from test_bench_smoke import assert_sound, bench

pytestmark = [pytest.mark.bench, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.long
def test_s3_measures_saves_loads_and_reshards_and_counts_requests(tmp_path):
    _, reports = bench(tmp_path, "s3", "--arms", "ours,limit_http", "--cases", "2:1")
    assert [report["bench"] for report in reports] == ["s3_save", "s3_load", "s3_reshard"]
    for report in reports:
        arms = {"ours", "limit_http"} - (
            {"limit_http"} if report["bench"] == "s3_reshard" else set()
        )
        assert set(report["arms"]) == arms
        assert all(metrics["requests"]["min"] >= 1 for metrics in report["arms"].values())
    assert reports[2]["config"]["case"] == "2->1"
    assert reports[2]["arms"]["ours"]["counted_per_needed"]["min"] >= 1


def test_staged_measures_how_long_training_is_held_up(tmp_path):
    _, (report,) = bench(tmp_path, "staged", "--arms", "local,staged")
    assert_sound(report, {"local", "staged"})
    for metrics in report["arms"].values():
        assert metrics["blocked_s"]["min"] < metrics["published_s"]["min"]
    assert report["config"]["sent_bytes"] > 2 * report["state_bytes"]
