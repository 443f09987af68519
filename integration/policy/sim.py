"""A simulated accelerator: a training job whose forward and backward are a sleep.

On a GPU machine the host cores are free while an iteration runs. A sleep leaves them free too, so
what a checkpoint costs the training loop here is what it would cost there: waiting, not computing.
Everything else is real: tensors of the asked size, a real `torch.optim.Optimizer` whose `step` runs
its hooks and changes every tensor, a buffer that changes in the forward, a data position.

Each step changes the same few elements of every tensor (one in 64 KiB), all by the same rule. So at
any moment they are all equal, and a checkpoint that mixes two steps is seen: `SimJob.check_whole`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

NOTE = "simulated accelerator: a step that sleeps, so host cores are free as on a GPU machine"
KINDS = 3  # parameter, first and second moment
ELEMENTS_APART = 16 << 10  # of those that a step changes: one in 64 KiB of fp32
PATTERN_ELEMENTS = 1 << 20
SLEEP_CHUNK_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSpec:
    """The job. ``state_bytes`` are parameters and optimizer state together, fp32."""

    state_bytes: int
    iteration_s: float  # Ti
    update_s: float  # Tw, the weight update's part of it
    tensors: int = 40
    seed: int = 1

    def fields(self) -> dict[str, Any]:
        return asdict(self)


class SimModel(torch.nn.Module):
    """``tensors`` parameters of uneven sizes and a buffer that the forward changes."""

    def __init__(self, spec: SimSpec) -> None:
        super().__init__()
        elements = spec.state_bytes // (4 * KINDS)
        weights = [1 + number % 4 for number in range(spec.tensors)]
        pattern = torch.randn(PATTERN_ELEMENTS, generator=torch.Generator().manual_seed(spec.seed))
        self.layers = torch.nn.ParameterList(
            torch.nn.Parameter(_filled(max(1, elements * w // sum(weights)), pattern))
            for w in weights
        )
        self.register_buffer("running", torch.zeros(1024))


def _filled(elements: int, pattern: torch.Tensor) -> torch.Tensor:
    values = pattern.repeat(math.ceil(elements / PATTERN_ELEMENTS))[:elements].clone()
    touched(values).zero_()  # all changed elements start alike
    return values


def touched(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the elements that a step changes; it is never empty."""
    return tensor.detach().view(-1)[::ELEMENTS_APART]


class SimOptimizer(torch.optim.Optimizer):
    """Adam on the touched elements only; sleeps for the rest of ``update_s``.

    The gradient is ``value - target``. Dense gradients would cost memory and time that say nothing
    about checkpoints.
    """

    def __init__(self, params: Any, *, update_s: float = 0.0) -> None:
        super().__init__(params, {"lr": 0.05, "betas": (0.9, 0.99)})
        self.target = 0.0
        self._update_s = update_s
        self.began_s = 0.0  # when the last update began: after all pre-step hooks
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {  # clones, not zeros: pages that really are there
                    "step": torch.zeros(()),
                    "exp_avg": p.detach().clone(),
                    "exp_avg_sq": p.detach().clone(),
                }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        assert closure is None
        self.began_s = time.perf_counter()
        for group in self.param_groups:
            states = [self.state[p] for p in group["params"]]
            values = [touched(p) for p in group["params"]]
            first = [touched(s["exp_avg"]) for s in states]
            second = [touched(s["exp_avg_sq"]) for s in states]
            slow, slower = group["betas"]
            grads = torch._foreach_sub(values, self.target)
            torch._foreach_lerp_(first, grads, 1 - slow)
            torch._foreach_mul_(second, slower)
            torch._foreach_addcmul_(second, grads, grads, 1 - slower)
            scale = torch._foreach_sqrt(second)
            torch._foreach_add_(scale, 1e-8)
            torch._foreach_addcdiv_(values, first, scale, -group["lr"])
            torch._foreach_add_([s["step"] for s in states], 1.0)
        sleep_until(self.began_s + self._update_s)


class Position:
    """How many samples were consumed. A sample is a function of its number and the seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.samples = 0

    def take(self) -> float:
        number = (self.samples * 2654435761 + self._seed * 40503) % 1000
        self.samples += 1
        return 1.0 + number / 10_000

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]


class Torn(RuntimeError):
    """The state mixes two steps."""


@dataclass(slots=True)
class Iteration:
    """Where one iteration's wall time went."""

    total_s: float  # from the end of the iteration before
    guard_s: float  # the optimizer's pre-step hooks
    after_s: float  # the call after the step: `after_step`, or a save


class SimJob:
    """The training loop's body. With ``ranks`` above 1 it reduces one number each iteration."""

    def __init__(self, spec: SimSpec, *, ranks: int = 1) -> None:
        self.spec = spec
        self.model = SimModel(spec)
        self.optimizer = SimOptimizer(self.model.parameters(), update_s=spec.update_s)
        self.position = Position(spec.seed)
        self.loss = math.nan
        self._ranks = ranks

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer, "data": self.position}

    @property
    def state_bytes(self) -> int:
        return KINDS * sum(p.nbytes for p in self.model.parameters())

    def iterate(self, after: Callable[[], None] | None = None) -> Iteration:
        """Train one iteration, then call ``after``."""
        began_s = time.perf_counter()
        target = self.position.take()
        self.model.running += 1.0
        sleep_until(began_s + self.spec.iteration_s - self.spec.update_s)
        self.loss = self._loss(target)
        self.optimizer.target = target
        update_s = time.perf_counter()
        self.optimizer.step()  # takes Tw from where it begins: a wait in its hooks is on top of Ti
        guard_s = self.optimizer.began_s - update_s
        done_s = time.perf_counter()
        if after is not None:
            after()
        end_s = time.perf_counter()
        return Iteration(end_s - began_s, guard_s, end_s - done_s)

    def _loss(self, target: float) -> float:
        first = torch.stack([p.detach().view(-1)[0] for p in self.model.layers])
        loss = (first - target).square().mean()
        if self._ranks > 1:
            dist.all_reduce(loss)
            loss /= self._ranks
        return float(loss)

    def run(self, iterations: int, after: Callable[[], None] | None = None) -> list[Iteration]:
        """Train so many iterations."""
        return [self.iterate(after) for _ in range(iterations)]

    def check_whole(self, step: int) -> None:
        """Compare everything that a step changes with what it must be after ``step`` steps.

        Raises:
            Torn: parts of the state are of different steps.
        """
        states = [self.optimizer.state[p] for p in self.model.layers]
        for name, tensors in (
            ("parameters", list(self.model.layers)),
            ("exp_avg", [s["exp_avg"] for s in states]),
            ("exp_avg_sq", [s["exp_avg_sq"] for s in states]),
        ):
            seen = torch.cat([touched(tensor) for tensor in tensors]).unique()
            if seen.numel() != 1:
                raise Torn(f"{name}: {seen.numel()} different values where all must be equal")
        counts = {
            "samples": self.position.samples,
            **{f"step {n}": int(s["step"]) for n, s in enumerate(states)},
            **{f"running {int(v)}": int(v) for v in self.model.running.unique()},
        }
        wrong = {name: count for name, count in counts.items() if count != step}
        if wrong:
            raise Torn(f"after {step} steps: {wrong}")


def sleep_until(deadline_s: float) -> None:
    """Sleep in chunks, as the host of an accelerator polls: without the GIL, without a core."""
    while (left_s := deadline_s - time.perf_counter()) > 0:
        time.sleep(min(left_s, SLEEP_CHUNK_S))
