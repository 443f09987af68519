"""A local disk in front of a real S3 server: killed in its upload, started again."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from servers import KEY, SECRET

from dcp_checkfreq import find_latest_valid
from dcp_checkfreq.format.names import step_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def options(weed):
    return {
        "key": KEY,
        "secret": SECRET,
        "client_kwargs": {"endpoint_url": weed.endpoint, "region_name": "us-east-1"},
    }


def start(options, root, nvme, steps, *kill_after_s):
    script = Path(__file__).with_name("run_staged.py")
    return subprocess.Popen(
        [sys.executable, script, root, nvme, str(steps), *map(str, kill_after_s)],
        env=os.environ | {"STORAGE_OPTIONS": json.dumps(options)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(options, root, nvme, steps, *kill_after_s):
    with start(options, root, nvme, steps, *kill_after_s) as process:
        try:
            out, err = process.communicate(timeout=150)
        finally:
            process.kill()
    if kill_after_s:
        assert process.returncode == -9, err[-3000:]
        return None
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


def test_a_kill_in_the_upload_costs_nothing_on_the_same_node(proxy, options, root, tmp_path):
    nvme = tmp_path / "nvme"
    slow = {
        **options,
        "client_kwargs": {**options["client_kwargs"], "endpoint_url": proxy.endpoint},
    }
    proxy.bytes_per_s = 4e6  # 24 MiB in 6 s
    with start(slow, root, nvme, 1, 600) as process:
        try:
            while proxy.sent_bytes < 4 << 20:  # the kill is in the midst
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)
        finally:
            process.kill()
    assert 0 < proxy.sent_bytes < 24 << 20
    assert find_latest_valid(root, storage_options=options) is None
    assert find_latest_valid(root, storage_options=options, staging_dir=nvme).step == 1
    again = run(options, root, nvme, 0)
    assert (again["restored"], again["right"]) == (1, True)
    assert find_latest_valid(root, storage_options=options, depth="digest").step == 1


@pytest.mark.long
def test_kills_at_many_moments_cost_nothing_on_the_same_node(options, root, stored, tmp_path):
    nvme = tmp_path / "nvme"
    assert run(options, root, nvme, 2)["restored"] == 0
    seen = set()
    for kill_after_s in (0.02, 0.05, 0.1, 0.2, 0.4):
        before = find_latest_valid(root, storage_options=options).step
        run(options, root, nvme, 1, kill_after_s)
        on_slow = find_latest_valid(root, storage_options=options).step
        local = find_latest_valid(root, storage_options=options, staging_dir=nvme).step
        assert before <= on_slow <= local <= before + 1
        again = run(options, root, nvme, 0)
        assert (again["restored"], again["right"]) == (local, True)
        found = find_latest_valid(root, storage_options=options, depth="digest")
        assert found.step == local
        # Killed before its save was whole: the right to commit stays as long as it may be alive.
        left = {step_folder(local + 1)} if local == before else set()
        assert {one.name for one in found.rejected} <= left
        for name in left:
            files = [file for file in stored(root) if file.startswith(f"{name}/")]
            assert [file for file in files if not file.endswith(".tmp")] == []
        seen.add((on_slow - before, local - before))
        print(kill_after_s, "s:", before, on_slow, local, again)
    assert (0, 1) in seen, "no kill fell into an upload"
    elsewhere = run(options, root, tmp_path / "new node", 1)
    assert (elsewhere["restored"], elsewhere["right"]) == (local, True)
    assert len({name.split("/")[0] for name in stored(root) if name.endswith(".metadata")}) == 2
