"""One rank that saves with DCP's process-based async mode: process_save.py URL ENDPOINT.

Credentials come from the environment, so that the process that DCP spawns has them too.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_checkfreq import CheckFreqReader, CheckFreqWriter


def main(url, endpoint):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    options = {"endpoint_url": endpoint}
    state = {"w": torch.arange(5_000_000)}
    for step in (1, 2):
        writer = CheckFreqWriter(f"{url}/step_{step}", storage_options=options)
        saved = dcp.async_save(
            state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS
        )
        saved.result()
        target = {"w": torch.zeros(5_000_000, dtype=torch.int64)}
        reader = CheckFreqReader(f"{url}/step_{step}", storage_options=options)
        dcp.load(target, storage_reader=reader)
        assert torch.equal(target["w"], state["w"])
    print("both steps are right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
