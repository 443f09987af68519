"""`ResumableIterator` and what it has handed out: a replay that goes another way is noticed."""

import itertools
import json
import random

import pytest
from loader_tools import Ids, as_lists, batches_of, generator, load, take
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from dcp_checkfreq import Checkpointer, PerRank
from dcp_checkfreq.data import DataStateError, ResumableIterator


class Shifting(Ids):
    """A data set of which some items are others after a restart."""

    shift = 0

    def __getitem__(self, index):
        return index + self.shift * (index >= 20)


def test_a_replay_that_goes_another_way_is_noticed_and_says_where():
    first = ResumableIterator(load(Shifting(80)))
    batches_of(first, 8)
    state = first.state_dict()
    data = Shifting(80)
    data.shift = 1
    second = ResumableIterator(load(data))
    second.load_state_dict(state)
    for _ in range(2):  # as often as one tries
        with pytest.raises(DataStateError, match=r"epoch 0 went another way: batch 6 of 8 .*comp"):
            next(iter(second))
        assert second.state_dict() == state
    data.shift = 0
    assert batches_of(second) == batches_of(ResumableIterator(load(Shifting(80))))[8:]


def test_a_shuffle_that_nobody_can_set_is_noticed_at_its_first_batch():
    class InPlace(Sampler):
        def __init__(self):
            self.order = list(range(100))

        def __len__(self):
            return 100

        def __iter__(self):
            random.shuffle(self.order)  # of the order of the epoch before
            return iter(self.order)

    first = ResumableIterator(load(Ids(100), sampler=InPlace()))
    take(first)
    batches_of(first, 20)
    second = ResumableIterator(load(Ids(100), sampler=InPlace()))
    second.load_state_dict(first.state_dict())
    with pytest.raises(DataStateError, match="epoch 1 went another way: batch 1 of 20"):
        next(iter(second))


class CountsItsEpochs(Sampler):
    """Has no `set_epoch`, so its order depends on how often it was iterated in this process."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 40

    def __iter__(self):
        self.epoch += 1
        return iter(random.Random(self.epoch).sample(range(40), 40))


@pytest.mark.parametrize("batches", [0, 3])
def test_a_sampler_that_counts_its_epochs_is_noticed_within_an_epoch_but_not_between_two(batches):
    def make():
        return ResumableIterator(load(Ids(40), sampler=CountsItsEpochs()))

    first = make()
    of_epoch_0 = batches_of(first)
    batches_of(first, batches) if batches else None
    second = make()
    second.load_state_dict(first.state_dict())
    if batches:
        with pytest.raises(DataStateError, match="another way: batch 1 of 3"):
            next(iter(second))
        return
    assert batches_of(second) == of_epoch_0  # each item once, in the order of a new process
    assert second.epoch == 2


def test_a_loop_that_is_left_and_begun_again_is_compared_too():
    class Moving(IterableDataset):
        at = 0

        def __iter__(self):
            while self.at < 60:
                self.at += 1
                yield self.at

    iterator = ResumableIterator(load(Moving()))
    batches_of(iterator, 2)
    with pytest.raises(DataStateError, match="batch 1 of 2"):
        next(iter(iterator))


class Times(Ids):
    """Each item has its id, and what is another one in each process."""

    def __getitem__(self, index):
        return {"id": index, "took_s": random.SystemRandom().random()}


def ids_of(batch):
    return [sample["id"] for sample in batch]


@pytest.mark.parametrize("compare", [ids_of, False])
def test_what_differs_in_each_process_can_be_left_out(compare):
    first = ResumableIterator(load(Times(40)), compare=compare)
    found = [ids_of(batch) for batch in batches_of(first, 3)]
    strict = ResumableIterator(load(Times(40)))
    second = ResumableIterator(load(Times(40)), compare=compare)
    second.load_state_dict(first.state_dict())
    found += [ids_of(batch) for batch in second]
    assert [item for batch in found for item in batch] == list(range(40))
    if compare is False:
        assert "trail" not in json.loads(first.state_dict()["state"])
        return
    strict.load_state_dict(ResumableIterator(load(Times(40)), compare=ids_of).state_dict())
    batches_of(strict, 1)
    with pytest.raises(DataStateError, match="compare="):
        next(iter(strict))


class Noisy(Ids):
    def __getitem__(self, index):
        return index, random.random()


def test_random_numbers_that_depend_on_the_workers_are_named():
    def make(workers):
        return ResumableIterator(load(Noisy(40), num_workers=workers))

    first = make(2)
    batches_of(first, 3)
    second = make(1)
    second.load_state_dict(first.state_dict())
    with pytest.raises(DataStateError, match="number of workers was 2, now it is 1"):
        next(iter(second))


def test_an_endless_loader_goes_on():
    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                yield random.randrange(1000)

    whole = batches_of(ResumableIterator(load(Endless()), seed=2), 40)
    first = ResumableIterator(load(Endless()), seed=2)
    found = batches_of(first, 25)
    assert len(first.state_dict()["state"]) < 1000
    second = ResumableIterator(load(Endless()), seed=2)
    second.load_state_dict(first.state_dict())
    assert found + batches_of(second, 15) == whole


# --- other libraries' ---


class HFLike:
    """As `datasets.IterableDataset`: told the epoch, can say where it is, begins anew."""

    def __init__(self, rng=None):
        self.epoch, self.at, self.rng = 0, 0, rng

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(40))
        random.Random(self.epoch).shuffle(order)
        start, self.at = self.at, 0
        for number, item in enumerate(order[start:], start=start):
            self.now = number + 1
            yield item
        self.now = 0

    def state_dict(self):
        return {"at": self.now}

    def load_state_dict(self, state):
        self.at = self.now = state["at"]


@pytest.mark.parametrize("mode", ["replay", "own"])
def test_a_stream_with_a_state_goes_on_either_way(mode):
    whole = ResumableIterator(HFLike())
    wanted = [list(whole), list(whole)]
    first = ResumableIterator(HFLike(), mode=mode)
    list(first)
    found = batches_of(first, 7)
    second = ResumableIterator(HFLike(), mode=mode)
    second.load_state_dict(first.state_dict())
    assert found + list(second) == wanted[1]


class SkipBatchSampler(BatchSampler):
    """As accelerate's."""

    def __init__(self, batch_sampler, skip_batches):
        self.batch_sampler, self.skip_batches = batch_sampler, skip_batches

    def __iter__(self):
        return itertools.islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self):
        return len(self.batch_sampler) - self.skip_batches


