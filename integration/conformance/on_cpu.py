"""Lets tests that ask for GPUs and nccl run with gloo on the CPU: changes their text, and torch.

For stock's control and for ours alike. Applied to a copy, and to the process of the tests only.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

RANKS = 4  # that a test finds devices for

TEXT = [
    (re.compile(pattern), there)
    for pattern, there in [
        (r'(rank:[^/"]+)/cuda:(\d|\{[^}]*\})', r"\1/cpu"),
        (r'f"cuda:\{[^}]*\}"', '"cpu"'),
        (r'"cuda:0"', '"cpu"'),
        (r'"cpu:gloo,cuda:nccl"', '"gloo"'),
        (r'backend="nccl"', 'backend="gloo"'),
        (r'(device|device_type) ?= ?"cuda"', r'\1="cpu"'),
        (r"device=(self\.rank|dist\.get_rank\(\))", 'device="cpu"'),
        (r'device\("cuda"(, self\.rank)?\)', 'device("cpu")'),
        (r'(init_device_mesh|DeviceMesh)\(\s*"cuda"', r'\1("cpu"'),
        (r"\.cuda\((self\.rank|dist\.get_rank\(\)|[a-z_.]*)\)", '.to("cpu")'),
        (r"min\(8, torch\.cuda\.device_count\(\)\)", "8"),  # of a mesh with 8 ranks
        (r"torch\.cuda\.device_count\(\)", str(RANKS)),
        (r"device_id=[^,)]*torch\.cuda\.current_device\(\)", "device_id=None"),
        (r"torch\.cuda\.set_device\([^)]*\)", "None"),
    ]
]
GPU_MARKS = (
    "skip_if_lt_x_gpu",
    "requires_nccl",
    "requires_accelerator_dist_backend",
    "skip_if_no_gpu",
    "sm_is_or_higher_than",
)


def copy(source: Path, target: Path) -> None:
    """Copy the Python files below a folder, with the CPU for the GPU."""
    for path in sorted(source.rglob("*.py")):
        text = path.read_text()
        for pattern, there in TEXT:
            text = pattern.sub(there, text)
        copied = target / path.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(text)


def patch_torch() -> None:
    """Change torch's own test library, before a test imports it."""
    import torch
    import torch.testing._internal.common_distributed as common

    for name in GPU_MARKS:
        if hasattr(common, name):
            setattr(common, name, _passes)
    common.MultiProcessTestCase._spawn_processes = _forked
    _sharded_tensors()
    _fsdp()
    torch.Tensor.pin_memory = lambda self, *_: self  # it asks for an accelerator
    torch.accelerator.current_device_index = lambda: "cpu"  # ShardedTensor makes a device of it


def _passes(*args: Any, **_: Any) -> Any:
    """Stand in for a mark that skips: it lets the test pass."""
    is_bare = len(args) == 1 and callable(args[0])
    return args[0] if is_bare else lambda function: function


def _forked(self: Any) -> None:
    """Fork the ranks of a test: spawned ones import torch anew, each for seconds."""
    import torch

    self._start_processes(torch.multiprocessing.get_context("fork").Process)


def _sharded_tensors() -> None:
    import torch.testing._internal.distributed._shard.sharded_tensor as home

    stock = home.with_comms

    @functools.wraps(stock)
    def with_comms(func: Any = None, init_rpc: bool = True, backend: str = "gloo") -> Any:
        return stock(func, init_rpc=init_rpc, backend="gloo" if backend == "nccl" else backend)

    home.with_comms = with_comms


def _fsdp() -> None:
    """FSDP1 asks for an accelerator unless it is told the CPU, its tests for one for each rank."""
    import torch
    import torch.distributed as dist
    import torch.testing._internal.common_fsdp as common
    from torch.distributed.fsdp import _init_utils as home
    from torch.distributed.fsdp import fully_sharded_data_parallel as user

    stock = home._init_device_handle

    def init_device_handle(state: Any, module: Any, ignored: Any, _device_id: Any) -> Any:
        return stock(state, module, ignored, torch.device("cpu"))

    def run(cls: type, rank: int, test_name: str, file_name: str, pipe: Any, **_: Any) -> None:
        self: Any = cls(test_name)
        self.rank, self.file_name = rank, file_name
        ranks = int(self.world_size)
        dist.init_process_group("gloo", init_method=self.init_method, world_size=ranks, rank=rank)
        dist.barrier()
        common.set_rng_seed()
        self.run_test(test_name, pipe)
        dist.barrier()
        dist.destroy_process_group()

    home._init_device_handle = user._init_device_handle = init_device_handle
    common.FSDPTest._run = classmethod(run)
