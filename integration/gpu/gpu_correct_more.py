"""Promises around the snapshot: DCP's own calls, FSDP2, pinned memory, restoring, CUDA graphs."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpu_jobs import Job
from gpu_report import Facts, Skipped
from gpu_site import (
    Site,
    checkpointer,
    flat,
    folder_of,
    frozen,
    loaded,
    local,
    must_equal,
    nbytes,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dcp_checkfreq import CheckFreqWriter
from dcp_checkfreq.snapshot import pool
from dcp_checkfreq.snapshot.stager import Stager

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def _many_kinds(site: Site) -> dict[str, Any]:
    torch.manual_seed(3)
    size = site.size(5_000_011, 50_011)
    state: dict[str, Any] = {
        str(dtype): (torch.randn(size, device=site.device) * 50).to(dtype) for dtype in DTYPES
    }
    state["0-dim"] = torch.tensor(3.5, device=site.device)
    state["empty"] = torch.empty(0, 4, device=site.device)
    state["transposed"] = torch.randn(700, 300, device=site.device).t()
    state["strided"] = torch.randn(600, 40, device=site.device)[::2, 1::3]
    state["tied"] = state[str(torch.float32)]
    state["host"] = torch.randn(70_000)
    state["conjugated"] = state[str(torch.complex64)][:70_000].conj()
    return state


def plain_dcp(site: Site) -> Facts:
    """`dcp.save` and `dcp.async_save` of live CUDA tensors through `CheckFreqWriter`."""
    facts: Facts = {}
    for own in (False, True):
        for call in ("save", "async_save"):
            state = _many_kinds(site)
            if call == "async_save":
                del state["conjugated"]  # see `lazy_bits`
            with site.root() as root:
                with site.stream(own=own):
                    zero = site.slow.queue(0.1)
                    state[str(torch.float32)].copy_(state[str(torch.float32)] + zero + 1)
                    want = frozen(state)
                    writer = CheckFreqWriter(root / "step_1")
                    if call == "save":
                        dcp.save(state, storage_writer=writer)
                    else:
                        pending: Any = dcp.async_save(state, storage_writer=writer)
                        for tensor in flat(state).values():
                            if tensor.dtype == torch.float32 and tensor.numel():
                                tensor.add_(1)
                        pending = getattr(pending, "upload_completion", pending)
                        pending.result()
                name = f"{call}, {'own' if own else 'default'} stream"
                must_equal(want, loaded(root / "step_1", want), name)
                facts[name] = "equal"
    return facts


def pinned_and_reused(site: Site) -> Facts:
    """Host buffers are pinned; a second save allocates nothing, on the host or on the GPU."""
    site.need_gpu()
    facts: Facts = {}
    for mode in site.modes:
        site.tidy()
        job = Job(site)
        before = torch.cuda.host_memory_stats()
        with site.root() as root, checkpointer(root, job.parts, mode) as ckpt:
            counted: list[tuple[int, int]] = []
            for _ in range(4):
                job.iterate()
                ckpt.after_step()
                ckpt.save(wait=True)
                job.iterate()
                site.sync()
                counted.append((_host_allocations(), _segments(site)))
        held = pool.PROCESS_POOL.held_bytes
        facts[f"{mode}: state bytes"] = nbytes(job.capture())
        facts[f"{mode}: host buffer bytes"] = held
        facts[f"{mode}: pinned by torch"] = _reserved(torch.cuda.host_memory_stats()) - _reserved(
            before
        )
        facts[f"{mode}: host allocations, GPU segments after each save"] = str(counted)
        lease = pool.PROCESS_POOL.lease(1)
        pinned = lease.memory.is_pinned()
        lease.release()
        assert pinned, f"{mode}: the host buffer is not pinned"
        first, *later = counted[1:]
        if mode != "gpu":  # there pieces come and go, as many as are being written
            assert all(one[0] == first[0] for one in later), f"{mode}: {counted}"
        assert all(one[1] == first[1] for one in later), f"{mode}: GPU memory grew: {counted}"
    return facts


def _host_allocations() -> int:
    return int(torch.cuda.host_memory_stats().get("num_host_alloc", 0))


def _segments(site: Site) -> int:
    return int(torch.cuda.memory_stats(site.device)["segment.all.allocated"])


def _reserved(stats: dict[str, Any]) -> int:
    for key in ("reserved_bytes.current", "allocated_bytes.current"):  # the name has changed
        if key in stats:
            return int(stats[key])
    return 0


def restore_order(site: Site) -> Facts:
    """What was queued before `restore`, on any stream, does not overwrite what it loads."""
    facts: Facts = {}
    for own in (False, True):
        job = Job(site, layers=4)
        job.iterate()
        with site.root() as root:
            with checkpointer(root, job.parts, "cpu") as ckpt:
                ckpt.after_step()
                ckpt.save(wait=True)
                want = frozen(job.capture())
            other = Job(site, layers=4, seed=1)
            other.iterate()
            with checkpointer(root, other.parts, "cpu") as ckpt, site.stream(own=own):
                zero = site.slow.queue(0.5)
                with torch.no_grad():
                    for parameter in other.model.parameters():
                        parameter.copy_(parameter * 0 + zero - 1)
                ckpt.restore()
                site.sync()
                must_equal(want, other.capture(), f"{'own' if own else 'default'} stream")
        facts[f"{'own' if own else 'default'} stream"] = "equal"
    return facts


def graphed_step(site: Site) -> Facts:
    """A CUDA graph that holds `optimizer.step` runs no hook: its state is not torn all the same."""
    site.need_gpu()
    facts: Facts = {}
    for mode in site.modes:
        job = Job(site, kind="foreach", capturable=True)
        warm = torch.cuda.Stream(site.device)
        warm.wait_stream(torch.cuda.current_stream(site.device))
        with torch.cuda.stream(warm):
            for _ in range(3):
                job.iterate()
        torch.cuda.current_stream(site.device).wait_stream(warm)
        job.optim.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            job.iterate()
        with site.root() as root:
            ckpt = checkpointer(root, job.parts, mode, on_error="log")
            for number in range(2):
                graph.replay()
                ckpt.after_step()
                want = frozen(job.capture())
                ckpt.save()
                graph.replay()  # at once
                ckpt.wait()
                error = ckpt.history[-1].error
                if error is None:
                    got = loaded(folder_of(root, ckpt), want)
                    must_equal(want, got, f"{mode}, save {number}")
                facts[f"{mode}, save {number}"] = error or "equal"
            ckpt.close()
        graph.reset()
    return facts


# --- with a process group ---


@contextlib.contextmanager
def _group(backend: str, **options: Any) -> Iterator[None]:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # there may be no other
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Sharded:
    """Linear layers under FSDP2 on a mesh of one rank."""

    def __init__(self, site: Site, seed: int) -> None:
        torch.manual_seed(seed)
        width = site.size(1024, 256)
        mesh = init_device_mesh(site.device.type, (1,))
        self.model = nn.Sequential(*[nn.Linear(width, width) for _ in range(6)]).to(site.device)
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self._batch = torch.randn(32, width, device=site.device)

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optim}

    def capture(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optim": get_optimizer_state_dict(self.model, self.optim),
        }

    def iterate(self) -> None:
        self.optim.zero_grad(set_to_none=True)
        self.model(self._batch).square().mean().backward()
        self.optim.step()


def sharded(site: Site) -> Facts:
    """FSDP2 on a CUDA mesh: staged on the host, not torn, and it loads again."""
    facts: Facts = {}
    with _group("cpu:gloo,cuda:nccl" if site.on_gpu else "gloo"):
        job = _Sharded(site, 0)
        job.iterate()
        _staged_on_the_host(site, job)
        for mode in site.modes:
            with site.root() as root:
                with checkpointer(root, job.parts, mode) as ckpt:
                    for number in range(3):  # from the second on by the kept plan
                        job.iterate()
                        ckpt.after_step()
                        want = frozen(job.capture())
                        ckpt.save()
                        job.optim.step()
                        ckpt.wait()
                        got = loaded(folder_of(root, ckpt), want)
                        must_equal(want, got, f"{mode}, save {number}, on the CPU")
                other = _Sharded(site, 1)
                with checkpointer(root, other.parts, mode) as ckpt:
                    ckpt.restore()
                    must_equal(want, other.capture(), f"{mode}, restored into FSDP2")
            facts[mode] = "equal"
    return facts


def _staged_on_the_host(site: Site, job: _Sharded) -> None:
    """Raise unless staged shards are DTensors of the same mesh whose memory is on the host."""
    state = {"model": get_model_state_dict(job.model)}
    stager = Stager()
    staged = stager.stage(state)
    try:
        for path, tensor in flat(staged).items():
            original = flat(state)[path]
            assert isinstance(tensor, DTensor), f"{path} is no DTensor any more"
            assert isinstance(original, DTensor)
            assert tensor.device_mesh == original.device_mesh, path
            assert original.device_mesh.device_type == site.device.type
            assert local(tensor).device.type == "cpu", f"{path} is on {local(tensor).device}"
            assert local(original).device.type == site.device.type
        must_equal(state, staged, "staged")
    finally:
        del staged
        stager.release()


def bound_group(site: Site) -> Facts:
    """A default group that is NCCL only and bound to its GPU: our gloo group works beside it."""
    site.need_gpu()
    if not dist.is_nccl_available():
        raise Skipped("torch was built without NCCL")
    with _group("nccl", device_id=site.device):
        job = _Sharded(site, 0)
        job.iterate()
        with site.root() as root, checkpointer(root, job.parts, "cpu") as ckpt:
            ckpt.after_step()
            want = frozen(job.capture())
            ckpt.save()
            job.optim.step()
            ckpt.wait()
            must_equal(want, loaded(Path(folder_of(root, ckpt)), want), "saved")
    return {}


def second_gpu(site: Site) -> Facts:
    """A job on a GPU that is not the current one: saved, timed and restored all the same."""
    if not site.on_gpu or torch.cuda.device_count() < 2:
        raise Skipped("needs two GPUs")
    other = Site(torch.device("cuda", 1 - (site.device.index or 0)), site.folder, True, site.report)
    facts: Facts = {}
    for mode in other.modes:
        job = Job(other)
        with other.root() as root, checkpointer(root, job.parts, mode) as ckpt:
            for number in range(2):
                job.iterate()
                ckpt.after_step()
                want = frozen(job.capture())
                ckpt.save()
                job.optim.step()
                ckpt.wait()
                must_equal(want, loaded(folder_of(root, ckpt), want), f"{mode}, save {number}")
            assert ckpt.history[-1].copy_s > 0, f"{mode}: the copy took no time"
        facts[mode] = "equal"
    other.tidy()
    return facts