def test_what_accelerate_has_skipped_is_not_skipped_twice():
    """`skip_first_batches` after a restart, as its docs say, around a loader that replays."""

    def make(skip):
        plain = load(Ids(40), shuffle=True)
        sampler = SkipBatchSampler(plain.batch_sampler, skip)
        skipping = DataLoader(Ids(40), batch_sampler=sampler, collate_fn=as_lists)
        return ResumableIterator(skipping if skip else plain)

    first = make(0)
    batches_of(first, 3)
    with pytest.raises(DataStateError, match="SkipBatchSampler"):
        make(3).load_state_dict(first.state_dict())
    first = make(2)
    batches_of(first, 3)
    with pytest.raises(DataStateError, match=r"skip_batches=2.*skip_batches=3"):
        make(3).load_state_dict(first.state_dict())


def test_a_stateful_loader_whose_own_state_counts_batches_is_held_to_its_batch_size():
    class Stateful(DataLoader):
        at = 0

        def __iter__(self):
            start, self.at = self.at, 0
            for number, batch in enumerate(super().__iter__()):
                if number >= start:
                    self.now = number + 1
                    yield batch

        def state_dict(self):
            return {"at": self.now}

        def load_state_dict(self, state):
            self.at = self.now = state["at"]

    def make(size):
        return ResumableIterator(Stateful(Ids(24), size, collate_fn=as_lists), mode="own")

    first = make(4)
    batches_of(first, 2)
    with pytest.raises(DataStateError, match="batch size was 4, now it is 6"):
        make(6).load_state_dict(first.state_dict())
    same = make(4)
    same.load_state_dict(first.state_dict())
    assert batches_of(same)[0] == [8, 9, 10, 11]


# --- ranks, and states of before ---


def test_on_several_ranks_the_state_is_the_same_unless_it_is_kept_per_rank():
    def make(rank):
        sampler = DistributedSampler(Ids(48), num_replicas=2, rank=rank)
        loader = load(Ids(48), sampler=sampler, generator=generator(rank))
        return ResumableIterator(loader, rank=rank, world_size=2)

    iterators = [make(rank) for rank in range(2)]
    assert batches_of(iterators[0], 3) != batches_of(iterators[1], 3)
    states = [iterator.state_dict() for iterator in iterators]
    assert states[0] == states[1]
    kept = [PerRank(iterator).value.state_dict() for iterator in iterators]
    assert kept[0] != kept[1]
    other = make(1)
    other.load_state_dict(states[0])
    assert batches_of(other) == batches_of(iterators[1])
    with pytest.raises(DataStateError, match=r"seed of '.*generator' was 0, now it is 1"):
        make(1).load_state_dict(kept[0])


