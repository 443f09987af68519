"""One rank of one job: `worker.py SPEC RESULT`. Started by launch.py, alone or under torchrun."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Ranks
from jobs_async import first_job, slowdown_job
from jobs_call import call_job
from jobs_convert import convert_job
from jobs_data import data_job, resume_job
from jobs_s3 import s3_load_job, s3_prepare_job, s3_save_job
from jobs_staged import staged_job
from jobs_storage import load_job, prepare_job, save_first_job, save_job
from spec import Spec

JOBS: dict[str, Callable[[Spec, Ranks], dict[str, Any]]] = {
    "save": save_job,
    "save_first": save_first_job,
    "prepare": prepare_job,
    "load": load_job,
    "async_first": first_job,
    "async_slowdown": slowdown_job,
    "call": call_job,
    "convert": convert_job,
    "s3_save": s3_save_job,
    "s3_prepare": s3_prepare_job,
    "s3_load": s3_load_job,
    "staged": staged_job,
    "data": data_job,
    "data_resume": resume_job,
}


def main(spec_path: str, result_path: str) -> None:
    """Run the job; rank 0 writes what it returned to ``result_path``."""
    spec = Spec.read(Path(spec_path))
    ranks = Ranks(spec.ranks)
    result = JOBS[spec.job](spec, ranks)
    if ranks.rank == 0:
        Path(result_path).write_text(json.dumps(result))
    ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
