"""Starts `worker.py` as a gloo job of several processes and collects what its ranks say."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")


def start(ranks, folder, jobs, *, expect_death=(), timeout_s=150):
    """Run ``jobs``, in order, in one process group, and return ``{job: [answer of each rank]}``.

    An answer is ``{"value": ...}`` or ``{"error": class name, "text": ...}``. A rank that dies
    unexpectedly fails the calling test with the output of all of them; ``expect_death`` names
    ranks that must. ``folder`` is where jobs of one launch find what those of another left.
    """
    run = folder / f"run-{uuid.uuid4().hex[:8]}"
    run.mkdir(parents=True)
    processes = []
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(WORKER), str(run), str(folder), *jobs]
        with open(run / f"{rank}.log", "wb") as log:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        for process in processes:
            process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
            process.wait()
    died = [rank for rank, process in enumerate(processes) if process.returncode]
    if died != list(expect_death):
        logs = "\n".join(
            f"--- rank {rank}: exit {process.returncode}\n"
            + (run / f"{rank}.log").read_text(errors="replace")[-3000:]
            for rank, process in enumerate(processes)
        )
        raise AssertionError(f"ranks {died} died or hung\n{logs}")
    answers = {job: [] for job in jobs}
    for rank in range(ranks):
        path = run / f"{rank}.json"
        said = json.loads(path.read_text()) if path.exists() else {}
        for job in jobs:
            answers[job].append(said.get(job))
    return answers


def values(answers):
    """Return every rank's value of one job; an error of any rank fails the calling test."""
    for rank, answer in enumerate(answers):
        assert answer is not None, f"rank {rank} gave no answer"
        assert "error" not in answer, f"rank {rank}: {answer.get('trace')}"
    return [answer["value"] for answer in answers]
