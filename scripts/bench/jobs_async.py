"""Worker jobs for `async`: how long training is blocked, and what the two do to each other."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

import torch

from arms_async import ASYNC_ARMS, Start
from harness import Ranks, cpu_s, measure, order, record, remove_folder
from spec import Samples, Spec
from states import State, build, leaves, local_bytes

PYTHON_STEP_S = 0.0025
MATMUL_STEP_S = 0.024
MATMUL_THREADS = 2
BASELINE_S = {"full": 1.0, "small": 0.05}

Step = Callable[[], None]


def first_job(spec: Spec, ranks: Ranks) -> dict[str, Any]:
    """Measure the first background save of a process, for the one arm of the spec."""
    (name,) = spec.arms
    state = build(leaves(spec.state, spec.scale), rank=ranks.rank, ranks=ranks.count, filled=True)
    folder = Path(spec.folder, f"{name}-first")
    start = ASYNC_ARMS[name]()
    blocked_s = []

    def whole_save() -> None:
        future, blocked = _blocked(start, state, folder)
        blocked_s.append(blocked)
        future.result()

    cost = measure(ranks, whole_save)
    first = {
        "first_blocked_s": max(ranks.gather(blocked_s[0])),
        "first_total_s": cost["wall_s"],
        # the snapshot itself is not counted: one rank's worth on every rank
        "first_extra_peak_bytes": max(0.0, cost["extra_peak_bytes"] - local_bytes(state)),
    }
    samples: Samples = {}
    record(samples, name, first)
    remove_folder(folder, ranks)
    return {"samples": samples, "bytes": sum(ranks.gather(local_bytes(state)))}


def slowdown_job(spec: Spec, ranks: Ranks) -> dict[str, Any]:
    """Measure later saves of a process: idle, under a Python loop and under a matmul loop.

    All arms live in this one process and take turns in random order. A loop runs alone just
    before and just after each save; the mean of the two is its baseline.
    """
    state = build(leaves(spec.state, spec.scale), rank=ranks.rank, ranks=ranks.count, filled=True)
    starts = {name: ASYNC_ARMS[name]() for name in spec.arms}
    torch.set_num_threads(MATMUL_THREADS if ranks.count == 1 else 1)
    loops: dict[str, Step | None] = {"idle": None, "py": _python_step(), "mm": _matmul_step()}
    turns = [f"{name}:{loop}" for name in spec.arms for loop in loops]
    samples: Samples = {}
    for number, (round_number, turn) in enumerate(order(turns, spec.repeats, spec.seed)):
        name, loop = turn.split(":")
        if not round_number and loop != "idle":
            continue  # one warm-up save an arm is enough
        gc.collect()
        folder = Path(spec.folder, f"{name}-{loop}-{number}")
        ranks.barrier()
        step = loops[loop]
        if step is None:
            cost = _idle_save(starts[name], state, folder)
        else:
            cost = _save_under(step, loop, starts[name], state, folder, BASELINE_S[spec.scale])
        costs = ranks.gather(cost)
        if round_number:
            record(samples, name, {key: max(c[key] for c in costs) for key in cost})
        remove_folder(folder, ranks)
    return {"samples": samples, "bytes": sum(ranks.gather(local_bytes(state)))}


def _idle_save(start: Start, state: State, folder: Path) -> dict[str, float]:
    cpu_before = cpu_s()
    future, blocked = _blocked(start, state, folder)
    returned = time.perf_counter()
    future.result()
    return {
        "blocked_s": blocked,
        "bg_idle_s": time.perf_counter() - returned,
        "cpu_s": cpu_s() - cpu_before,
    }


def _save_under(
    step: Step, loop: str, start: Start, state: State, folder: Path, baseline_s: float
) -> dict[str, float]:
    before_s = _step_s(step, baseline_s)
    future, _ = _blocked(start, state, folder)
    began, steps = time.perf_counter(), 0
    while not future.done() or not steps:
        step()
        steps += 1
    background_s = time.perf_counter() - began
    future.result()
    base_s = (before_s + _step_s(step, baseline_s)) / 2
    during_s = background_s / steps
    return {
        f"bg_{loop}_s": background_s,
        f"{loop}_step_x": during_s / base_s,
        f"{loop}_lost_s": background_s * (1 - base_s / during_s),
    }


def _blocked(start: Start, state: State, folder: Path) -> tuple[Future[Any], float]:
    began = time.perf_counter()
    future = start(state, folder)
    return future, time.perf_counter() - began


def _step_s(step: Step, at_least_s: float) -> float:
    began, steps = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < at_least_s or not steps:
        step()
        steps += 1
    return elapsed / steps


def _python_step() -> Step:
    def turns(count: int) -> None:
        total = 0
        for n in range(count):
            total += n & 7

    count = _calibrate(turns, PYTHON_STEP_S, first=10_000)
    return lambda: turns(count)


def _matmul_step() -> Step:
    left, right, out = torch.rand(512, 512), torch.rand(512, 512), torch.empty(512, 512)

    def turns(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right, out=out)

    count = _calibrate(turns, MATMUL_STEP_S, first=8)
    return lambda: turns(count)


def _calibrate(turns: Callable[[int], None], step_s: float, *, first: int) -> int:
    """Return how many turns take about ``step_s`` on an idle machine."""
    took_s = []
    for _ in range(9):
        began = time.perf_counter()
        turns(first)
        took_s.append(time.perf_counter() - began)
    return max(1, round(first * step_s / median(took_s)))
