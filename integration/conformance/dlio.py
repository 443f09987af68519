"""Run DLIO's checkpoint workload (the engine of MLPerf Storage) by four mechanisms, interleaved.

python integration/conformance/dlio.py --source ~/dlio_benchmark      a checkout of argonne-lcf's
python integration/conformance/dlio.py --source ... --quick           shows that it runs

DLIO's own `torch.save`, which does not sync, and the same synced; stock DCP and ours, which sync.
It has a virtual environment of its own in out/, which sees the torch of this one. Between writing
and reading, pages are dropped from memory where that is allowed.
"""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import time
import venv
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from page import put, table

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path.append(str(REPOSITORY / "scripts" / "bench"))  # behind: it has a `run`, too

from machine import describe_code, describe_machine, describe_versions  # noqa: E402

SCHEMA = "dcp_checkfreq.dlio/1"
OUT = REPOSITORY / "out" / "conformance"
PACKAGES = (  # of its requirements what the checkpoint workload with pytorch imports
    "numpy", "mpich", "mpi4py", "hydra-core", "omegaconf", "pandas", "psutil", "h5py", "pillow",
    "pyyaml", "pydftracer",
)  # fmt: skip
MECHANISMS = {
    "torch.save of DLIO, not synced": None,
    "torch.save of DLIO, synced": "dlio_mechanisms.SyncedTorchSave",
    "stock DCP": "dlio_mechanisms.StockDCP",
    "ours": "dlio_mechanisms.CheckFreqDCP",
}
FULL = {"num_layers": 4, "hidden_size": 2048, "ffn_hidden_size": 5504, "vocab_size": 32000}
QUICK = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "vocab_size": 1000}
DROP = Path("/proc/sys/vm/drop_caches")


def main(
    source: Annotated[Path, typer.Option(help="a checkout of dlio_benchmark")],
    label: Annotated[str, typer.Option(help="its commit")] = "",
    ranks: Annotated[int, typer.Option(help="of MPI")] = 2,
    rounds: Annotated[int, typer.Option(help="each has all mechanisms")] = 3,
    checkpoints: Annotated[int, typer.Option(help="in each run")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="a tiny model, one round")] = False,
    out: Annotated[Path, typer.Option(help="for JSON and the environment")] = OUT,
    folder: Annotated[Path, typer.Option(help="for checkpoints, for a while; a disk")] = OUT,
    page: Annotated[Path | None, typer.Option(help="page whose table is written anew")] = None,
) -> None:
    """Write and read the same checkpoints by each mechanism; write JSON."""
    out, folder = out.resolve(), folder.resolve()
    python = _environment(out / "dlio-venv")
    model = QUICK if quick else FULL
    runs: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "source": label or source.name,
        "quick": quick,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "git": describe_code(),
        "machine": describe_machine(folder),
        "versions": describe_versions(),
        "model": model,
        "ranks": ranks,
        "checkpoints": checkpoints,
        "drops_pages": os.access(DROP, os.W_OK),
        "runs": runs,
    }
    for number in range(1 if quick else rounds):
        for name, mechanism in MECHANISMS.items():
            load = os.getloadavg()[0]
            scratch = folder / "dlio-scratch"
            shutil.rmtree(scratch, ignore_errors=True)
            job = _Job(python, source.resolve(), scratch, ranks, model, checkpoints, mechanism)
            try:
                wrote = job.run(checkpoints, 0)
                _drop_pages()
                read = job.run(0, checkpoints)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            run = {"round": number, "mechanism": name, "load": load, **_figures(wrote, read)}
            runs.append(run)
            print(json.dumps(run), flush=True)
    path = out / f"dlio{'-quick' if quick else ''}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join([f"written: {path}", *lines_of(report)]))
    if page is not None:
        put(page, "dlio", lines_of(report))


