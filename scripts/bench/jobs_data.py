"""Jobs of the workers that load data: epochs at full speed, and resumes."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from arms_data import DATA_ARMS, Load, samples_of, state_bytes
from data_sets import write_images
from harness import Ranks, order, record
from resumes_data import PERCENTS, resume_arms
from spec import Samples, Spec

IMAGES = {"full": 256, "small": 24}
NUMBERS = {"full": 69_632, "small": 256}  # more than 65,536: our order is then the keyed one
BATCH = {"images": 32, "numbers": 64}


def data_job(spec: Spec, ranks: Ranks) -> dict[str, Any]:
    """Run whole epochs of each arm. ``spec.state`` is "decode", "dali" or "trivial".

    Loaders and their workers live as long as the job; the first epoch, which starts them, is not
    counted. Each epoch must hand out every sample.
    """
    torch.set_num_threads(1)  # as in workers; threads that wait by spinning would count as CPU
    load = _load(spec)
    samples: Samples = {}
    loaders: dict[str, Any] = {}
    for round_number, arm in order(spec.arms, spec.repeats, spec.seed):
        if arm not in loaders:
            loaders[arm] = DATA_ARMS[arm].open(load)
            size = _run_epoch(loaders[arm], load, look=True)
            if size:
                record(samples, arm, {"state_bytes": float(size)})
        cost = _measured_epoch(loaders[arm], load)
        if round_number:
            record(samples, arm, cost)
    size = sum(Path(path).stat().st_size for path in load.paths) if load.paths else 8 * load.length
    return {"samples": samples, "bytes": size}


def resume_job(spec: Spec, ranks: Ranks) -> dict[str, Any]:
    """Time new loaders to their first batch, from the begin and from positions in an epoch."""
    samples: Samples = {}
    arms = resume_arms(Path(spec.folder), spec.scale, spec.workers, spec.arms)
    for round_number, name in order(spec.arms, spec.repeats, spec.seed):
        arm = arms[name]
        for percent in (0, *PERCENTS):
            if percent and not arm.resumes:
                continue
            state = arm.state_at(percent) if percent else None
            gc.collect()
            start = time.perf_counter()
            loader = arm.open()
            if state is not None:
                loader.load_state_dict(state)
            batches = iter(loader)
            batch = next(batches)
            took_s = time.perf_counter() - start
            if round_number == 0:
                arm.check(batch, percent)
            elif state is None:
                record(samples, name, {"fresh_s": took_s})
            else:
                record(samples, name, {
                    f"at_{percent}_s": took_s, "resume_s": took_s,
                    "state_bytes": float(state_bytes(loader.state_dict())),
                })  # fmt: skip
            del batches, loader  # the workers end here
    return {"samples": samples, "bytes": 0}


def _load(spec: Spec) -> Load:
    folder = Path(spec.folder)
    is_images = spec.state != "trivial"
    count = (IMAGES if is_images else NUMBERS)[spec.scale]
    return Load(
        folder=folder,
        paths=write_images(folder / "images", count) if is_images else None,
        length=count,
        batch_size=min(count // 4, BATCH["images" if is_images else "numbers"]),
        workers=spec.workers,
    )


def _run_epoch(loader: Any, load: Load, *, look: bool = False) -> int:
    """Take every batch; return the size of the state after the first one if asked for."""
    count = size = 0
    for batch in loader:
        if look and count == 0 and hasattr(loader, "state_dict"):
            size = state_bytes(loader.state_dict())
        count += samples_of(batch)
    if count != load.length:
        raise RuntimeError(f"an epoch of {type(loader).__name__} had {count} of {load.length}")
    return size


def _measured_epoch(loader: Any, load: Load) -> dict[str, float]:
    gc.collect()
    cpu_before, start = _family_cpu_s(), time.perf_counter()
    _run_epoch(loader, load)
    wall_s = time.perf_counter() - start
    cpu_s = _family_cpu_s() - cpu_before
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "samples_per_s": load.length / wall_s,
        "cpu_us_per_sample": 1e6 * cpu_s / load.length,
    }


def _family_cpu_s() -> float:
    """Return the CPU seconds of this process and of those that it started and that still live.

    Those of the others are counted in steps of 10 ms.
    """
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + float(sum(spent.user + spent.system for spent in times))
