"""The states that are saved and loaded: their shapes, their values, their shards.

Values are a function of (tensor number, element number), so that any rank of any group can check
any shard it has loaded without keeping a second copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

STATES = ("gpt", "many", "many_flat")
SCALES = ("full", "small")
FILL_ELEMENTS = 1 << 20  # 4 MiB at a time stays in the cache

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One fp32 tensor of a state. ``shape`` is the global one; 0-dim tensors are replicated."""

    key: str
    shape: tuple[int, ...]


def leaves(state: str, scale: str) -> list[Leaf]:
    """Return the tensors of a state.

    "gpt" full: a GPT of 16 layers and width 768 with AdamW, 784 tensors, 1.71 GiB.
    "many" full: 10,000 tensors of 16 KiB. "many_flat": the same as 10,000 top-level keys, for
    each of which stock DCP writes a log record before a planner or a storage is asked anything.
    """
    full = scale == "full"
    if state == "gpt":
        shapes = dict(_gpt(layers=16, width=768, vocab=50257, context=1024) if full
                      else _gpt(layers=2, width=64, vocab=257, context=32))  # fmt: skip
        moments = [
            Leaf(f"optim.state.{key}.{name}", () if name == "step" else shape)
            for key, shape in shapes.items()
            for name in ("step", "exp_avg", "exp_avg_sq")
        ]
        return [Leaf(f"model.{key}", shape) for key, shape in shapes.items()] + moments
    if state in ("many", "many_flat"):
        key = "model.{:05d}" if state == "many" else "model_{:05d}"
        return [Leaf(key.format(n), (64, 64)) for n in range(10_000 if full else 100)]
    raise ValueError(f"state must be one of {STATES}, got {state!r}")


def _gpt(
    *, layers: int, width: int, vocab: int, context: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "wte.weight", (vocab, width)
    yield "wpe.weight", (context, width)
    for n in range(layers):
        for norm in ("ln_1", "ln_2"):
            yield f"h.{n}.{norm}.weight", (width,)
            yield f"h.{n}.{norm}.bias", (width,)
        for name, rows, columns in (
            ("attn.c_attn", 3 * width, width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", 4 * width, width),
            ("mlp.c_proj", width, 4 * width),
        ):
            yield f"h.{n}.{name}.weight", (rows, columns)
            yield f"h.{n}.{name}.bias", (rows,)
    yield "ln_f.weight", (width,)
    yield "ln_f.bias", (width,)


def build(wanted: list[Leaf], *, rank: int, ranks: int, filled: bool) -> State:
    """Return this rank's state: plain tensors on one rank, else DTensors sharded on dim 0.

    With ``filled`` every element has its known value, else all are zero.
    """
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
    state: State = {}
    for number, leaf in enumerate(wanted):
        shape, first = _shard(leaf.shape, rank, ranks)
        tensor = torch.zeros(shape)
        if filled:
            for span, values in _values(number, first, tensor.numel()):
                tensor.view(-1)[span] = values
        if mesh is not None and leaf.shape:
            tensor = DTensor.from_local(
                tensor, mesh, [Shard(0)], run_check=False,
                shape=torch.Size(leaf.shape),
                stride=torch.empty(leaf.shape, device="meta").stride(),
            )  # fmt: skip
        state[leaf.key] = tensor
    return state


def nested(state: State) -> dict[str, Any]:
    """Return the state as users hand it to DCP: {"model": {...}, "optim": {...}}."""
    tree: dict[str, Any] = {}
    for key, tensor in state.items():
        top, dot, rest = key.partition(".")
        if dot:
            tree.setdefault(top, {})[rest] = tensor
        else:
            tree[key] = tensor
    return tree


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def locals_of(state: State) -> State:
    """Return the state as plain tensors: what a saver that knows no DTensor writes."""
    return {key: local(tensor) for key, tensor in state.items()}


def local_bytes(state: State) -> int:
    """Return the bytes of the parts that this rank holds."""
    return sum(local(tensor).nbytes for tensor in state.values())


def clear(state: State) -> None:
    """Set every element to zero, so that a load that does nothing is noticed."""
    for tensor in state.values():
        local(tensor).zero_()


def check(state: State, wanted: list[Leaf], *, rank: int, ranks: int) -> None:
    """Compare every element with its known value.

    Raises:
        ValueError: some differ; the text names the tensor.
    """
    for number, leaf in enumerate(wanted):
        _, first = _shard(leaf.shape, rank, ranks)
        flat = local(state[leaf.key]).view(-1)
        for span, values in _values(number, first, flat.numel()):
            if not torch.equal(flat[span], values):
                raise ValueError(f"{leaf.key}: loaded values differ from the saved ones")


def _shard(shape: tuple[int, ...], rank: int, ranks: int) -> tuple[tuple[int, ...], int]:
    """Return the local shape and the global number of its first element (as torch.chunk cuts)."""
    if not shape or ranks == 1:
        return shape, 0
    rows_each = -(-shape[0] // ranks)
    start = min(rank * rows_each, shape[0])
    stop = min(start + rows_each, shape[0])
    return (stop - start, *shape[1:]), start * prod(shape[1:])


def _values(number: int, first: int, count: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (slice of the local flat tensor, its values) for elements from ``first`` on."""
    for start in range(0, count, FILL_ELEMENTS):
        stop = min(start + FILL_ELEMENTS, count)
        mixed = torch.arange(first + start, first + stop, dtype=torch.int32)
        mixed.mul_(-1640531535).add_(number * 7919)  # wraps: a cheap hash
        yield slice(start, stop), mixed.bitwise_and_(0xFFFFFF).to(torch.float32).add_(1)
