"""Starts a script as a gloo job of several processes; from `worker.py`, what its ranks say."""

import json
import uuid
from pathlib import Path

from forked_ranks import ForkedRanks

WORKER = Path(__file__).with_name("worker.py")


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


def values(answers):
    """Return every rank's value of one job; an error of any rank fails the calling test."""
    for rank, answer in enumerate(answers):
        assert answer is not None, f"rank {rank} gave no answer"
        assert "error" not in answer, f"rank {rank}: {answer.get('trace')}"
    return [answer["value"] for answer in answers]
