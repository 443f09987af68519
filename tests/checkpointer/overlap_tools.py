"""Trainings of many kinds, and bit for bit comparison of what they saved."""

import copy

import torch
import torch.distributed.checkpoint as dcp
from behaviour_tools import blank
from torch import nn
from torch.optim.swa_utils import AveragedModel

from dcp_checkfreq import CheckFreqLoadPlanner, CheckFreqReader
from dcp_checkfreq.state.app_state import AppState

WIDE = 520  # WIDE x WIDE floats are more than a MiB: less is not overlapped


def snapshot_of(parts):
    """Return a copy of all that a save of these parts holds now."""
    return copied(AppState(parts, 0).capture())


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(inner) for inner in value)
    return copy.deepcopy(value)


def differences(got, wanted, path=""):
    """Return the paths at which two states are not equal to the last bit."""
    if isinstance(wanted, torch.Tensor):
        equal = got.dtype == wanted.dtype and torch.equal(
            got.reshape(-1).view(torch.uint8), wanted.contiguous().reshape(-1).view(torch.uint8)
        )
        return [] if equal else [path]
    if isinstance(wanted, dict):
        if got.keys() != wanted.keys():
            return [f"{path}: keys {sorted(map(str, got.keys() ^ wanted.keys()))}"]
        parts = [differences(got[key], wanted[key], f"{path}.{key}") for key in wanted]
        return [name for part in parts for name in part]
    if isinstance(wanted, (list, tuple)):
        if len(got) != len(wanted):
            return [f"{path}: {len(got)} and {len(wanted)}"]
        pairs = enumerate(zip(got, wanted, strict=True))
        parts = [differences(one, other, f"{path}.{n}") for n, (one, other) in pairs]
        return [name for part in parts for name in part]
    return [] if got == wanted else [path]


def saved_differs(root, step, wanted):
    """Load ``step`` with all digests checked; return where it differs from ``wanted``."""
    target = blank(wanted)
    folder = root.child(f"step_{step:08d}")
    dcp.load(target, storage_reader=CheckFreqReader(folder), planner=CheckFreqLoadPlanner())
    return differences(target, wanted)


class Recipe:
    """A training: ``parts`` to register, and `iterate`."""

    def __init__(self):
        torch.manual_seed(3)
        self.parts = {}
        self.model = self.parts["model"] = nn.Sequential(
            nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, 8)
        )
        self.build()
        self.data = torch.randn(64, 4, WIDE)
        self.count = 0

    def optimizers(self):
        return [part for part in self.parts.values() if isinstance(part, torch.optim.Optimizer)]

    def batch(self):
        self.count += 1
        return self.data[self.count % len(self.data)]

    def loss(self):
        return self.model(self.batch()).square().mean()

    def iterate(self):
        self.loss().backward()
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


def with_optimizer(make):
    class Simple(Recipe):
        def build(self):
            self.parts["optim"] = make(self.model.parameters())

    return Simple


class TensorRate(Recipe):
    def build(self):
        rate = torch.tensor(0.01)
        optim = self.parts["optim"] = torch.optim.AdamW(
            self.model.parameters(), lr=rate, capturable=False, foreach=False
        )
        self.parts["sched"] = torch.optim.lr_scheduler.ExponentialLR(optim, 0.9)

    def iterate(self):
        super().iterate()
        self.parts["sched"].step()


class Closures(Recipe):
    def build(self):
        self.parts["optim"] = torch.optim.LBFGS(
            self.model.parameters(), lr=0.1, max_iter=3, history_size=3
        )

    def iterate(self):
        inputs = self.batch()
        optimizer = self.parts["optim"]

        def closure():
            optimizer.zero_grad()
            loss = self.model(inputs).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


class TwoOptimizers(Recipe):
    """Weights and biases apart; the second one steps only every other time."""

    def build(self):
        weights = [p for p in self.model.parameters() if p.dim() == 2]
        biases = [p for p in self.model.parameters() if p.dim() == 1]
        self.parts["first"] = torch.optim.AdamW(weights, lr=0.01)
        self.parts["second"] = torch.optim.SGD(biases, lr=0.1, momentum=0.9)

    def iterate(self):
        self.loss().backward()
        if self.count % 2:
            self.parts["second"].step()
            self.parts["second"].zero_grad()
        self.parts["first"].step()
        self.parts["first"].zero_grad()


class Scaled(Recipe):
    """A GradScaler; one step is skipped because its gradients are infinite."""

    fused = False

    def build(self):
        self.parts["optim"] = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=self.fused)
        self.scaler = self.parts["scaler"] = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def iterate(self):
        optimizer = self.parts["optim"]
        loss = self.loss() * (float("inf") if self.count == 3 else 1.0)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()


class ScaledFused(Scaled):
    fused = True


class Accumulating(Recipe):
    """Two backwards make one step. `after_step` comes after each of them."""

    def build(self):
        self.parts["optim"] = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def iterate(self):
        self.loss().backward()
        if self.count % 2 == 0:
            self.parts["optim"].step()
            self.parts["optim"].zero_grad()


class Everything(Recipe):
    """Batch norm, dropout, tied and frozen weights, moving averages, schedules, counters."""

    def build(self):
        trunk = nn.Sequential(
            nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE),
        )  # fmt: skip
        trunk[5].weight = trunk[4].weight
        trunk[0].bias.requires_grad_(False)
        self.model = self.parts["model"] = trunk
        trained = [p for p in trunk.parameters() if p.requires_grad]
        optim = self.parts["optim"] = torch.optim.AdamW(trained, lr=0.01)
        self.average = self.parts["average"] = AveragedModel(trunk, use_buffers=True)
        self.parts["sched"] = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 20)
        self.seen = self.parts["seen"] = {"tokens": 0, "losses": [], "last": torch.zeros(8000)}

    def iterate(self):
        loss = self.loss()
        loss.backward()
        self.parts["optim"].step()
        self.parts["optim"].zero_grad()
        self.parts["sched"].step()
        self.average.update_parameters(self.model)
        self.seen["tokens"] += 4 * WIDE
        self.seen["losses"].append(float(loss.detach()))
        self.seen["last"].add_(1)


RECIPES = {
    "adamw": with_optimizer(lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False)),
    "adamw foreach": with_optimizer(lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True)),
    "adamw fused": with_optimizer(lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)),
    "adamw amsgrad": with_optimizer(lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True)),
    "sgd momentum": with_optimizer(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "sgd fused": with_optimizer(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True)),
    "sgd plain": with_optimizer(lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": with_optimizer(lambda p: torch.optim.Adagrad(p, lr=0.01)),
    "tensor rate": TensorRate,
    "closures": Closures,
    "two optimizers": TwoOptimizers,
    "scaler": Scaled,
    "scaler fused": ScaledFused,
    "accumulation": Accumulating,
    "everything": Everything,
}