def test_through_a_checkpointer_per_rank(tmp_path):
    def make():
        return ResumableIterator(load(Shifting(40), shuffle=True), rank=1, world_size=2)

    iterator = make()
    with Checkpointer(tmp_path, {"data": PerRank(iterator)}, every=1, keep_last=2) as ckpt:
        for _ in batches_of(iterator, 3):
            ckpt.after_step()
    again = make()
    again.loader.dataset.shift = 1
    with Checkpointer(tmp_path, {"data": PerRank(again)}, every=100) as ckpt:
        ckpt.restore()
        with pytest.raises(DataStateError, match="another way"):
            next(iter(again))
        again.loader.dataset.shift = 0
        assert batches_of(again) == batches_of(iterator)


OLD = '{"format":1,"epoch":1,"batches":3,"seed":3,"world_size":1,"dataset":""}'


@pytest.mark.parametrize("more", [{}, {"trail": "9:of a later version"}, {"note": 5}])
def test_states_of_other_versions_load(more):
    whole = ResumableIterator(load(Ids(40), shuffle=True), seed=3)
    take(whole)
    wanted = batches_of(whole)
    iterator = ResumableIterator(load(Ids(40), shuffle=True), seed=3)
    iterator.load_state_dict({"state": json.dumps(json.loads(OLD) | more)})
    assert iterator.steps_left == 7
    assert batches_of(iterator, 2) == wanted[3:5]
    again = ResumableIterator(load(Ids(40), shuffle=True), seed=3)
    again.load_state_dict(iterator.state_dict())  # which is compared from here on
    assert batches_of(again) == wanted[5:]


class OwnRandom(Sampler):
    def __init__(self):
        self.rng = random.Random(3)

    def __len__(self):
        return 40

    def __iter__(self):
        return iter(self.rng.sample(range(40), 40))


OWN_GENERATORS = {
    "torch": lambda: load(Ids(40), shuffle=True, generator=generator(5)),
    "random": lambda: load(Ids(40), sampler=OwnRandom()),
}


@pytest.mark.parametrize("name", OWN_GENERATORS)
def test_an_epoch_that_an_earlier_version_began_goes_on_as_it_did(name):
    """It let generators of the loader's own be, so its first epoch began with them as made."""
    make = OWN_GENERATORS[name]
    wanted = list(make())  # the loader alone
    old = json.dumps(json.loads(OLD) | {"epoch": 0, "world_size": 1})
    first = ResumableIterator(make(), seed=3)
    first.load_state_dict({"state": old})
    assert batches_of(first, 2) == wanted[3:5]
    assert batches_of(first, 1) == wanted[5:6]  # the loop is left, and begun again
    second = ResumableIterator(make(), seed=3)
    second.load_state_dict(first.state_dict())
    assert batches_of(second) == wanted[6:]
    whole = ResumableIterator(make(), seed=3)
    batches_of(whole)
    assert batches_of(second) == batches_of(whole)  # from the next epoch on it is as it is now
    assert "as_before" not in json.loads(second.state_dict()["state"])


@pytest.mark.parametrize(
    "make",
    [*OWN_GENERATORS.values(), lambda: load(Ids(40), num_workers=1, persistent_workers=True)],
)
def test_a_later_epoch_of_an_earlier_version_cannot_be_had_again(make):
    iterator = ResumableIterator(make(), seed=3)
    with pytest.raises(
        DataStateError, match=r"earlier version, which let .* continue from .*epoch 1"
    ):
        iterator.load_state_dict({"state": OLD})
    iterator.load_state_dict({"state": OLD}, on_mismatch="restart_epoch")
    assert (iterator.epoch, iterator.batches) == (1, 0)


@pytest.mark.parametrize(
    "more",
    [{"trail": 5}, {"trail": "1:00"}, {"made": 5}, {"here": []}, {"roots": {"a": "x"}},
     {"roots": {"a": -1}}, {"roots": None}],
)  # fmt: skip
def test_a_damaged_state_is_refused(more):
    iterator = ResumableIterator(load(Ids(40), shuffle=True), seed=3)
    with pytest.raises(DataStateError):
        iterator.load_state_dict({"state": json.dumps(json.loads(OLD) | more)})
