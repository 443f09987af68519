"""Data sets and helpers for the tests of loaders."""

import itertools
import os
import random
import signal
from collections import Counter

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from dcp_checkfreq.data import ResumableLoader, sample_rng


class Ids(Dataset):
    """Yields its indices."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


class Draws(Ids):
    """Yields the index, and what each source of randomness gives for it."""

    def __getitem__(self, index):
        return (
            index,
            random.random(),
            np.random.rand(),
            torch.rand(()).item(),
            sample_rng().random(),
            sample_rng().random(),
        )


class Dies(Ids):
    """Its worker is killed while it makes one item, once."""

    def __init__(self, length, at, flag):
        super().__init__(length)
        self.at, self.flag = at, flag

    def __getitem__(self, index):
        if index == self.at and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Fails(Ids):
    """One of its items cannot be read, until it is told that it can."""

    def __init__(self, length, at, error):
        super().__init__(length)
        self.at, self.error = at, error

    def __getitem__(self, index):
        if index == self.at:
            raise self.error
        return index


def as_lists(samples):
    """Collate that keeps the samples as they are."""
    return list(samples)


def take(loader, batches=None):
    """Return the samples of the next batches, or of the rest of the epoch."""
    found = []
    for number, batch in enumerate(loader, start=1):
        found += batch
        if number == batches:
            break
    return found


class Job:
    """All ranks of one launch of a job, in one process: each has its loader."""

    def __init__(self, world, dataset, batch_size, state=None, **options):
        self.loaders = [
            ResumableLoader(
                dataset, batch_size, rank=rank, world_size=world, collate_fn=as_lists, **options
            )
            for rank in range(world)
        ]
        if state is not None:
            for loader in self.loaders:
                loader.load_state_dict(state)

    def run(self, steps=None):
        """Run so many steps, or the rest of the epoch; return (the steps' real samples, state)."""
        done, iterators = [], [iter(loader) for loader in self.loaders]
        while steps is None or len(done) < steps:
            try:
                batches = [next(iterator) for iterator in iterators]
            except StopIteration:
                break
            done.append(
                [
                    sample
                    for loader, batch in zip(self.loaders, batches, strict=True)
                    for sample in batch[: loader.valid]
                ]
            )
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return done, states[0]


def flat(steps):
    return [sample for step in steps for sample in step]


def lost_and_repeated(found, length):
    times = Counter(found)
    lost = [index for index in range(length) if not times[index]]
    return lost, [index for index, count in times.items() if count > 1]


def generator(seed=5):
    return torch.Generator().manual_seed(seed)


def load(dataset, **options):
    return DataLoader(dataset, **{"batch_size": 4, "collate_fn": as_lists, **options})


def batches_of(iterator, count=None):
    return list(itertools.islice(iterator, count))
