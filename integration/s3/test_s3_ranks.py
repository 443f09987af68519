"""Several ranks on a real S3 server: what they ask it for, counted by the proxy in front of it."""

import json
import re
from pathlib import Path

import pytest
from forked_ranks import ForkedRanks, free_port
from servers import KEY, SECRET

pytestmark = [pytest.mark.slow, pytest.mark.dist]

JOB = Path(__file__).with_name("ranks_job.py")
SHARDED_BYTES, REPLICATED_BYTES = 3000 * 1024 * 4, 2000 * 1024 * 4


def run(ranks, what, root, endpoint, folder):
    """Run `ranks_job.py`; return what rank 0 has printed."""
    folder = folder / what
    folder.mkdir()
    environment = {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_PORT": str(free_port()),
    }
    with ForkedRanks(JOB, ranks, [what, root, endpoint], folder, **environment) as job:
        codes = job.wait()
    said = [(folder / f"{rank}.out").read_text(errors="replace") for rank in range(ranks)]
    assert codes == [0] * ranks, said
    return said[0]


def asked_bytes(proxy, step):
    """Return the bytes of all ranges of shards of a step that were asked for."""
    spans = [
        re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers["range"])
        for request in proxy.requests
        if f"/step_{step}/__" in request.path and request.method == "GET"
    ]
    return sum(int(span[2]) - int(span[1]) + 1 for span in spans)


def test_a_reshard_asks_only_for_what_it_needs_and_shared_reads_for_each_byte_once(
    proxy, root, tmp_path
):
    run(3, "save", root, proxy.endpoint, tmp_path)
    proxy.reset()
    told = json.loads(run(2, "load", root, proxy.endpoint, tmp_path).splitlines()[-1])
    assert all(right for rank in told for right, *_ in rank)
    resharded, shared = zip(*told, strict=True)
    assert sum(needed for _, needed, _, _ in resharded) == SHARDED_BYTES
    assert SHARDED_BYTES <= asked_bytes(proxy, 1) <= 1.05 * SHARDED_BYTES
    assert sum(read for _, _, read, _ in resharded) == asked_bytes(proxy, 1)
    # every rank needs all of the second one
    assert all(needed == REPLICATED_BYTES for _, needed, _, _ in shared)
    assert REPLICATED_BYTES <= asked_bytes(proxy, 2) <= 1.05 * REPLICATED_BYTES
    assert sum(read for _, _, read, _ in shared) == asked_bytes(proxy, 2)
    assert all(read + received >= needed for _, needed, read, received in shared)
