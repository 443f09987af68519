"""Starts a script as a gloo job of several processes; from `worker.py`, what its ranks say."""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

SERVER = Path(__file__).with_name("rank_server.py")
WORKER = Path(__file__).with_name("worker.py")
_servers = []  # the one that is running, if there is one


def start(ranks, folder, jobs, *, expect_death=(), timeout_s=150):
    """Run ``jobs``, in order, in one process group, and return ``{job: [answer of each rank]}``.

    An answer is ``{"value": ...}`` or ``{"error": class name, "text": ...}``. A rank that dies
    unexpectedly fails the calling test with the output of all of them; ``expect_death`` names
    ranks that must. ``folder`` is where jobs of one launch find what those of another left.
    """
    run = folder / f"run-{uuid.uuid4().hex[:8]}"
    run.mkdir(parents=True)
    codes = run_ranks(ranks, [str(run), str(folder), *jobs], run, timeout_s)
    died = [rank for rank, code in enumerate(codes) if code]
    if died != list(expect_death):
        logs = "\n".join(
            f"--- rank {rank}: exit {code}\n"
            + (run / f"{rank}.out").read_text(errors="replace")[-3000:]
            for rank, code in enumerate(codes)
        )
        raise AssertionError(f"ranks {died} died or hung\n{logs}")
    answers = {job: [] for job in jobs}
    for rank in range(ranks):
        path = run / f"{rank}.json"
        said = json.loads(path.read_text()) if path.exists() else {}
        for job in jobs:
            answers[job].append(said.get(job))
    return answers


def run_ranks(ranks, arguments, folder, timeout_s):
    """Run `worker.py` on each rank, with its output in ``folder``; return the exit codes."""
    with ForkedRanks(WORKER, ranks, arguments, folder, timeout_s=timeout_s) as job:
        return job.wait()


class ForkedRanks:
    """A script that runs on some ranks: each a process that has imported what it needs.

    For a ``with`` block, at whose end no rank is left. Output is in ``folder/RANK.out``. Ranks that
    run after ``timeout_s`` are killed. There is one such job at a time.
    """

    def __init__(self, script, ranks, arguments, folder, *, timeout_s=150, **environment):
        environment = os.environ | {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        self.codes, self._server = None, the_server()
        try:
            arguments = list(map(str, arguments))
            asked = [str(script), ranks, arguments, environment, str(folder), timeout_s]
            self._server.stdin.write(json.dumps(asked) + "\n")
            self._server.stdin.flush()
            self.pids = json.loads(self._server.stdout.readline())
        except BaseException:
            end_server()
            raise

    def wait(self):
        """Wait for all; return their exit codes. A death is minus its signal."""
        if self.codes is None:
            self.codes = json.loads(self._server.stdout.readline())
        return self.codes

    def is_running(self):
        """Whether any of them runs."""
        return self.codes is None and any(os.path.exists(f"/proc/{pid}") for pid in self.pids)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.codes is not None:
            return
        for pid in self.pids:
            with contextlib.suppress(OSError):  # it has ended
                status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if int(status[1]) == self._server.pid:
                    os.kill(pid, signal.SIGKILL)
        end_server()  # what it would say belongs to nobody


def the_server():
    if not _servers:
        # what libraries read when they are imported is as it is for the ranks
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        _servers.append(
            subprocess.Popen([sys.executable, str(SERVER)], env=environment, text=True, **pipes)
        )
        atexit.register(end_server)
    return _servers[0]


def end_server():
    while _servers:
        server = _servers.pop()
        server.stdin.close()
        server.kill()
        server.wait()
        server.stdout.close()


def values(answers):
    """Return every rank's value of one job; an error of any rank fails the calling test."""
    for rank, answer in enumerate(answers):
        assert answer is not None, f"rank {rank} gave no answer"
        assert "error" not in answer, f"rank {rank}: {answer.get('trace')}"
    return [answer["value"] for answer in answers]
