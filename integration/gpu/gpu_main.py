"""The entry of `scripts/gpu_check`: correctness first, then measurements, then the summary."""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import gpu_correct as correct
import gpu_correct_more as more
import gpu_measure as measure
import torch
from gpu_report import REPOSITORY, Report, describe, device_name, file_name, say
from gpu_site import Site

CHECKS = (
    ("stream order", correct.stream_order),
    ("never torn", correct.never_torn),
    ("seen without the guard", correct.seen_without_guard),
    ("never torn on storage", correct.never_torn_on_storage),
    ("unguarded state", correct.unguarded_state),
    ("lazy bits", correct.lazy_bits),
    ("changed in place", correct.changed_in_place),
    ("equal modes", correct.equal_modes),
    ("host is not blocked", correct.host_is_not_blocked),
    ("pinned and reused", more.pinned_and_reused),
    ("out of GPU memory", correct.out_of_gpu_memory),
    ("plain DCP", more.plain_dcp),
    ("restore order", more.restore_order),
    ("graphed step", more.graphed_step),
    ("FSDP2", more.sharded),
    ("bound NCCL group", more.bound_group),
    ("second GPU", more.second_gpu),
)

MEASUREMENTS = (  # what it needs of the budget at full size, in seconds
    ("pinning", measure.pinning, 15),
    ("copies", measure.copies, 20),
    ("disk", measure.disk, 15),
    ("stall", measure.stall, 60),
    ("overhead", measure.overhead, 100),
    ("stock", measure.stock_stall, 30),
)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        say("gpu_check: torch sees no GPU here; nothing was checked")
        return 0
    # Not "cuda": events and guards compare devices by number.
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else None
    device = device or torch.device("cpu")
    out = options.out
    if out is None and device.type == "cuda":
        out = REPOSITORY / "docs" / "benchmarks"
    # Most checks need no process group, and DCP says so at every call.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=options.folder) as folder:
        command = ["scripts/gpu_check", *(arguments if arguments is not None else sys.argv[1:])]
        header = describe(device, Path(folder), quick=options.quick, command=command)
        path = None if out is None else out / file_name(device_name(device))
        report = Report(header, path, options.budget_s)
        # A kernel that never ends would hold the process for good; then say where.
        faulthandler.dump_traceback_later(options.budget_s + 50, exit=True)
        site = Site(device, Path(folder), options.quick, report)
        say(f"gpu_check: {header['machine']['device']}, torch {torch.__version__}, in {folder}")
        _run(site, options.only)
        faulthandler.cancel_dump_traceback_later()
    report.write(finished=True)
    say(report.summary())
    if path is not None:
        say(f"written to {path}")
    return report.exit_code


def _run(site: Site, only: list[str] | None) -> None:
    for name, check in CHECKS:
        if only and name not in only:
            continue
        site.report.check(name, _promise(check), partial(check, site))
        site.tidy()
    for name, taken, needs_s in MEASUREMENTS:
        if only and name not in only:
            continue
        needed_s = 0.0 if site.tiny else needs_s
        site.report.measure(name, _promise(taken), partial(taken, site), needed_s)
        site.tidy()


def _promise(run: object) -> str:
    return (run.__doc__ or "").splitlines()[0].rstrip(".")


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: dry run")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; measures nothing")
    parser.add_argument("--out", type=Path, help="folder of the JSON; else docs/benchmarks")
    parser.add_argument("--folder", type=Path, help="where checkpoints go for a moment")
    parser.add_argument("--budget-s", type=float, default=420.0)
    names = [name for name, *_ in (*CHECKS, *MEASUREMENTS)]
    parser.add_argument("--only", action="append", choices=names, help="may be given repeatedly")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
