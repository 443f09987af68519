"""Start one launch of the main job under torchrun, kill it in the middle of a save, read its logs.

The kill comes from outside: this process watches the checkpoint folder, and when the newest step
has shard files and no `.metadata`, a save is in flight and the ranks get SIGKILL.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verdict import ALL_RANKS, Kill, Killed, Launch, Outcome, StepRecord

HERE = Path(__file__).resolve().parent
POLL_S = 0.001
STEP_FOLDER = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The folder of a step that has shard files and no `.metadata`."""

    step: int
    files: frozenset[str]


class LaunchFailed(RuntimeError):
    """A launch ended in another way than planned. Its output is in the text."""


def run_launch(
    launch: Launch, *, root: Path, folder: Path, train_flags: list[str], limit_s: float
) -> Outcome:
    folder.mkdir(parents=True)
    newest_whole = newest_published(root)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--local-addr", "127.0.0.1", "--nproc-per-node", str(launch.ranks)),
        *(str(HERE / "train.py"), "--root", str(root), "--journal", str(folder)),
        *train_flags,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started_s = time.monotonic()
    until_s = started_s + limit_s
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            killed_in = watch(process, launch, root=root, folder=folder, until_s=until_s)
            process.wait(timeout=max(1.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise LaunchFailed(f"not finished after {limit_s:.0f} s\n{tail(folder)}") from None
        finally:
            if process.poll() is None:
                end(process, folder, launch.ranks)
    wall_s = time.monotonic() - started_s

    if launch.kill is None and process.returncode != 0:
        raise LaunchFailed(f"exit code {process.returncode}\n{tail(folder)}")
    if launch.kill is not None and killed_in is None:
        raise LaunchFailed(
            f"ended (exit code {process.returncode}) before a save of step {launch.kill.from_step} "
            f"or later was seen in flight\n{tail(folder)}"
        )
    killed = None
    if launch.kill is not None and killed_in is not None:
        killed = after_death(root, killed_in, launch.kill)
    return read_outcome(launch, folder, killed, newest_whole, wall_s)


def watch(
    process: subprocess.Popen[bytes], launch: Launch, *, root: Path, folder: Path, until_s: float
) -> Unfinished | None:
    """Wait until the launch ends, or kill its ranks while a save is certainly in flight."""
    if launch.kill is None:
        process.wait(timeout=max(1.0, until_s - time.monotonic()))
        return None
    left_before = newest_unfinished(root)
    while process.poll() is None:
        unfinished = newest_unfinished(root)
        if unfinished is not None and is_new(unfinished, left_before, launch.kill.from_step):
            pids = [read_pid(folder, rank) for rank in range(launch.ranks)]
            # Held still while it is looked again: on a busy machine the save may have ended.
            send(pids, signal.SIGSTOP)
            still = newest_unfinished(root)
            if still is not None and still.step == unfinished.step:
                victims = pids if launch.kill.victim is None else [pids[launch.kill.victim]]
                send(victims, signal.SIGKILL)
                send([pid for pid in pids if pid not in victims], signal.SIGCONT)
                return still
            send(pids, signal.SIGCONT)
        if time.monotonic() > until_s:
            raise subprocess.TimeoutExpired(process.args, until_s)
        time.sleep(POLL_S)
    return None


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def is_new(unfinished: Unfinished, left_before: Unfinished | None, from_step: int) -> bool:
    if unfinished.step < from_step:
        return False
    if left_before is None or unfinished.step != left_before.step:
        return True
    return bool(unfinished.files - left_before.files)  # the same step is being saved again


def after_death(root: Path, unfinished: Unfinished, kill: Kill) -> Killed:
    step_folder = root / f"step_{unfinished.step:08d}"
    left = [path for path in step_folder.iterdir() if path.name in unfinished.files]
    return Killed(
        saving_step=unfinished.step,
        victim=ALL_RANKS if kill.victim is None else f"rank {kill.victim}",
        files_seen=len(unfinished.files),
        files_left=len(left),
        bytes_left=sum(size_bytes(path) for path in left),
        published=(step_folder / ".metadata").exists(),
    )


def end(process: subprocess.Popen[bytes], folder: Path, ranks: int) -> None:
    """Stop a launch that is to be given up, torchrun first: it takes its ranks with it."""
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        for rank in range(ranks):
            try:
                os.kill(read_pid(folder, rank), signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError):
                continue
        process.wait()


# --- what is on storage


def step_folders(root: Path) -> dict[int, set[str]]:
    """Return the names in each step's folder, by step."""
    found: dict[int, set[str]] = {}
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return found
    for name in names:
        if matched := STEP_FOLDER.fullmatch(name):
            try:
                found[int(matched[1])] = set(os.listdir(root / name))
            except FileNotFoundError:  # retention removed it since
                continue
    return found


def newest_unfinished(root: Path) -> Unfinished | None:
    # only the newest step: an older one without `.metadata` may be on its way out by retention
    folders = step_folders(root)
    if not folders:
        return None
    step = max(folders)
    files = frozenset(name for name in folders[step] if name.endswith(".distcp"))
    if (
        not any(size_bytes(root / f"step_{step:08d}" / name) for name in files)
        or ".metadata" in folders[step]
    ):
        return None
    return Unfinished(step, files)


def size_bytes(path: Path) -> int:
    """Return what the file takes on storage: of a file that is being written, what is there yet."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def newest_published(root: Path) -> int | None:
    whole = [step for step, names in step_folders(root).items() if ".metadata" in names]
    return max(whole, default=None)


# --- what the ranks wrote


def read_log(folder: Path, rank: int) -> list[dict[str, Any]]:
    text = (folder / f"rank{rank}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def read_pid(folder: Path, rank: int) -> int:
    return int(read_log(folder, rank)[0]["pid"])


def read_outcome(
    launch: Launch, folder: Path, killed: Killed | None, newest_whole: int | None, wall_s: float
) -> Outcome:
    logs = [read_log(folder, rank) for rank in range(launch.ranks)]
    starts = [line for log in logs for line in log if "restored" in line]
    if len(starts) != launch.ranks or len({line["restored"] for line in starts}) != 1:
        raise LaunchFailed(f"the ranks did not start from one step: {starts}\n{tail(folder)}")
    by_rank = [{line["step"]: line for line in log if "step" in line} for log in logs]
    steps = {}
    for step in sorted(set.intersection(*(set(lines) for lines in by_rank))):
        lines = [lines[step] for lines in by_rank]
        if len({line["loss"] for line in lines}) != 1:
            raise LaunchFailed(f"step {step}: the ranks do not agree about the loss")
        ids = tuple((epoch, sample) for line in lines for epoch, sample in line["ids"])
        steps[step] = StepRecord(lines[0]["loss"], ids)
    return Outcome(
        ranks=launch.ranks,
        restored=starts[0]["restored"],
        newest_whole=newest_whole,
        restore_s=max(line["restore_s"] for line in starts),
        last_step=max((step for lines in by_rank for step in lines), default=0),
        killed=killed,
        wall_s=wall_s,
        steps=steps,
        finish=next((line for line in logs[0] if "finished" in line), None),
    )


def tail(folder: Path, lines: int = 40) -> str:
    text = (folder / "output.txt").read_text(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
