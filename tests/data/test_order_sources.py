"""`ResumableIterator` and where an order comes from: each source is set at each epoch, or refused.

Every case is cut in several epochs and goes on in objects that are made anew, as after a restart.
"""

import functools
import random

import numpy as np
import pytest
import torch
from loader_tools import Ids, as_lists, batches_of, generator, load, take
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dcp_checkfreq.data import (
    DataStateError,
    ResumableBatchSampler,
    ResumableIterator,
    ResumableLoader,
)


class OwnRandom(Sampler):
    """Shuffles with a generator of its own, of any kind."""

    def __init__(self, length, rng):
        self.length, self.rng = length, rng

    def __len__(self):
        return self.length

    def __iter__(self):
        order = list(range(self.length))
        self.rng.shuffle(order)
        return iter(order)


class Wrapping:
    """A batch sampler around a batch sampler, as libraries have them."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __iter__(self):
        return iter(self.inner)


class Buffered(IterableDataset):
    """A stream with a shuffle buffer and a generator of its own, shared out among workers."""

    def __init__(self, rng):
        self.rng = rng

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        buffer = []
        for item in range(first, 60, step):
            buffer.append(item)
            if len(buffer) == 10:
                yield buffer.pop(self.rng.randrange(10))
        while buffer:
            yield buffer.pop(self.rng.randrange(len(buffer)))


class Noisy(Ids):
    """Draws from what it is given, or from what is deeper inside."""

    def __init__(self, length, draw):
        super().__init__(length)
        self.draw = draw

    def __getitem__(self, index):
        return index, self.draw()


class Slotted:
    __slots__ = ("rng",)

    def __init__(self, rng):
        self.rng = rng

    def __call__(self):
        return self.rng.random()


class Told(Dataset):
    """Has an epoch of its own, which somebody must tell it."""

    def __init__(self):
        self.epoch = None

    def __len__(self):
        return 30

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return index, self.epoch


class Zipped:
    """Takes from two loaders at once."""

    def __init__(self, size=3, **options):
        self.a = load(Ids(20), batch_size=size, shuffle=True, generator=generator(1))
        self.parts = [load(Noisy(30, random.random), shuffle=True, **options)]

    def __iter__(self):
        return zip(self.a, *self.parts, strict=False)


def closing_over(rng):
    return lambda: rng.random()


LOADERS = {
    "generator": lambda: load(Ids(30), shuffle=True, generator=generator()),
    "generator, workers": lambda: load(Ids(30), shuffle=True, generator=generator(), num_workers=1),
    "persistent": lambda: load(
        Noisy(30, random.random), shuffle=True, num_workers=2, persistent_workers=True
    ),
    "persistent stream": lambda: load(
        Buffered(random.Random(1)), num_workers=2, persistent_workers=True, prefetch_factor=4
    ),
    "random sampler": lambda: load(Ids(30), sampler=RandomSampler(Ids(30), generator=generator())),
    "weighted": lambda: load(
        Ids(30), sampler=WeightedRandomSampler(torch.arange(30) + 1.0, 40, generator=generator())
    ),
    "subset": lambda: load(
        Ids(30), sampler=SubsetRandomSampler(range(5, 25), generator=generator())
    ),
    "random.Random": lambda: load(Ids(30), sampler=OwnRandom(30, random.Random(3))),
    "unseeded": lambda: load(Ids(30), sampler=OwnRandom(30, random.Random())),
    "default_rng": lambda: load(Ids(30), sampler=OwnRandom(30, np.random.default_rng(3))),
    "default_rng, unseeded": lambda: load(Ids(30), sampler=OwnRandom(30, np.random.default_rng())),
    "RandomState": lambda: load(Ids(30), sampler=OwnRandom(30, np.random.RandomState(3))),
    "batch sampler": lambda: DataLoader(
        Ids(30),
        batch_sampler=Wrapping(BatchSampler(OwnRandom(30, random.Random(3)), 4, drop_last=False)),
        collate_fn=as_lists,
    ),
    "no batches": lambda: load(
        Noisy(30, random.Random(2).random), batch_size=None, shuffle=True, generator=generator()
    ),
    "stream": lambda: load(Buffered(random.Random(2))),
    "stream, workers": lambda: load(Buffered(random.Random(2)), num_workers=2),
    "slots": lambda: load(Noisy(30, Slotted(random.Random(7)))),
    "partial": lambda: load(Noisy(30, functools.partial(random.Random.random, random.Random(7)))),
    "closure": lambda: load(Noisy(30, closing_over(np.random.default_rng(7)))),
    "deep": lambda: load(
        ConcatDataset([Subset(Noisy(30, {"a": [Slotted(random.Random(7))]}["a"][0]), range(20))])
    ),
    "told": lambda: load(Told(), shuffle=True),
    "told inside": lambda: load(ConcatDataset([Subset(Told(), range(20)), Told()])),
    "told, workers": lambda: load(Told(), num_workers=1, persistent_workers=True),
    "two loaders": Zipped,
    "two loaders, persistent": lambda: Zipped(num_workers=1, persistent_workers=True),
    "process-wide by name": lambda: load(
        Ids(30), shuffle=True, generator=torch.default_generator
    ),
}  # fmt: skip


def disturb():
    for _ in range(random.SystemRandom().randrange(9)):
        random.random(), np.random.rand(), torch.rand(())


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADERS)
def test_what_is_cut_in_any_epoch_goes_on_as_if_nothing_had_been(name):
    whole = ResumableIterator(LOADERS[name](), seed=3)
    start = whole.state_dict()  # of a generator that nobody seeded, what it began with
    wanted = [batches_of(whole) for _ in range(3)]
    assert "RandomSampler" not in name or wanted[0] != wanted[1]
    state, found = start, [[], [], []]
    for count in (2, None, 1, 3, None, 4, None):
        disturb()
        iterator = ResumableIterator(LOADERS[name](), seed=3)
        iterator.load_state_dict(state)
        found[iterator.epoch] += batches_of(iterator, count)
        state = iterator.state_dict()
    assert found == wanted


@pytest.mark.parametrize("name", ["generator", "random.Random", "stream", "weighted"])
def test_epochs_differ_from_each_other(name):
    iterator = ResumableIterator(LOADERS[name](), seed=3)
    first, second = batches_of(iterator), batches_of(iterator)
    assert first != second


def test_generators_that_were_seeded_otherwise_give_another_order():
    """As ranks do that seed theirs with their number."""

    def make(seed):
        return ResumableIterator(load(Ids(30), shuffle=True, generator=generator(seed)))

    assert take(make(1)) == take(make(1)) != take(make(2))
    by_rank = [ResumableIterator(load(Ids(30), sampler=OwnRandom(30, random.Random(rank))))
               for rank in range(2)]  # fmt: skip
    assert take(by_rank[0]) != take(by_rank[1])


def test_generators_of_the_training_are_let_be():
    model = torch.nn.Module()
    model.noise = generator(1)
    data = Ids(10)
    data.model = model
    before = model.noise.get_state()
    take(ResumableIterator(load(data)))
    assert torch.equal(model.noise.get_state(), before)


# --- refused ---


class Once(Sampler):
    def __init__(self):
        self.left = iter(range(30))

    def __len__(self):
        return 30

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.left)


class Holding:
    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(self.inner)


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: iter([1]), TypeError, "only once"),
        (lambda: (n for n in range(3)), TypeError, "generator can be iterated only once"),
        (lambda: load(Ids(30), sampler=Once()), TypeError, "sampler=Once can be iterated only"),
        (lambda: load(Ids(30), sampler=iter(range(9))), TypeError, "sampler=range_iterator"),
        (lambda: DataLoader(Ids(30), batch_sampler=iter([[1]])), TypeError, "batch_sampler=list_"),
        (lambda: load(Ids(30), num_workers=2, in_order=False), ValueError, "in_order=True"),
        (lambda: ResumableLoader(Ids(30), 4), TypeError, "ResumableLoader knows its position"),
        (
            lambda: DataLoader(Ids(30), batch_sampler=ResumableBatchSampler(30, 4)),
            TypeError,
            "batch_sampler knows its position .* Register it as it is",
        ),
        (lambda: ResumableIterator([1]), TypeError, "knows its position"),
        (lambda: Zipped(num_workers=1, in_order=False), ValueError, "parts.0.in_order=False"),
        (lambda: Holding(ResumableLoader(Ids(30), 4)), TypeError, "inner knows its position"),
    ],
)
@pytest.mark.parametrize("mode", ["replay", "epoch"])
def test_what_cannot_be_replayed_is_refused_when_it_is_wrapped(make, kind, said, mode):
    with pytest.raises(kind, match=said):
        ResumableIterator(make(), mode=mode)


# --- what makes the batches ---


def other_collate(samples):
    return list(samples)


def distributed(**options):
    return DistributedSampler(Ids(48), num_replicas=2, rank=0, **options)


def stream(**options):
    return load(Buffered(random.Random(1)), **options)


CHANGES = [
    (lambda: load(Ids(24)), lambda: load(Ids(24), batch_size=6), "batch size was 4, now it is 6"),
    (lambda: load(Ids(26)), lambda: load(Ids(26), drop_last=True), "drop_last was False, now it"),
    (lambda: load(Ids(24)), lambda: load(Ids(24), shuffle=True),
     "sampler was 'SequentialSampler', now it is 'RandomSampler'"),
    (lambda: load(Ids(24)), lambda: load(Ids(28)), "number of items was 24, now it is 28"),
    (lambda: load(Ids(24)), lambda: load(Ids(24), collate_fn=other_collate),
     "collate_fn was 'as_lists', now it is 'other_collate'"),
    (lambda: load(Ids(24)), lambda: [[1]] * 6, "kind of loader was 'DataLoader', now it is 'list'"),
    (lambda: [[1]] * 6, lambda: [[1]] * 7, "number of batches was 6, now it is 7"),
    (lambda: stream(num_workers=2), lambda: stream(num_workers=1), "workers was 2, now it is 1"),
    (lambda: stream(num_workers=2), stream, "number of workers was 2, now it is 0"),
    (lambda: load(Ids(48), sampler=distributed(seed=1)),
     lambda: load(Ids(48), sampler=distributed(seed=2)), "seed=1.*now it is.*seed=2"),
    (lambda: load(Ids(48), sampler=distributed()),
     lambda: load(Ids(48), sampler=distributed(shuffle=False)), "shuffle=True.*shuffle=False"),
    (lambda: load(Ids(24), sampler=RandomSampler(Ids(24))),
     lambda: load(Ids(24), sampler=RandomSampler(Ids(24), replacement=True)), "replacement=True"),
    (lambda: load(Ids(9), sampler=WeightedRandomSampler([1.0] * 9, 20)),
     lambda: load(Ids(9), sampler=WeightedRandomSampler([1.0] * 8 + [2.0], 20)), "weights="),
    (lambda: load(Ids(24), sampler=SubsetRandomSampler(range(12))),
     lambda: load(Ids(24), sampler=SubsetRandomSampler(range(12, 24))), "indices="),
    (lambda: load(Ids(24), shuffle=True, generator=generator(5)),
     lambda: load(Ids(24), shuffle=True, generator=generator(6)),
     r"seed of 'generator' was 5, now it is 6|seed of '.*generator' was 5, now it is 6"),
    (lambda: load(Ids(24), shuffle=True, generator=generator(5)),
     lambda: load(Ids(24), shuffle=True), "there was a generator '.*generator', now there is none"),
    (lambda: load(Ids(24), shuffle=True),
     lambda: load(Ids(24), shuffle=True, generator=generator(5)), "now, there was none"),
    (Zipped, lambda: Zipped(4), "batch size of 'a' was 3, now it is 4"),
    (Zipped, lambda: Zipped(drop_last=True), "drop_last of 'parts.0' was False, now it is True"),
    (lambda: DataLoader(Ids(24), batch_sampler=BatchSampler(SequentialSampler(Ids(24)), 4, False)),
     lambda: DataLoader(Ids(24), batch_sampler=Wrapping([[0]] * 6)), "sampler was"),
    (lambda: DataLoader(Ids(24), batch_sampler=BatchSampler(SequentialSampler(Ids(24)), 4, False)),
     lambda: DataLoader(Ids(24), batch_sampler=BatchSampler(SequentialSampler(Ids(24)), 6, False)),
     "number of batches was 6, now it is 4"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "said"), CHANGES)
def test_other_makers_of_batches_are_refused_in_mid_epoch_with_both_values(
    before, after, said, caplog
):
    first = ResumableIterator(before())
    batches_of(first, 2)
    second = ResumableIterator(after())
    untouched = second.state_dict()
    with pytest.raises(DataStateError, match=said):
        second.load_state_dict(first.state_dict())
    assert second.state_dict() == untouched
    second.load_state_dict(first.state_dict(), on_mismatch="restart_epoch")
    assert (second.epoch, second.batches) == (0, 0)
    batches_of(first)
    caplog.clear()
    second.load_state_dict(first.state_dict())  # between epochs it is a warning
    assert (second.epoch, second.batches) == (1, 0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_what_does_not_change_the_batches_may_change():
    first = ResumableIterator(load(Ids(24), shuffle=True))
    found = batches_of(first, 2)
    options = {"num_workers": 2, "prefetch_factor": 4, "timeout": 100}
    second = ResumableIterator(load(Ids(24), shuffle=True, **options))
    second.load_state_dict(first.state_dict())
    found += batches_of(second)
    assert found == batches_of(ResumableIterator(load(Ids(24), shuffle=True)))


def test_another_number_of_samples_per_step_is_told_with_both_figures(caplog):
    def make(size, world):
        return ResumableIterator(load(Ids(24), batch_size=size), rank=0, world_size=world)

    make(4, 1).load_state_dict(make(4, 2).state_dict())
    assert "number of samples per step was 8, now it is 4" in caplog.text
    caplog.clear()
    make(6, 1).load_state_dict(make(4, 1).state_dict())
    assert "samples per step was 4, now it is 6" in caplog.text
    assert "number of batches was 6, now it is 4" in caplog.text
