"""A job that is killed at random moments and goes on with other ranks trains each item once."""

import itertools
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from data_job import EPOCHS, EVERY, ITEMS
from forked_ranks import ForkedRanks, free_port

pytestmark = [
    pytest.mark.dist,
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

JOB = Path(__file__).with_name("data_job.py")
# Ranks, batch size, workers of each launch. The last one runs to the end.
LAUNCHES = [(4, 3, 0), (2, 5, 1), (3, 4, 0)]
MORE_LAUNCHES = [*LAUNCHES, (2, 7, 0), (4, 3, 0)]


class Launch:
    """One launch of the job."""

    def __init__(self, folder, number, ranks, batch_size, workers):
        self.folder, self.number, self.ranks = folder, number, ranks
        self.out = folder / f"out-{number}"
        self.out.mkdir()
        arguments = [folder, number, batch_size, workers]
        self.job = ForkedRanks(
            JOB, ranks, arguments, self.out, timeout_s=300, MASTER_PORT=str(free_port())
        )

    def lines(self, rank):
        path = self.folder / f"log-{self.number}-{rank}"
        # The last piece is a line that the rank was killed in, or nothing.
        return [line.split() for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def wait_for_steps(self, steps, timeout_s=120):
        """Wait until rank 0 has trained so many steps in this launch, or all there are."""
        end_s = time.monotonic() + timeout_s
        while len(self.lines(0)) <= steps and self.job.is_running():
            assert time.monotonic() < end_s, self.output()
            time.sleep(0.005)

    def kill(self, rng):
        """Kill some of the ranks, and a moment later the rest."""
        pids = [
            int((self.folder / f"pid-{self.number}-{rank}").read_text())
            for rank in range(self.ranks)
        ]
        rng.shuffle(pids)
        first = rng.randint(1, self.ranks)
        for number, pid in enumerate(pids):
            if number == first:
                time.sleep(rng.random() * 0.2)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                assert number >= first, self.output()  # it has noticed that another one is gone
        assert -signal.SIGKILL in self.job.wait()

    def output(self):
        return "".join(path.read_text(errors="replace")[-5000:] for path in self.out.iterdir())

    @property
    def restored(self):
        steps = {self.lines(rank)[0][1] for rank in range(self.ranks)}
        assert len(steps) == 1, "the ranks restored different steps"
        return int(steps.pop())

    def random_states(self):
        """Return (rank, step) to the rank's random state at the end of that step."""
        return {
            (rank, int(line[0])): line[1]
            for rank in range(self.ranks)
            for line in self.lines(rank)[1:]
            if line != ["done"]
        }

    def samples(self):
        """Yield (step, epoch, item, draw) of all ranks."""
        for rank in range(self.ranks):
            for line in self.lines(rank)[1:]:
                if line == ["done"]:
                    continue
                step, _, epoch, *pairs = line
                for pair in pairs:
                    item, draw = pair.split(":")
                    yield int(step), int(epoch), int(item), draw


@pytest.mark.parametrize(
    ("seed", "planned"),
    [
        (1, LAUNCHES),
        pytest.param(1, MORE_LAUNCHES, marks=pytest.mark.long),
        pytest.param(2, MORE_LAUNCHES, marks=pytest.mark.long),
    ],
)
def test_killed_at_random_moments_on_changing_ranks_each_item_counts_once(tmp_path, seed, planned):
    rng = random.Random(seed)
    launches = []
    for number, shape in enumerate(planned):
        launch = Launch(tmp_path, number, *shape)
        launches.append(launch)
        with launch.job:
            if number < len(planned) - 1:
                launch.wait_for_steps(rng.randint(2 * EVERY + 1, 13))
                time.sleep(rng.random() * 0.1)
                launch.kill(rng)
            else:
                assert launch.job.wait() == [0] * launch.ranks, launch.output()
    restored = [launch.restored for launch in launches]
    assert restored[0] == 0
    assert restored == sorted(restored)
    assert restored[-1] > 0
    # A step counts if the run went on from it or from a later one; the rest was lost with the kill.
    counts_up_to = [*restored[1:], 10**9]
    counted = Counter(
        (epoch, item)
        for launch, limit in zip(launches, counts_up_to, strict=True)
        for step, epoch, item, _ in launch.samples()
        if step <= limit
    )
    assert counted == Counter((e, item) for e in range(EPOCHS) for item in range(ITEMS))
    # Each rank goes on with its own random states.
    for before, launch in itertools.pairwise(launches):
        for rank in range(min(before.ranks, launch.ranks)):
            saved = before.random_states().get((rank, launch.restored))
            if saved is not None:  # else nothing was saved since an earlier launch
                assert launch.lines(rank)[0][2] == saved
    # One that is new draws what no other does, nor it at the start.
    for before, launch in itertools.pairwise(launches):
        states = [launch.lines(rank)[0][2] for rank in range(launch.ranks)]
        assert len(set(states)) == launch.ranks
        assert launches[0].lines(0)[0][2] not in states[before.ranks :]
    # What was trained twice, because its step was lost, looked the same both times.
    looks = {}
    for launch in launches:
        for _, epoch, item, draw in launch.samples():
            assert looks.setdefault((epoch, item), draw) == draw
    assert len(set(looks.values())) == len(looks)
