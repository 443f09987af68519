"""Starts `worker.py` as a gloo job of several processes and collects what its ranks say."""

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
            + (run / f"{rank}.log").read_text(errors="replace")[-3000:]
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
    """Run a process for each rank, with its output in ``folder``; return their exit codes."""
    environment = os.environ | {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    server = the_server()
    pids = []
    try:
        asked = [ranks, arguments, environment, str(folder), timeout_s]
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        pids = json.loads(server.stdout.readline())
        return json.loads(server.stdout.readline())
    except BaseException:  # a timeout of the test: the next one shall find nothing of it
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        end_server()
        raise


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
