"""Worker job for `call`: how long the start of a save holds up the loop, with hardly any bytes.

It is Python work per tensor, which every save of a job pays, however small. Each arm has a training
of its own. Before every call the loop sleeps and takes a step, so that no cache is warmer than in a
training; the save before is finished by then. The step after the call is timed, too: what an arm
leaves to a background thread competes with it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

from arms_async import ASYNC_ARMS
from harness import Ranks, order, record
from spec import Samples, Spec

PARAMETERS = {"tensors160": 40, "tensors1600": 400}  # AdamW has three tensors for each
SMALL_PARAMETERS = 4
WARM_UP_SAVES = 2
PAUSE_S = 0.02

Wait = Callable[[], object]  # returns when the save is finished
Start = Callable[[], Wait]  # returns when the loop may go on
_T = TypeVar("_T")


class Training:
    """A model of small layers, 4 KiB and 128 bytes each, and its optimizer."""

    def __init__(self, parameters: int) -> None:
        layers = (torch.nn.Linear(32, 32) for _ in range(parameters // 2))
        self.model = torch.nn.ModuleList(layers)  # side by side: no gradient vanishes
        self.optim = torch.optim.AdamW(self.model.parameters())
        self._batch = torch.rand(16, 32)

    def step(self) -> None:
        """Change every tensor."""
        self.optim.zero_grad()
        sum(layer(self._batch).square().mean() for layer in self.model).backward()
        self.optim.step()

    def tensors(self) -> list[torch.Tensor]:
        """Return what the state dicts hold."""
        states = self.optim.state_dict()["state"].values()
        moments = [tensor for state in states for tensor in state.values()]
        return [*self.model.state_dict().values(), *moments]


def _ours(training: Training, folder: Path, stack: ExitStack) -> Start:
    from dcp_checkfreq import Checkpointer

    state = {"model": training.model, "optim": training.optim}
    ckpt = Checkpointer(folder, state, every=1, keep_last=1, on_error="raise")
    stack.enter_context(ckpt)

    def start() -> Wait:
        ckpt.after_step()
        return ckpt.wait

    return start


def _stock(training: Training, folder: Path, stack: ExitStack) -> Start:
    save = ASYNC_ARMS["stock_kept_stager"]()
    saves = 0

    def start() -> Wait:
        nonlocal saves
        saves += 1
        model, optim = get_state_dict(training.model, training.optim)
        return save({"model": model, "optim": optim}, folder / str(saves)).result

    return start


def _floor(training: Training, folder: Path, stack: ExitStack) -> Start:
    def start() -> Wait:
        for tensor in training.tensors():
            tensor.data_ptr()
        return lambda: None

    return start


CALL_ARMS: dict[str, Callable[[Training, Path, ExitStack], Start]] = {
    "ours": _ours,
    "stock": _stock,
    "floor": _floor,  # the least that any save has to look at
}


def call_job(spec: Spec, ranks: Ranks) -> dict[str, Any]:
    """Let the arms start saves in turn; the save before is finished each time."""
    parameters = PARAMETERS[spec.state] if spec.scale == "full" else SMALL_PARAMETERS
    trainings = {name: Training(parameters) for name in spec.arms}
    samples: Samples = {}
    with ExitStack() as stack:
        starts = {
            name: CALL_ARMS[name](training, Path(spec.folder, name), stack)
            for name, training in trainings.items()
        }
        for round_number, name in order(spec.arms, spec.repeats + WARM_UP_SAVES - 1, spec.seed):
            gc.collect()
            time.sleep(PAUSE_S)
            trainings[name].step()
            call_s, wait = _timed(starts[name])
            next_step_s, _ = _timed(trainings[name].step)
            wait()
            if round_number >= WARM_UP_SAVES:
                record(samples, name, {"call_s": call_s, "next_step_s": next_step_s})
    return {"samples": samples, "bytes": sum(one.nbytes for one in trainings[name].tensors())}


def _timed(call: Callable[[], _T]) -> tuple[float, _T]:
    begun_s = time.perf_counter()
    returned = call()
    return time.perf_counter() - begun_s, returned
