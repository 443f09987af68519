"""Where the checks run: a GPU, or the CPU in a dry run; and what they compare with what."""

from __future__ import annotations

import contextlib
import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from gpu_report import Report, Skipped
from torch.distributed.tensor import DTensor

from dcp_checkfreq import CheckFreqLoadPlanner, CheckFreqReader, Checkpointer
from dcp_checkfreq.format.names import step_folder
from dcp_checkfreq.snapshot import pool

NEVER = 1 << 40  # `every` of a Checkpointer that saves only when it is told to
Mark = Any  # a moment: seconds, or a CUDA event


@dataclass(slots=True)
class Site:
    """The device, a folder, and how large things may be."""

    device: torch.device
    folder: Path
    quick: bool
    report: Report
    disk_bytes_per_s: float = 0.0  # 0: not measured
    _slow: SlowWork | None = field(default=None, repr=False)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def tiny(self) -> bool:
        """Whether sizes are for trying the script, not for finding anything out."""
        return self.quick or not self.on_gpu

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def need_gpu(self) -> None:
        if not self.on_gpu:
            raise Skipped("needs a GPU")

    @property
    def modes(self) -> tuple[str, ...]:
        return ("blocking", "cpu", "gpu") if self.on_gpu else ("blocking", "cpu")

    def sync(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def mark(self) -> Mark:
        """A moment of the training stream, or of the host in a dry run."""
        if not self.on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, begun: Mark, ended: Mark) -> float:
        """Seconds from one mark to the other; waits for both."""
        if not self.on_gpu:
            return float(ended - begun)
        ended.synchronize()
        begun.synchronize()
        return float(begun.elapsed_time(ended)) / 1000

    @contextlib.contextmanager
    def stream(self, *, own: bool) -> Iterator[None]:
        """Train on a stream of its own instead of the default one."""
        if not (own and self.on_gpu):
            yield
            return
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            yield
        torch.cuda.current_stream(self.device).wait_stream(side)

    @contextlib.contextmanager
    def root(self) -> Iterator[Path]:
        """A folder for checkpoints, removed afterwards."""
        path = Path(tempfile.mkdtemp(prefix="gpu-check-", dir=self.folder))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @property
    def slow(self) -> SlowWork:
        if self._slow is None:
            self._slow = SlowWork(self)
        return self._slow

    def tidy(self) -> None:
        """Give back all memory between two checks."""
        gc.collect()
        pool.PROCESS_POOL.drop()
        if not self.on_gpu:
            return
        pool.device_pool(self.device).drop()
        self.sync()
        torch.cuda.empty_cache()
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
        if empty_host_cache is not None:  # there is no public way
            empty_host_cache()


class SlowWork:
    """A chain of matrix products that keeps the training stream busy."""

    def __init__(self, site: Site) -> None:
        self._site = site
        width = 8192 if site.on_gpu and not site.quick else 1024 if site.on_gpu else 64
        dtype = torch.bfloat16 if site.on_gpu else torch.float32
        self._weight = torch.randn(width, width, device=site.device, dtype=dtype) / width**0.5
        self._one_s = 0.0
        self._chain(3)
        begun = site.mark()
        self._chain(10)
        self._one_s = site.between(begun, site.mark()) / 10

    def _chain(self, length: int) -> torch.Tensor:
        value = self._weight
        for _ in range(length):
            value = torch.tanh(value @ self._weight)  # stays finite
        return value

    @torch.no_grad()
    def queue(self, seconds: float) -> torch.Tensor:
        """Queue work of about this length; return a zero (float32, 0-dim) that comes of it."""
        seconds = seconds if self._site.on_gpu else 0.001
        return (self._chain(max(1, int(seconds / self._one_s))) * 0).sum().float()


# --- states ---


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return the same nesting of mappings and lists with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(inner, change) for inner in value)
    return value


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, without gradient and without lazy conjugation."""
    with torch.no_grad():
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return part.detach().resolve_conj().resolve_neg()


def frozen(state: Any) -> Any:
    """Return the state as it is at this point of the current stream."""
    return mapped(state, lambda tensor: local(tensor).clone())


def room_for(state: Any) -> Any:
    """Return CPU tensors like those of the state, filled with something else."""

    def room(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        made.reshape(-1).view(torch.uint8).fill_(0xA5)
        return made

    return mapped(state, room)


def flat(state: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Return path to tensor."""
    if isinstance(state, torch.Tensor):
        return {path: state}
    found: dict[str, torch.Tensor] = {}
    if isinstance(state, Mapping):
        for key, inner in state.items():
            found |= flat(inner, f"{path}.{key}")
    elif isinstance(state, (list, tuple)):
        for number, inner in enumerate(state):
            found |= flat(inner, f"{path}.{number}")
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as flat bytes."""
    return local(tensor).contiguous().reshape(-1).view(torch.uint8)


def differing(want: Any, got: Any) -> list[str]:
    """Return the paths whose tensors are not the same, bit for bit."""
    wanted, found = flat(want), flat(got)
    paths = list(wanted.keys() ^ found.keys())
    for path in wanted.keys() & found.keys():
        one, other = wanted[path], found[path]
        same = one.dtype == other.dtype and one.shape == other.shape
        if not same or not torch.equal(bits(one), bits(other).to(one.device)):
            paths.append(path)
    return sorted(paths)


def must_equal(want: Any, got: Any, what: str) -> None:
    """Raise unless both hold the same tensors, bit for bit."""
    paths = differing(want, got)
    if paths:
        raise AssertionError(
            f"{what}: {len(paths)} of {len(flat(want))} tensors differ: {', '.join(paths[:5])}"
        )


def loaded(folder: Path, like: Any) -> Any:
    """Return a checkpoint, on the CPU."""
    room = room_for(like)
    dcp.load(
        room,
        storage_reader=CheckFreqReader(folder),
        planner=CheckFreqLoadPlanner(),
        no_dist=True,
    )
    return room


def nbytes(state: Any) -> int:
    return sum(tensor.nbytes for tensor in flat(state).values())


def checkpointer(root: Path, parts: dict[str, Any], mode: str, **options: Any) -> Checkpointer:
    """Return one that saves only when it is told to, and raises what goes wrong."""
    options = {"every": NEVER, "on_error": "raise", "keep_last": 1, **options}
    return Checkpointer(root, parts, snapshot=mode, preempt_signals=(), **options)


def folder_of(root: Path, ckpt: Checkpointer) -> Path:
    return root / step_folder(ckpt.step)
