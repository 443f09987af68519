"""A row of the zoo: a job, and what has to come of it.

`check_exact` trains, saves, restores into a job that was made anew from another seed, compares all
of it bit for bit, trains one more step on both and compares again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from dcp_checkfreq import Checkpointer, UnsupportedState

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass
class Job:
    """Parts to register, what trains them by one step, and more that has to be the same."""

    parts: dict[str, Any]
    step: Callable[[], None]
    also: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        make: makes the job; the seed is set.
        refused: a pattern of what is said, if it is refused; `when` it is.
        why: for the page, of what is refused or of note.
        before: trained before the save.
        fresh_steps: trained before the restore, by the job that is restored into.
        options: of both Checkpointers.
    """

    make: Callable[[], Job]
    refused: str | None = None
    when: str = "registered"  # or "after the first step"
    why: str = ""
    before: int = 2
    fresh_steps: int = 0
    options: tuple[tuple[str, Any], ...] = ()


# --- what is compared ---


def facts(value: Any) -> Any:
    """Return all that has to be the same: of tensors dtype, shape, bits; of others type, value."""
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, dict):
        return type(value).__name__, [(facts(key), facts(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [facts(one) for one in value]
    if isinstance(value, io.BytesIO):
        return "BytesIO", value.getvalue()
    if type(value) is float and value != value:
        return "float", "nan"
    if callable(getattr(value, "state_dict", None)):
        return type(value).__name__, facts(value.state_dict())
    return type(value).__name__, value


def _of_tensor(tensor: torch.Tensor) -> Any:
    if nn.parameter.is_lazy(tensor):
        return "lazy"
    tensor = tensor.detach()
    kind = str(tensor.dtype), tuple(tensor.shape)
    if hasattr(tensor, "full_tensor"):
        return *kind, str(tensor.placements), _of_tensor(tensor.to_local())
    if tensor.is_quantized:
        if tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
            scale = facts([tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()])
        else:
            scale = tensor.q_scale(), tensor.q_zero_point()
        return *kind, scale, _of_tensor(tensor.int_repr())
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return *kind, flat.clone().numpy().tobytes()  # what numpy has seen cannot be resized


def all_of(job: Job) -> dict[str, Any]:
    """Return the facts of all parts, and of live tensors beside what state dicts say."""
    found = {name: facts(part) for name, part in job.parts.items()}
    for name, part in job.parts.items():
        if isinstance(part, nn.Module):
            kept = set(part.state_dict())
            live = [*part.named_parameters(), *part.named_buffers()]
            found[f"{name}'s tensors"] = {
                key: (one.requires_grad, facts(one)) for key, one in live if key in kept
            }
        if isinstance(part, torch.optim.Optimizer):
            state = part.state_dict().get(
                "state", {}
            )  # in which order its entries are is no matter
            found[name] = facts(
                part.state_dict() | {"state": dict(sorted(state.items(), key=lambda x: str(x[0])))}
            )
            found[f"{name}'s devices"] = [
                (key, one.device.type)
                for state in part.state.values()
                if isinstance(state, dict)
                for key, one in state.items()
                if isinstance(one, torch.Tensor)
            ]
    torch.manual_seed(77)
    found["also"] = facts(job.also())
    return found


def assert_same(fresh: Job, job: Job) -> None:
    """Compare all of two jobs, and name the first of what differs."""
    found = list(_differing(all_of(fresh), all_of(job), "job"))
    assert not found, found[:3]


def _differing(one: Any, other: Any, where: str) -> Iterator[str]:
    if type(one) is type(other) and isinstance(one, dict) and list(one) == list(other):
        for key in one:
            yield from _differing(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        for at, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _differing(a, b, f"{where}.{at}")
    elif one != other:
        yield f"{where}: {str(one)[:200]} is not {str(other)[:200]}"


# --- what is done ---


def made(row: Row, seed: int) -> Job:
    torch.manual_seed(seed)
    return row.make()


def train(job: Job, steps: int, seed: int) -> None:
    for step in range(steps):
        torch.manual_seed(100 * seed + step)
        job.step()


def check_exact(row: Row, root: Any) -> None:
    options = {"every": 1000, **dict(row.options)}
    job = made(row, 1)
    with Checkpointer(root, job.parts, **options) as ckpt:
        assert ckpt.restore() is None
        for step in range(row.before):
            train(job, 1, step)
            ckpt.after_step()
        ckpt.save(wait=True)
    fresh = made(row, 2)
    train(fresh, row.fresh_steps, 7)
    with Checkpointer(root, fresh.parts, **options) as ckpt:
        found = ckpt.restore()
        assert not any(found.differences.values()), found.differences
        assert found.left_out == ()
        assert_same(fresh, job)
        train(job, 1, 9)
        train(fresh, 1, 9)
        ckpt.after_step()
        assert_same(fresh, job)


def check_refused(row: Row, root: Any) -> None:
    job = made(row, 1)
    options = {"every": 1000, "on_error": "log", **dict(row.options)}
    if row.when == "registered":
        with pytest.raises(UnsupportedState, match=row.refused):
            Checkpointer(root, job.parts, **options)
        return
    with Checkpointer(root, job.parts, **options) as ckpt:
        ckpt.restore()
        train(job, 1, 0)
        with pytest.raises(UnsupportedState, match=row.refused):
            ckpt.after_step()


def check(row: Row, root: Any) -> None:
    """Check what a row states."""
    (check_exact if row.refused is None else check_refused)(row, root)


# --- what jobs are made of ---


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what a model is fed; the same in every job."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    return (torch.arange(count).reshape(shape) % 7 / 7 + 0.1).to(dtype)


def loss_of(output: Any) -> torch.Tensor:
    """Return a loss of whatever a model gives back."""
    if isinstance(output, torch.Tensor):
        wide = torch.view_as_real(output) if output.is_complex() else output
        return (wide.float() * 0.9).square().mean()
    if isinstance(output, dict):
        output = list(output.values())
    return torch.stack([loss_of(one) for one in output if one is not None]).sum()


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    trained = [one for one in module.parameters() if one.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def job_of(
    module: nn.Module,
    *inputs: torch.Tensor,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = sgd,
    **more: Any,
) -> Job:
    """Return a module that learns from the same inputs in every step."""
    parts: dict[str, Any] = {"model": module, **more}
    if optimizer is not None:
        parts["optim"] = optimizer(module)

    def step() -> None:
        output = module(*inputs)
        if optimizer is None:
            return
        loss_of(output).backward()
        parts["optim"].step()
        parts["optim"].zero_grad()

    return Job(parts, step, lambda: [one.detach() for one in _flat(module(*inputs))])


def _flat(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [one for inner in output if inner is not None for one in _flat(inner)]
