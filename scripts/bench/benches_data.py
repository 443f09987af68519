"""The benchmark of the data loaders: which loads, how many workers, which arms."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from arms_data import DATA_ARMS
from benches import Options, Report
from launch import run_workers
from resumes_data import NEEDS, RESUME_ARMS

PACKAGES = ("torchdata", "mosaicml-streaming", "nvidia-dali-cuda120", "numpy", "pillow")
TORCH_ARMS = tuple(name for name, arm in DATA_ARMS.items() if not arm.dali)
# Each load is a process of its own; DALI's threads are not to be there when workers are forked.
LOADS = {
    "decode": TORCH_ARMS,
    "dali": tuple(name for name, arm in DATA_ARMS.items() if arm.dali),
    "trivial": TORCH_ARMS,
    "resume": tuple(RESUME_ARMS),
}


def data_bench(options: Options, workers: str) -> list[Report]:
    """Measure one load (``options.state``) with each number of workers, like "0,2".

    Raises:
        ValueError: an arm is not known, or no arm that was asked for can run here.
    """
    asked = options.pick(LOADS[options.state])
    skipped = {arm: reason for arm in asked if (reason := _missing(arm))}
    arms = tuple(arm for arm in asked if arm not in skipped)
    if not arms:
        raise ValueError(f"none of the arms can run here: {skipped}")
    job = "data_resume" if options.state == "resume" else "data"
    reports = []
    for count in (int(text) for text in workers.split(",")):
        with options.scratch() as folder:
            result = run_workers(options.spec(job, folder, arms, workers=count))
            more = {"case_of": "workers", "skipped": skipped, "peers": _versions()}
            reports.append(options.report("data", str(count), folder, result, more=more))
    return reports


def _versions() -> dict[str, str]:
    """Return the versions of what ours is compared with, where it is installed."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _missing(name: str) -> str | None:
    """Return why an arm cannot run here; None if it can."""
    needs = NEEDS.get(RESUME_ARMS[name][0]) if name in RESUME_ARMS else DATA_ARMS[name].needs
    if needs is None:
        return None
    try:
        import_module(needs)
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return None
