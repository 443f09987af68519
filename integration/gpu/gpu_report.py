"""What a run of `scripts/gpu_check` found: printed as it goes, kept as JSON after every result."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
SCHEMA = "dcp_checkfreq.gpu/1"
OK, FAILED, SKIPPED = "ok", "failed", "skipped"

Facts = dict[str, Any]


class Skipped(Exception):
    """This cannot be tried here; the text says why."""


@dataclass(slots=True)
class Result:
    """One check or measurement."""

    name: str
    what: str  # the promise, or what is measured
    outcome: str
    text: str  # the reason, if it was not ok
    seconds: float
    facts: Facts = field(default_factory=dict)


class Report:
    """Runs checks and measurements, each in its own try, and keeps what came of them.

    Args:
        header: of the JSON.
        path: where to write it; None: nowhere.
        budget_s: measurements that would begin later than this are skipped.
    """

    def __init__(self, header: Facts, path: Path | None, budget_s: float) -> None:
        self._header = header
        self._path = path
        self._begun_s = time.monotonic()
        self._budget_s = budget_s
        self.checks: list[Result] = []
        self.measurements: list[Result] = []

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left; less than 0 if it is spent."""
        return self._budget_s - (time.monotonic() - self._begun_s)

    @property
    def exit_code(self) -> int:
        """1 if a promise was broken. A measurement that failed breaks none."""
        return int(any(one.outcome == FAILED for one in self.checks))

    def check(self, name: str, what: str, run: Callable[[], Facts | None]) -> None:
        """Run a correctness check: it raises if the promise is broken."""
        self._add(self.checks, name, what, run)

    def measure(
        self, name: str, what: str, run: Callable[[], Facts | None], needs_s: float
    ) -> None:
        """Run a measurement, if ``needs_s`` of the budget are left for it."""
        if self.left_s < needs_s:
            text = f"{self.left_s:.0f} s of the budget are left, it needs about {needs_s:.0f} s"
            self._keep(self.measurements, Result(name, what, SKIPPED, text, 0.0))
            return
        self._add(self.measurements, name, what, run)

    def _add(
        self, results: list[Result], name: str, what: str, run: Callable[[], Facts | None]
    ) -> None:
        say(f"... {name}: {what}")
        begun_s = time.monotonic()
        facts: Facts = {}
        outcome, text = OK, ""
        try:
            facts = run() or {}
        except Skipped as why:
            outcome, text = SKIPPED, str(why)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  DCP's own error is a BaseException
            outcome, text = FAILED, f"{type(error).__name__}: {error}"
            say(traceback.format_exc())
        seconds = time.monotonic() - begun_s
        self._keep(results, Result(name, what, outcome, text, round(seconds, 3), facts))

    def _keep(self, results: list[Result], result: Result) -> None:
        results.append(result)
        say(f"{result.outcome.upper():8}{result.name} ({result.seconds:.1f} s) {result.text}")
        for key, value in result.facts.items():
            if not isinstance(value, (list, dict)):
                say(f"          {key}: {shown(value)}")
        self.write(finished=False)

    def write(self, *, finished: bool) -> None:
        """Write all that is known, so that a run that is killed leaves what it had."""
        if self._path is None:
            return
        document = {
            "schema": SCHEMA,
            **self._header,
            "seconds": round(time.monotonic() - self._begun_s, 1),
            "finished": finished,
            "exit_code": self.exit_code,
            "checks": [asdict(one) for one in self.checks],
            "measurements": [asdict(one) for one in self.measurements],
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._path.with_suffix(".tmp")
        scratch.write_text(json.dumps(document, indent=1, default=str) + "\n")
        scratch.replace(self._path)

    def summary(self) -> str:
        """Return one line for each kind of result."""
        lines = []
        for title, results in (("checks", self.checks), ("measurements", self.measurements)):
            counts = ", ".join(
                f"{sum(one.outcome == outcome for one in results)} {outcome}"
                for outcome in (OK, FAILED, SKIPPED)
            )
            lines.append(f"{title}: {counts}")
        lines += [f"FAILED  {one.name}: {one.text}" for one in self.checks if one.outcome == FAILED]
        return "\n".join(lines)


def say(text: str) -> None:
    """Print at once: a run that is killed still tells how far it came."""
    print(text, flush=True)


def shown(value: object) -> str:
    """Return a fact as text, floats with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def file_name(device_name: str) -> str:
    """Return the name of the report: ``gpu-nvidia-h200.json`` for "NVIDIA H200"."""
    plain = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return f"gpu-{plain or 'unknown'}.json"


def describe(device: torch.device, folder: Path, *, quick: bool, command: list[str]) -> Facts:
    """Return what the run was made with."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "quick": quick,
        # A copy of the tree may have no history: then both are null.
        "git": {"hash": _git("rev-parse", "HEAD"), "dirty": _dirty()},
        "machine": {
            "device": device_name(device),
            "gpu_bytes": (
                torch.cuda.get_device_properties(device).total_memory
                if device.type == "cuda"
                else None
            ),
            "gpus": torch.cuda.device_count() if device.type == "cuda" else 0,
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "kernel": platform.release(),
            "folder": str(folder),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
    }


def device_name(device: torch.device) -> str:
    """Return the name that the driver gives the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu dry run"


def _dirty() -> bool | None:
    changes = _git("status", "--porcelain")
    return None if changes is None else bool(changes)


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
