"""Start the worker processes of a job and fetch their result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from spec import Samples, Spec

WORKER = Path(__file__).with_name("worker.py")


def run_workers(spec: Spec) -> dict[str, Any]:
    """Run ``spec`` in fresh processes and return what its job returned on rank 0.

    Raises:
        subprocess.CalledProcessError: a rank failed; its traceback is on stderr.
    """
    with tempfile.TemporaryDirectory(prefix="checkfreq-bench-") as scratch:
        spec_path, result_path = Path(scratch, "spec.json"), Path(scratch, "result.json")
        spec.dump(spec_path)
        command = [sys.executable, "-W", "ignore"]
        if spec.ranks > 1:
            command += [
                "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
                f"--nproc-per-node={spec.ranks}",
            ]  # fmt: skip
        threads = max(1, (os.cpu_count() or 1) // spec.ranks)
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONWARNINGS": "ignore",  # stock DCP warns on every save without a process group
        }
        subprocess.run(
            [*command, str(WORKER), str(spec_path), str(result_path)], check=True, env=environment
        )
        return json.loads(result_path.read_text())


def merge(into: Samples, more: Samples) -> None:
    """Append the samples of another run of the same job."""
    for arm, metrics in more.items():
        for metric, values in metrics.items():
            into.setdefault(arm, {}).setdefault(metric, []).extend(values)
