"""Each benchmark: which worker groups run, on which folder, and the report they add up to."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arms_async import ASYNC_ARMS
from arms_load import LOAD_ARMS
from arms_save import SAVE_ARMS
from harness import may_drop_caches
from jobs_call import CALL_ARMS
from jobs_convert import CONVERT_ARMS
from launch import merge, run_workers
from machine import REPOSITORY
from report import make_report
from spec import Samples, Spec

PLACES = {"disk": REPOSITORY / "out" / "bench", "tmpfs": Path("/dev/shm")}
Report = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a command line asks for."""

    state: str
    scale: str
    place: str
    folder: Path | None  # instead of the place's own
    ranks: int
    repeats: int
    arms: str  # comma-separated; empty: all
    seed: int

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a fresh folder at the place; it is removed with all that was saved there."""
        parent = self.folder or PLACES[self.place]
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="checkfreq-bench-", dir=parent) as name:
            yield Path(name).resolve()

    def pick(self, known: Iterable[str]) -> tuple[str, ...]:
        """Return the arms to run.

        Raises:
            ValueError: one was asked for that is not known.
        """
        known = tuple(known)
        asked = tuple(self.arms.split(",")) if self.arms else known
        if unknown := set(asked) - set(known):
            raise ValueError(f"no such arm: {sorted(unknown)}; known: {', '.join(known)}")
        return asked

    def spec(self, job: str, folder: Path, arms: tuple[str, ...], **other: Any) -> Spec:
        """Return a job of these options; ``other`` fields win over them."""
        fields = {"ranks": self.ranks, "repeats": self.repeats} | other
        return Spec(
            job=job, state=self.state, scale=self.scale, folder=str(folder), arms=arms,
            seed=self.seed, **fields,
        )  # fmt: skip

    def report(
        self, bench: str, case: str, folder: Path, result: dict[str, Any], *, cold: bool = False,
        more: dict[str, Any] | None = None,
    ) -> Report:  # fmt: skip
        """Return the report of one measured case; ``more`` goes to its config."""
        config = {
            "state": self.state, "scale": self.scale, "place": self.place, "case": case,
            "folder": str(folder), "repeats": self.repeats, "seed": self.seed, "cold": cold,
            **(more or {}),
        }  # fmt: skip
        return make_report(
            bench, result["samples"], config=config, state_bytes=int(result["bytes"]), folder=folder
        )


def save_bench(options: Options) -> list[Report]:
    """Blocking saves: a fresh process per arm for the memory, then all take turns in one group."""
    arms = options.pick(SAVE_ARMS)
    with options.scratch() as folder:
        result = run_workers(options.spec("save", folder, arms))
        for arm in arms:
            first = run_workers(options.spec("save_first", folder, (arm,)))
            merge(result["samples"], first["samples"])
        return [options.report("save", str(options.ranks), folder, result)]


def async_bench(options: Options) -> list[Report]:
    """Background saves: a fresh process per arm and repeat for the first one, then one for all."""
    arms = options.pick(ASYNC_ARMS)
    turns = [(arm,) for arm in arms for _ in range(options.repeats)]
    random.Random(options.seed).shuffle(turns)
    samples: Samples = {}
    with options.scratch() as folder:
        for turn in turns:
            merge(samples, run_workers(options.spec("async_first", folder, turn))["samples"])
        result = run_workers(options.spec("async_slowdown", folder, arms))
        merge(samples, result["samples"])
        result["samples"] = samples
        return [options.report("async", str(options.ranks), folder, result)]


def call_bench(options: Options) -> list[Report]:
    """Starts of saves, by number of tensors."""
    with options.scratch() as folder:
        result = run_workers(options.spec("call", folder, options.pick(CALL_ARMS)))
        return [options.report("call", str(options.ranks), folder, result)]


def convert_bench(options: Options) -> list[Report]:
    """Exports, and one tensor out of a checkpoint, from a cold page cache where permitted."""
    cold = options.place != "tmpfs" and may_drop_caches()
    with options.scratch() as folder:
        arms = options.pick(CONVERT_ARMS)
        result = run_workers(options.spec("convert", folder, arms, cold=cold))
        return [options.report("convert", "1", folder, result, cold=cold)]


def load_bench(options: Options) -> list[Report]:
    """Loads on as many ranks as saved."""
    case = str(options.ranks)
    return [_load(options, "load", case, options.ranks, options.ranks, options.pick(LOAD_ARMS))]


def reshard_bench(options: Options, cases: str) -> list[Report]:
    """Loads on other numbers of ranks; ``cases`` is like "4:2,2:4"."""
    arms = options.pick(name for name, arm in LOAD_ARMS.items() if arm.reshards)
    pairs = [tuple(int(ranks) for ranks in case.split(":")) for case in cases.split(",")]
    return [
        _load(options, "reshard", f"{saved}->{loaded}", saved, loaded, arms)
        for saved, loaded in pairs
    ]


def _load(
    options: Options, bench: str, case: str, saved: int, loaded: int, arms: tuple[str, ...]
) -> Report:
    """Save with one worker group, load with another."""
    cold = options.place != "tmpfs" and may_drop_caches()
    saved_by = tuple(dict.fromkeys(LOAD_ARMS[arm].saved_by for arm in arms))
    with options.scratch() as folder:
        run_workers(options.spec("prepare", folder, saved_by, ranks=saved))
        result = run_workers(options.spec("load", folder, arms, ranks=loaded, cold=cold))
        return options.report(bench, case, folder, result, cold=cold)
