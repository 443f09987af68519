"""The jobs of the distributed tests. Run by `launch.start`; each job is called on all ranks."""

import datetime
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import jobs_agreement
import jobs_data
import jobs_dropin
import jobs_dtensors
import jobs_last_words
import jobs_memory
import jobs_no_rank_alone
import jobs_parts
import jobs_replicas
import jobs_saving
import jobs_self_described
import jobs_sharding
import jobs_sharing
import jobs_staged
import jobs_training
import jobs_zero
import jobs_zoo
import torch
import torch.distributed as dist
from jobs import DEADLY, JOBS

# Importing a module of jobs registers them.
MODULES = (
    jobs_agreement,
    jobs_data,
    jobs_dropin,
    jobs_dtensors,
    jobs_last_words,
    jobs_memory,
    jobs_no_rank_alone,
    jobs_parts,
    jobs_replicas,
    jobs_saving,
    jobs_self_described,
    jobs_sharding,
    jobs_sharing,
    jobs_staged,
    jobs_training,
    jobs_zero,
    jobs_zoo,
)


def main():
    run, shared, *names = sys.argv[1:]
    run, shared = Path(run), Path(shared)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{run}/store",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=30),
    )
    said = {}
    for name in names:
        try:
            said[name] = {"value": JOBS[name](shared)}
        except BaseException as error:  # noqa: BLE001  the test shows it
            said[name] = {
                "error": type(error).__name__,
                "text": str(error),
                "trace": traceback.format_exc(),
            }
        (run / f"{dist.get_rank()}.json").write_text(json.dumps(said))
        if name not in DEADLY:
            dist.barrier()
    if DEADLY.isdisjoint(names):
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
