"""Start a job, kill -9 it at a given moment, start it again: what a cluster does to a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job import JobSpec

JOB = Path(__file__).with_name("job.py")
POLL_S = 0.002
LIMIT_S = 120.0


class LaunchFailed(RuntimeError):
    """A launch ended in another way than planned. Its output is in the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL to all ranks, ``after_s`` behind a moment.

    The moment: ``steps`` steps beyond the step that the launch went on from were done, and step
    ``not_before``; with 0, the training loop began.
    """

    steps: int = 0
    not_before: int = 0
    after_s: float = 0.0


@dataclass(slots=True)
class Launch:
    """What one launch did. Times are of the monotonic clock."""

    started_s: float
    ready_s: float  # the ranks run, and turn to the checkpoints
    loop_s: float  # the training loop begins
    restored: int | None
    find_s: float
    restore_s: float  # finding included
    steps: list[dict[str, Any]]  # rank 0's lines
    others: list[list[dict[str, Any]]]  # the same of the other ranks
    killed_s: float | None
    ended_s: float  # the supervisor knows that it has ended
    finished_s: float | None  # all steps are done, and saved what was under way
    final_loss: float | None

    @property
    def start_step(self) -> int:
        return self.restored or 0

    @property
    def last_step(self) -> int:
        return self.steps[-1]["step"] if self.steps else self.start_step

    def fields(self) -> dict[str, Any]:
        """Return it as plain values; of the steps only what a reader can use."""
        return {
            "restored": self.restored,
            "last_step": self.last_step,
            "started_s": self.started_s,
            "ready_s": self.ready_s,
            "loop_s": self.loop_s,
            "find_s": self.find_s,
            "restore_s": self.restore_s,
            "killed_s": self.killed_s,
            "ended_s": self.ended_s,
            "final_loss": self.final_loss,
            "finished_s": self.finished_s,
            "steps_at_s": [line["at_s"] for line in self.steps],
            "interval_steps": [line["interval_steps"] for line in self.steps],
        }


def run_launch(spec: JobSpec, *, ranks: int, kill: Kill | None, folder: Path) -> Launch:
    """Run one launch to its end, or until it is killed.

    Returns a launch with ``killed_s`` None if it ended before the kill was due.

    Raises:
        LaunchFailed: it failed by itself, or took longer than LIMIT_S.
    """
    folder.mkdir(parents=True)
    spec_path = folder / "spec.json"
    spec.dump(spec_path)
    command = [sys.executable, str(JOB), str(spec_path)]
    if ranks > 1:
        command[1:1] = [
            "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
            f"--nproc-per-node={ranks}",
        ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started_s = time.monotonic()
    journals = [Journal(Path(spec.journal, f"rank{rank}.jsonl")) for rank in range(ranks)]
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            killed_s = _watch(process, journals, kill, until_s=started_s + LIMIT_S)
            code = process.wait(timeout=LIMIT_S)
            ended_s = time.monotonic()
        except subprocess.TimeoutExpired:
            raise LaunchFailed(f"not finished after {LIMIT_S:.0f} s\n{_tail(folder)}") from None
        finally:
            if process.poll() is None:
                _end(process, journals)
    if killed_s is None and code != 0:
        raise LaunchFailed(f"exit code {code}\n{_tail(folder)}")
    return _read(journals, started_s=started_s, killed_s=killed_s, ended_s=ended_s)


class Journal:
    """Reads the whole lines of one rank's file, as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self.lines: list[dict[str, Any]] = []

    def poll(self) -> list[dict[str, Any]]:
        """Return all lines of this launch so far."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return self.lines
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.lines += [json.loads(line) for line in whole.splitlines()]
        return self.lines

    def find(self, key: str) -> dict[str, Any] | None:
        return next((line for line in self.poll() if key in line), None)


def _watch(
    process: subprocess.Popen[bytes], journals: list[Journal], kill: Kill | None, *, until_s: float
) -> float | None:
    if kill is None:
        process.wait(timeout=max(0.0, until_s - time.monotonic()))
        return None
    while process.poll() is None:
        moment_s = _moment(journals[0], kill)
        if moment_s is not None:
            time.sleep(max(0.0, moment_s + kill.after_s - time.monotonic()))
            pids = [line["pid"] for journal in journals if (line := journal.find("pid"))]
            if process.poll() is not None or journals[0].find("finished"):
                return None  # it was faster
            killed_s = time.monotonic()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            return killed_s
        if time.monotonic() > until_s:
            raise subprocess.TimeoutExpired(process.args, LIMIT_S)
        time.sleep(POLL_S)
    return None


def _moment(journal: Journal, kill: Kill) -> float | None:
    began = journal.find("restored")
    if began is None:
        return None
    if not kill.steps:
        return began["at_s"]
    target = max((began["restored"] or 0) + kill.steps, kill.not_before)
    reached = (line for line in journal.lines if line.get("step", -1) >= target)
    return next((line["at_s"] for line in reached), None)


def _end(process: subprocess.Popen[bytes], journals: list[Journal]) -> None:
    """Give a launch up: torchrun takes its ranks with it; a rank that stays is killed."""
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        for journal in journals:
            if (line := journal.find("pid")) is not None:
                try:
                    os.kill(line["pid"], signal.SIGKILL)
                except ProcessLookupError:
                    continue


def _read(
    journals: list[Journal], *, started_s: float, killed_s: float | None, ended_s: float
) -> Launch:
    ready, began = journals[0].find("ready"), journals[0].find("restored")
    if ready is None or began is None:
        raise LaunchFailed("it ended before it had restored")
    by_rank = [[line for line in journal.poll() if "step" in line] for journal in journals]
    finished = journals[0].find("finished")
    return Launch(
        started_s=started_s,
        ready_s=ready["at_s"],
        loop_s=began["at_s"],
        restored=began["restored"],
        find_s=began["find_s"],
        restore_s=began["restore_s"],
        steps=by_rank[0],
        others=by_rank[1:],
        killed_s=killed_s,
        ended_s=ended_s,
        finished_s=finished["at_s"] if finished else None,
        final_loss=finished["loss"] if finished else None,
    )


def _tail(folder: Path, lines: int = 120) -> str:
    text = (folder / "output.txt").read_text(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
