"""Jobs over Parquet and tar shards that are killed and go on with other ranks: each item once."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked_ranks import ForkedRanks, free_port
from shard_job import EPOCHS, EVERY, ITEMS
from stream_tools import write_shards

pytestmark = [
    pytest.mark.dist,
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

JOB = Path(__file__).with_name("shard_job.py")
# Ranks, batch size, workers of each launch; 5 ranks do not divide the 12 lanes.
LAUNCHES = [(4, 3, 0), (2, 5, 1), (5, 2, 0)]
MORE_LAUNCHES = [*LAUNCHES, (3, 4, 0)]

HOLD = 14  # steps of a launch that is to be killed


def lines(folder, number, rank):
    path = folder / f"log-{number}-{rank}"
    # The last piece is a line that the rank was killed in, or nothing.
    return [line.split() for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def run(folder, number, shape, kind, rng, *, kill):
    ranks, batch_size, workers = shape
    arguments = [folder, number, kind, batch_size, workers, HOLD if kill else 0]
    out = folder / f"out-{number}"
    out.mkdir()
    with ForkedRanks(
        JOB, ranks, arguments, out, timeout_s=240, MASTER_PORT=str(free_port())
    ) as job:
        steps = rng.randint(2 * EVERY + 1, HOLD - 3) if kill else 10**9
        while len(lines(folder, number, 0)) <= steps and job.is_running():
            time.sleep(0.01)
        if kill:
            time.sleep(rng.random() * 0.1)
            assert os.path.exists(f"/proc/{job.pids[0]}"), said(out)
            job.kill()
        codes = job.wait()
    assert codes[0] == (-signal.SIGKILL if kill else 0), said(out)
    assert all((code == 0) == (not kill) for code in codes), said(out)


def said(out):
    return "".join(path.read_text(errors="replace")[-3000:] for path in sorted(out.iterdir()))


@pytest.mark.parametrize(
    ("kind", "launches"),
    [
        ("parquet", LAUNCHES),
        pytest.param("parquet", MORE_LAUNCHES, marks=pytest.mark.long),
        pytest.param("tar", MORE_LAUNCHES, marks=pytest.mark.long),
    ],
)
def test_killed_at_random_moments_on_changing_ranks_each_item_counts_once(tmp_path, kind, launches):
    data = tmp_path / "data"
    data.mkdir()
    if kind == "parquet":
        for first in range(0, ITEMS, 50):
            ids = list(range(first, min(first + 50, ITEMS)))
            pq.write_table(pa.table({"id": ids}), data / f"{first:03}.parquet", row_group_size=9)
    else:
        write_shards(data, [40, 13, 50, 1, 60, 39], "tar")
    rng = random.Random(kind)
    for number, shape in enumerate(launches):
        run(tmp_path, number, shape, kind, rng, kill=number < len(launches) - 1)
    restored = []
    for number, (ranks, _, _) in enumerate(launches):
        (step,) = {lines(tmp_path, number, rank)[0][1] for rank in range(ranks)}
        restored.append(int(step))
    assert restored[0] == 0 < restored[1]
    assert restored == sorted(restored)
    # A step counts if the run went on from it or from a later one; the rest was lost with the kill.
    counted = Counter()
    for number, limit in enumerate([*restored[1:], 10**9]):
        for rank in range(launches[number][0]):
            for line in lines(tmp_path, number, rank)[1:]:
                if line != ["done"] and int(line[0]) <= limit:
                    counted.update((int(line[1]), int(item)) for item in line[2:])
    assert counted == Counter((e, item) for e in range(EPOCHS) for item in range(ITEMS))
