"""Figure 6 of CheckFreq, small: what an interrupted run learns, with and without a position."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from digits import write_digits
from training import Launch, launch

Raw = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train."""

    name: str
    resumable: bool
    interrupted: bool
    reshuffled: bool = False  # the ordinary iterator's seed is another at each launch


ARMS = (
    Arm("ours, uninterrupted", resumable=True, interrupted=False),
    Arm("ours, interrupted", resumable=True, interrupted=True),
    Arm("ordinary, uninterrupted", resumable=False, interrupted=False),
    Arm("ordinary, interrupted, one seed", resumable=False, interrupted=True),
    Arm("ordinary, interrupted, new seeds", resumable=False, interrupted=True, reshuffled=True),
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done."""

    files: int | None
    epochs: int
    batch_size: int
    save_every: int  # steps
    life_steps: float  # from one kill to the next, on average
    seeds: int


FULL = Scale(files=None, epochs=6, batch_size=16, save_every=10, life_steps=18, seeds=5)
QUICK = Scale(files=200, epochs=2, batch_size=16, save_every=3, life_steps=7, seeds=1)


class Runner:
    """Runs all arms; every launch is a process of its own, and every kill a real one."""

    def __init__(self, scale: Scale, folder: Path, first_seed: int) -> None:
        self._scale = scale
        self._folder = folder
        self._first_seed = first_seed
        # What forks from a server that has imported torch and DALI starts in no time. The server
        # finds our modules only by PYTHONPATH.
        here = str(Path(__file__).parent)
        os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["training"])

    def run(self, say: Any) -> list[Raw]:
        """Return one entry per arm and seed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        found = []
        with tempfile.TemporaryDirectory(prefix="figure6-", dir=self._folder) as folder:
            images = Path(folder) / "digits"
            write_digits(images)
            for seed in range(self._first_seed, self._first_seed + self._scale.seeds):
                for arm in ARMS:
                    run_folder = Path(folder) / "run"
                    run_folder.mkdir()
                    found.append(self._one(arm, seed, images, run_folder))
                    shutil.rmtree(run_folder)
                    say(f"{arm.name}, seed {seed}: {found[-1]['accuracy'][-1]:.3f}")
        return found

    def _one(self, arm: Arm, seed: int, images: Path, folder: Path) -> Raw:
        scale, lives, launches = self._scale, random.Random(seed), 0
        while not (folder / "end.json").exists():
            launches += 1
            # Longer than from save to save, so that each launch gets on.
            life = scale.save_every + 1 + int(lives.expovariate(1 / scale.life_steps))
            job = Launch(
                images=images,
                folder=folder,
                seed=seed,
                resumable=arm.resumable,
                shuffle_seed=seed + (1000 * launches if arm.reshuffled else 0),
                limit=scale.files,
                epochs=scale.epochs,
                batch_size=scale.batch_size,
                save_every=scale.save_every,
                dies_after=life if arm.interrupted else None,
            )
            process = self._processes.Process(target=launch, args=(job,))
            process.start()
            process.join()
            if process.exitcode not in (0, -signal.SIGKILL):
                raise RuntimeError(f"{arm.name}: a launch ended with {process.exitcode}")
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        end = json.loads((folder / "end.json").read_text())
        return {"arm": arm.name, "seed": seed, "launches": launches, **end} | judge(
            lines, scale.epochs
        )


def judge(lines: list[Raw], epochs: int) -> Raw:
    """Return what went into the weights: a step that was trained again counts as it was last."""
    by_step = {line["step"]: line for line in lines}
    steps = [by_step[step] for step in sorted(by_step)]
    examined = [line for line in steps if "accuracy" in line]
    per_epoch = len(steps) // epochs
    items = max(index for line in steps for index in line["indices"]) + 1
    lost, repeated = [], []
    times_of_all: Counter[int] = Counter()
    for epoch in range(epochs):
        of_epoch = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        times = Counter(index for line in of_epoch for index in line["indices"])
        lost.append(items - len(times))
        repeated.append(sum(count - 1 for count in times.values()))
        times_of_all += times
    return {
        "items": items,
        "trained_again_steps": len(lines) - len(steps),
        "accuracy": [line["accuracy"] for line in examined],
        "loss": [line["loss"] for line in examined],
        "lost": lost,
        "repeated": repeated,
        "fewest_times": min(times_of_all[index] for index in range(items)),
        "most_times": max(times_of_all.values()),
    }


def figures(raw: list[Raw]) -> dict[str, Raw]:
    """Return, by arm, what all seeds together say."""
    whole = {run["seed"]: run for run in raw if run["arm"] == ARMS[0].name}
    found = {}
    for arm in ARMS:
        runs = [run for run in raw if run["arm"] == arm.name]
        found[arm.name] = {
            "accuracy": spread([run["accuracy"][-1] for run in runs]),
            "loss": spread([run["loss"][-1] for run in runs]),
            "kills": spread([run["launches"] - 1 for run in runs]),
            "lost_per_epoch": mean(value for run in runs for value in run["lost"]),
            "repeated_per_epoch": mean(value for run in runs for value in run["repeated"]),
            "fewest_times": min(run["fewest_times"] for run in runs),
            "most_times": max(run["most_times"] for run in runs),
            "same_weights_as_uninterrupted": sum(
                run["weights"] == whole[run["seed"]]["weights"] for run in runs
            ),
            "runs": len(runs),
        }
    return found


def spread(values: list[float]) -> Raw:
    return {
        "values": values, "min": min(values), "median": median(values), "mean": mean(values),
        "max": max(values),
    }  # fmt: skip


def goals(found: dict[str, Raw]) -> list[Raw]:
    """Return what is promised of our iterator, and whether it was kept."""
    ours = found[ARMS[1].name]
    whole = found[ARMS[0].name]
    return [
        goal("interrupted runs with other weights than uninterrupted ones",
             ours["runs"] - ours["same_weights_as_uninterrupted"], 0),
        goal("items lost per epoch", ours["lost_per_epoch"], 0),
        goal("items repeated per epoch", ours["repeated_per_epoch"], 0),
        goal("accuracy lost by interruptions",
             whole["accuracy"]["mean"] - ours["accuracy"]["mean"], 0),
    ]  # fmt: skip


def goal(text: str, measured: float, at_most: float) -> Raw:
    return {"goal": text, "measured": measured, "at_most": at_most, "met": measured <= at_most}
