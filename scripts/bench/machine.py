"""What a run was made with: code, machine, versions."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "dcp-checkfreq", "safetensors", "fsspec")


def describe_code() -> dict[str, Any]:
    """Return the git hash and whether the working tree differs from it."""
    return {"hash": _git("rev-parse", "HEAD"), "dirty": bool(_git("status", "--porcelain"))}


def describe_machine(folder: Path) -> dict[str, Any]:
    """Return the machine, its load just now, and the file system that holds ``folder``."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    device, file_system, options = _mount_of(folder)
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": pages,
        "kernel": platform.release(),
        "file_system": file_system,
        "device": device,
        "mount_options": options,
        "load_average_1min": os.getloadavg()[0],
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that were measured."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _mount_of(folder: Path) -> tuple[str, str, str]:
    """Return (device, type, options) of the last mount that covers ``folder``."""
    found = ("unknown", "unknown", "")
    longest = -1
    for line in Path("/proc/mounts").read_text().splitlines():
        device, point, kind, options = line.split()[:4]
        if folder.resolve().is_relative_to(point) and len(point) >= longest:
            found, longest = (device, kind, options), len(point)
    return found
