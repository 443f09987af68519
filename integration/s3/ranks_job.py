"""One rank of a job that saves or loads on S3: ranks_job.py save|load URL ENDPOINT."""

import json
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_checkfreq import CheckFreqReader, CheckFreqWriter


def state_of(fill):
    """Return one state that is sharded over the ranks, and one that each of them has whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(fill(3000, 1024), mesh, [Shard(0)])
    return {"sharded": sharded}, {"replicated": fill(2000, 1024)}


def values(rows, columns):
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)


def main(what, url, endpoint):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    options = {"endpoint_url": endpoint}
    if what == "save":
        for step, state in enumerate(state_of(values), start=1):
            dcp.save(
                state,
                storage_writer=CheckFreqWriter(f"{url}/step_{step}", storage_options=options),
            )
    else:
        said = []
        for step, state in enumerate(state_of(torch.zeros), start=1):
            reader = CheckFreqReader(
                f"{url}/step_{step}", storage_options=options, share_reads=step == 2
            )
            dcp.load(state, storage_reader=reader)
            wanted = state_of(values)[step - 1]
            right = all(
                torch.equal(local(state[key]), local(value)) for key, value in wanted.items()
            )
            said.append([right, reader.bytes_needed, reader.bytes_read, reader.bytes_received])
        heard = [None] * dist.get_world_size()
        dist.all_gather_object(heard, said)
        if dist.get_rank() == 0:
            print(json.dumps(heard), flush=True)
    dist.destroy_process_group()


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


if __name__ == "__main__":
    main(*sys.argv[1:])
