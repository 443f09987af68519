"""Schedulers, scalers, samplers and random numbers of the zoo."""

import inspect
import random
import warnings

import torch
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR
from torch.utils.data import DistributedSampler, RandomSampler, WeightedRandomSampler
from zoo import Job, Row, job_of, loss_of, numbers

X = numbers(4, 3)
SCHEDULERS: dict[str, Row] = {}
OTHERS: dict[str, Row] = {}


def torchs_own():
    """Return torch's schedulers by name, those of later versions as well."""
    found = {
        name: kind
        for name, kind in vars(lr).items()
        if inspect.isclass(kind) and issubclass(kind, lr.LRScheduler) and not name.startswith("_")
    }
    del found["LRScheduler"]
    return found | {"ReduceLROnPlateau": lr.ReduceLROnPlateau, "SWALR": SWALR}


class Decay:
    """A rate that is an object, whose fields torch saves."""

    def __init__(self):
        self.calls = 0

    def __call__(self, epoch):
        self.calls += 1
        return 0.9**epoch


MAKERS = {
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR of an object": lambda o: lr.LambdaLR(o, Decay()),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr.StepLR(o, 2),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [1, 1, 3, 4]),
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.3, 3),
    "LinearLR": lambda o: lr.LinearLR(o, 0.2, total_iters=5),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CyclicLR, triangular2": lambda o: lr.CyclicLR(o, 0.01, 0.1, 2, mode="triangular2"),
    "CyclicLR, a function": lambda o: lr.CyclicLR(o, 0.01, 0.1, 2, scale_fn=lambda x: 0.5),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.3, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SWALR": lambda o: SWALR(o, 0.01, anneal_epochs=3),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.2, total_iters=2), lr.CosineAnnealingLR(o, 5)], [2]
    ),
    "ChainedScheduler": lambda o: lr.ChainedScheduler(
        [lr.LinearLR(o, 0.2, total_iters=2), lr.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR in a ChainedScheduler": lambda o: lr.ChainedScheduler(
        [
            lr.SequentialLR(o, [lr.ConstantLR(o, 0.5, 2), lr.StepLR(o, 2)], [2]),
            lr.ExponentialLR(o, 0.9),
        ],
        optimizer=o,
    ),
}


def scheduled(make, *, tensor_lr=False, groups=False):
    def made():
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        rate = torch.tensor(0.1) if tensor_lr else 0.1
        every = (
            [{"params": part.parameters(), "lr": 0.1 + n} for n, part in enumerate(model)]
            if groups
            else model.parameters()
        )
        optimizer = torch.optim.SGD(every, lr=rate, momentum=0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler = make(optimizer)

        def step():
            loss = loss_of(model(X))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if isinstance(scheduler, lr.ReduceLROnPlateau):
                    scheduler.step(float(loss))
                else:
                    scheduler.step()

        parts = {"model": model, "optim": optimizer, "scheduler": scheduler}
        return Job(parts, step, lambda: scheduler.get_last_lr())

    return made


for _name, _make in MAKERS.items():
    SCHEDULERS[_name] = Row(scheduled(_make))
    SCHEDULERS[f"{_name}, restored into a used one"] = Row(scheduled(_make), fresh_steps=3)
for _name in ("StepLR", "CosineAnnealingLR", "SequentialLR", "ReduceLROnPlateau", "OneCycleLR"):
    SCHEDULERS[f"{_name}, rates that are tensors"] = Row(scheduled(MAKERS[_name], tensor_lr=True))
for _name in ("LinearLR", "ExponentialLR", "CosineAnnealingLR", "ChainedScheduler"):
    SCHEDULERS[f"{_name}, a rate for each group"] = Row(scheduled(MAKERS[_name], groups=True))


def other(name, **stated):
    def add(make):
        OTHERS[name] = Row(make, **stated)
        return make

    return add


@other("GradScaler")
def _():
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    job = job_of(nn.Linear(3, 2), X, scaler=scaler)

    def step():
        scaler.scale(loss_of(job.parts["model"](X))).backward()
        scaler.step(job.parts["optim"])
        scaler.update()
        job.parts["optim"].zero_grad()

    job.step = step
    return job


@other("GradScaler that has found no number")
def _():
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    model = nn.Linear(3, 2)
    job = job_of(model, X, scaler=scaler)

    def step():
        scaler.scale(loss_of(model(X)) * float("inf")).backward()
        scaler.step(job.parts["optim"])
        scaler.update()
        job.parts["optim"].zero_grad()

    job.step = step
    return job


class Randomness:
    """Random numbers of Python and torch."""

    def state_dict(self):
        return {"python": random.getstate(), "torch": torch.get_rng_state()}

    def load_state_dict(self, state):
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])


class Generators:
    """A generator of one's own, as samplers have."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(int(torch.randint(1000, (1,))))

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


@other("a sampler with a generator of its own")
def _():
    own = Generators()
    samplers = [
        RandomSampler(range(9), generator=own.generator),
        WeightedRandomSampler([1.0, 2.0, 3.0], 5, generator=own.generator),
    ]
    drawn = []
    job = Job({"generators": own}, lambda: drawn.__setitem__(slice(None), map(list, samplers)))
    job.also = lambda: list(map(list, samplers))
    return job


@other("a sampler that counts epochs")
def _():
    sampler = DistributedSampler(range(9), num_replicas=2, rank=0)

    class Epoch:
        def state_dict(self):
            return {"epoch": sampler.epoch}

        def load_state_dict(self, state):
            sampler.set_epoch(state["epoch"])

    return Job({"epoch": Epoch()}, lambda: sampler.set_epoch(sampler.epoch + 1), lambda: [*sampler])


@other("a GAN: two models, optimizers and schedulers")
def _():
    jobs = [scheduled(MAKERS[name])() for name in ("LinearLR", "ChainedScheduler")]
    parts = {f"{key}{at}": part for at, job in enumerate(jobs) for key, part in job.parts.items()}
    return Job(parts, lambda: [job.step() for job in jobs])
