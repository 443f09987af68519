"""A real file system that is full or read-only. Needs root, to mount one."""

import json
import shutil
import subprocess
import sys

import pytest
from cache_tools import HERE, make_sources

KIB = 1024


def can_mount():
    if shutil.which("unshare") is None:
        return False
    script = "d=$(mktemp -d) && mount -t tmpfs -o size=64k tmpfs $d && umount $d; e=$?; rmdir $d; "
    done = subprocess.run(["unshare", "-m", "sh", "-c", script + "exit $e"], capture_output=True)
    return done.returncode == 0


@pytest.mark.skipif(not can_mount(), reason="a tmpfs cannot be mounted here: needs root")
@pytest.mark.parametrize("policy", ["keep", "lru"])
def test_a_full_or_read_only_disk_costs_hits_and_one_warning_but_no_request(tmp_path, policy):
    (tmp_path / "mount").mkdir()
    sources = make_sources(tmp_path / "slow", 8, 300 * KIB)  # three fit into 1 MiB
    done = subprocess.run(
        ["unshare", "-m", sys.executable, HERE / "volume_child.py", tmp_path / "mount", policy,
         *sources],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)

    full = results["full"]
    assert (full["wrong"], full["partials"]) == (0, 0)
    assert (full["misses"], full["hits"]) == (3, 9)
    assert full["fallbacks"] == {"disk full": 20}
    assert len(full["warned"]) == 1
    assert "No space left on device" in full["warned"][0]

    read_only = results["read-only"]
    assert (read_only["wrong"], read_only["misses"]) == (0, 0)
    assert read_only["hits"] == 4, "two copies are left, and they are served"
    assert read_only["fallbacks"] == {"permission": 12}
    assert len(read_only["warned"]) == 1

    fresh = results["fresh on read-only"]
    assert fresh["wrong"] == 0
    assert len(fresh["warned"]) == 1
