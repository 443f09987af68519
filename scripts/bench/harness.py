"""How anything is measured: rank group, cost meter, random order of the arms."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spec import Samples

DROP_CACHES = Path("/proc/sys/vm/drop_caches")


class Ranks:
    """The worker group; one process without torch.distributed when there is one rank."""

    def __init__(self, ranks: int) -> None:
        self.count = ranks
        if ranks > 1:
            dist.init_process_group("gloo", timeout=timedelta(seconds=600))
        self.rank = dist.get_rank() if ranks > 1 else 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.count > 1:
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, on every rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        """Leave the group."""
        if self.count > 1:
            dist.destroy_process_group()


def order(arms: Iterable[str], repeats: int, seed: int) -> Iterator[tuple[int, str]]:
    """Yield (round, arm): every arm once a round, shuffled anew each round.

    Round 0 is a warm-up. All ranks get the same order.
    """
    rng = random.Random(seed)
    for round_number in range(repeats + 1):
        shuffled = list(arms)
        rng.shuffle(shuffled)
        for arm in shuffled:
            yield round_number, arm


def measure(ranks: Ranks, call: Callable[[], None], *, cold: bool = False) -> dict[str, float]:
    """Run ``call`` on all ranks at once and return what it cost, the same on every rank.

    Wall time is that of the slowest rank, from a common start. CPU seconds (user + system, all
    threads) and read bytes (of system calls, cached or not) are sums over the ranks. The peak is
    the resident memory above what was resident before the call, on the worst rank.
    """
    gc.collect()
    _trim_heap()
    os.sync()  # no one else's dirty pages in the measured time
    ranks.barrier()
    if cold and ranks.rank == 0:
        DROP_CACHES.write_text("3")
    before_bytes = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    ranks.barrier()
    read_before, cpu_before, wall_before = _read_bytes(), cpu_s(), time.perf_counter()
    call()
    cost = {
        "wall_s": time.perf_counter() - wall_before,
        "cpu_s": cpu_s() - cpu_before,
        "syscall_read_bytes": _read_bytes() - read_before,
        "extra_peak_bytes": max(0, _status_bytes("VmHWM") - before_bytes),
    }
    costs = ranks.gather(cost)
    join = {"wall_s": max, "extra_peak_bytes": max, "cpu_s": sum, "syscall_read_bytes": sum}
    return {name: float(join[name](c[name] for c in costs)) for name in cost}


def record(samples: Samples, arm: str, cost: dict[str, float]) -> None:
    """Append one value per metric to an arm's samples."""
    for metric, value in cost.items():
        samples.setdefault(arm, {}).setdefault(metric, []).append(value)


def remove_folder(folder: Path, ranks: Ranks) -> None:
    """Remove a folder once every rank is done with it."""
    ranks.barrier()
    if ranks.rank == 0:
        shutil.rmtree(folder)
    ranks.barrier()


def cpu_s() -> float:
    """Return the CPU seconds of this process so far, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def may_drop_caches() -> bool:
    """Return whether this user may drop the page cache."""
    return os.access(DROP_CACHES, os.W_OK)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"/proc/self/status has no {field}")


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def _trim_heap() -> None:
    # memory that an earlier arm freed but malloc kept would hide in the next arm's baseline
    ctypes.CDLL("libc.so.6").malloc_trim(0)
