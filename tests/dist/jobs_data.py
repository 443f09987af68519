"""Jobs: wrapped iterables on several ranks, each of which has an order of its own."""

import itertools
import logging
import random

import torch
import torch.distributed as dist
from jobs import caught, job
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from dcp_checkfreq import Checkpointer, PerRank
from dcp_checkfreq.data import ResumableIterator

ITEMS, BATCH, TRAINED = 60, 4, 3


class Buffered(IterableDataset):
    """A rank's part of a stream through a shuffle buffer, as data sets of many libraries do it."""

    def __init__(self, seed=5):
        self.shift, self.rng = 0, random.Random(seed)

    def __iter__(self):
        buffer = []
        for item in range(dist.get_rank(), ITEMS, dist.get_world_size()):
            buffer.append(item + self.shift)
            if len(buffer) == 8:
                yield buffer.pop(self.rng.randrange(8))
        self.rng.shuffle(buffer)
        yield from buffer


class Positioned(IterableDataset):
    """A stream that knows where it is, which differs between ranks."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < ITEMS:
            self.at += 1 + dist.get_rank()
            yield self.at

    def state_dict(self):
        return {"at": self.at, "seen": torch.tensor([self.at])}

    def load_state_dict(self, state):
        self.at = int(state["seen"])


class Items(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index


def streamed(shift=0, **options):
    stream = Buffered()
    stream.shift = shift
    return ResumableIterator(DataLoader(stream, batch_size=BATCH), seed=2, **options)


def sampled(seed, count=ITEMS):
    items, rank = Items(count), dist.get_rank()
    sampler = DistributedSampler(items, seed=seed)
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return ResumableIterator(DataLoader(items, BATCH, sampler=sampler, generator=generator), seed=2)


def positioned():
    return ResumableIterator(DataLoader(Positioned(), batch_size=BATCH), mode="own")


def batches_of(iterator, count=1000):
    return [batch.tolist() for batch in itertools.islice(iterator, count)]


def saved(root, iterator, part=None):
    """Train some batches, save, and return those that are left."""
    with Checkpointer(root, {"data": iterator if part is None else part}, every=1000) as ckpt:
        batches_of(iterator, TRAINED)
        ckpt.step = 1
        ckpt.save(wait=True)
    left = batches_of(iterator)
    assert left
    return left


def restored(root, iterator, part=None):
    """Restore, and return what is left, or the error's class and text."""

    def go_on():
        with Checkpointer(root, {"data": iterator if part is None else part}, every=1000) as ckpt:
            ckpt.restore()
        return batches_of(iterator)

    left = []
    error = caught(lambda: left.extend(go_on()))
    return left if error is None else error


class Common:
    """Saves what earlier versions saved on several ranks."""

    def __init__(self, iterator):
        self.iterator = iterator

    def state_dict(self):
        return self.iterator.state_dict()

    def load_state_dict(self, state):
        self.iterator.load_state_dict(state)


@job
def wrapped_iterables_as_they_are(shared):
    rank, root = dist.get_rank(), shared / "wrapped"
    left = saved(root, streamed())
    state = streamed().state_dict()
    return {
        "same": restored(root, streamed()) == left,
        "other on rank 1": restored(root, streamed(100 * rank)),
        "other, per rank": restored(root, *[one := streamed(100 * rank), PerRank(one)]),
        "not compared": restored(root, streamed(100 * rank, compare=False))
        == [[item + 100 * rank for item in batch] for batch in left],
        "common": state,
    }


@job
def wrapped_samplers_as_they_are(shared):
    rank, root = dist.get_rank(), shared / "samplers"
    left = saved(root, sampled(3))
    return {
        "same": restored(root, sampled(3)) == left,
        "seed of all": restored(root, sampled(4)),
        "seed of rank 1": restored(root, sampled(3 + rank)),
        "grown": restored(root, sampled(3, ITEMS + 8)),
    }


@job
def wrapped_keepers_as_they_are(shared):
    root = shared / "keepers"
    left = saved(root, positioned())
    return {"same": restored(root, positioned()) == left, "left": left}


@job
def wrapped_otherwise_than_saved(shared):
    rank = dist.get_rank()
    one = streamed()
    left = saved(shared / "per_rank", one, PerRank(one))
    one = streamed()
    left_before = saved(shared / "before", one, Common(one))
    heard = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: heard.append(record.getMessage())
    logger = logging.getLogger("dcp_checkfreq.data.wrap.iterator")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        answers = {
            "of PerRank": restored(shared / "per_rank", streamed()) == left,
            "of PerRank, other": restored(shared / "per_rank", streamed(100 * rank)),
            "of before": restored(shared / "before", streamed()) == left_before,
        }
    finally:
        logger.removeHandler(handler)
    swapped = streamed(rank=1 - rank, world_size=2)
    answers["ranks swapped"] = restored(shared / "wrapped", swapped)
    return answers | {"heard": [one for one in heard if "in common" in one]}


@job
def wrapped_on_more_ranks(shared):
    iterator = streamed()
    with Checkpointer(shared / "between", {"data": iterator}, every=1000) as ckpt:
        batches_of(iterator)
        ckpt.step = 1
        ckpt.save(wait=True)
    return iterator.epoch


@job
def wrapped_on_other_ranks(shared):
    middle = restored(shared / "wrapped", streamed())
    iterator = streamed()
    with Checkpointer(shared / "between", {"data": iterator}, every=1000) as ckpt:
        ckpt.restore()
    return {"middle": middle, "epoch": iterator.epoch, "batches": len(batches_of(iterator))}