def lines_of(report: dict[str, Any]) -> list[str]:
    """Return a report as the lines of a page."""
    runs, code = report["runs"], report["git"]
    loads = [run["load"] for run in runs]
    rows = []
    for name in MECHANISMS:
        mine = [run for run in runs if run["mechanism"] == name]
        rows.append([name, *(_median(mine, key) for key in ("save_s", "save_gb_s")),
                     *(_median(mine, key) for key in ("load_s", "load_gb_s"))])  # fmt: skip
    head = (
        f"DLIO {report['source']}, {report['ranks']} ranks, {runs[0]['size_gb']:.2f} GB a "
        f"checkpoint, {len(runs) // len(MECHANISMS)} rounds, median (smallest to largest), "
        f"torch {report['versions']['torch']}, {report['when'][:10]}, git {code['hash'][:9]}"
        f"{' (with changes)' if code['dirty'] else ''}; {report['machine']['cores']} cores, "
        f"{report['machine']['file_system']}, load {min(loads):.1f} to {max(loads):.1f} when "
        f"runs began; reads {'from the disk' if report['drops_pages'] else 'from memory'}."
    )
    columns = ["mechanism", "write, s", "write, GB/s", "read, s", "read, GB/s"]
    return [head, "", *table(columns, rows)]


def _median(runs: list[dict[str, Any]], key: str) -> str:
    values = [run[key] for run in runs]
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _figures(wrote: dict[str, Any], read: dict[str, Any]) -> dict[str, float]:
    return {
        "size_gb": float(wrote["checkpoint_size_GB"]),
        "save_s": float(wrote["save_checkpoint_duration_mean_seconds"]),
        "save_gb_s": float(wrote["save_checkpoint_io_mean_GB_per_second"]),
        "load_s": float(read["load_checkpoint_duration_mean_seconds"]),
        "load_gb_s": float(read["load_checkpoint_io_mean_GB_per_second"]),
    }


class _Job:
    """One mechanism's run, in two parts."""

    def __init__(
        self,
        python: Path,
        source: Path,
        scratch: Path,
        ranks: int,
        model: dict[str, int],
        checkpoints: int,
        mechanism: str | None,
    ) -> None:
        self.scratch = scratch
        self.command = [
            python.with_name("mpiexec"), "-n", str(ranks), python, "-W", "ignore",
            "-m", "dlio_benchmark.main", "workload=llama_7b_zero3",
            f"++workload.checkpoint.checkpoint_folder={scratch / 'checkpoints'}",
            "++workload.checkpoint.time_between_checkpoints=0.2",
            "++workload.checkpoint.fsync=True",
            "++workload.model.transformer.num_attention_heads=8",
            "++workload.model.transformer.num_kv_heads=8",
            f"++workload.model.num_layers={model['num_layers']}",
        ]  # fmt: skip
        sizes = ("hidden_size", "ffn_hidden_size", "vocab_size")
        self.command += [f"++workload.model.transformer.{size}={model[size]}" for size in sizes]
        if mechanism is not None:
            option = "++workload.checkpoint.checkpoint_mechanism_classname"
            self.command.append(f"{option}={mechanism}")
        paths = [HERE, source, REPOSITORY]
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths),
            "DFTRACER_ENABLE": "0",
            "HYDRA_FULL_ERROR": "1",
        }

    def run(self, write: int, read: int) -> dict[str, Any]:
        """Write and read so many checkpoints; return DLIO's own figures."""
        log = self.scratch / f"log-{write}-{read}"
        log.mkdir(parents=True)
        done = subprocess.run(
            [
                *self.command,
                f"++workload.output.folder={log}",
                f"++hydra.run.dir={log}",
                f"++workload.checkpoint.num_checkpoints_write={write}",
                f"++workload.checkpoint.num_checkpoints_read={read}",
            ],
            env=self.environment,
            cwd=self.scratch,
            capture_output=True,
            text=True,
            check=False,
        )
        summary = log / "summary.json"
        if done.returncode or not summary.exists():
            raise RuntimeError(f"DLIO ended with {done.returncode}: {done.stderr[-3000:]}")
        metric: dict[str, Any] = json.loads(summary.read_text())["metric"]
        return metric


def _environment(folder: Path) -> Path:
    """Return its Python; it sees this one's packages behind its own."""
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "zz_behind.pth").write_text("\n".join(site.getsitepackages()) + "\n")
        done.write_text(time.strftime("%F"))
    return python


def _drop_pages() -> None:
    if os.access(DROP, os.W_OK):
        os.sync()
        DROP.write_text("3")


if __name__ == "__main__":
    typer.run(main)
