"""`ResumableIterator`: loaders without an index go on, shuffles and random numbers included."""

import json
import random

import pytest
import torch
from loader_tools import Ids, as_lists, flat, lost_and_repeated, take
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from dcp_checkfreq import Checkpointer, PerRank
from dcp_checkfreq.data import DataStateError, ResumableIterator


class Noisy(Ids):
    """Random numbers that are drawn from the process's own generators."""

    def __getitem__(self, index):
        return index, random.random(), torch.rand(()).item()


class Shuffled(IterableDataset):
    """A stream with a shuffle buffer, as many are: draws from `random`."""

    def __iter__(self):
        buffer = []
        for item in range(60):
            buffer.append(item)
            if len(buffer) == 10:
                yield buffer.pop(random.randrange(10))
        while buffer:
            yield buffer.pop(random.randrange(len(buffer)))


class Counting(IterableDataset):
    """Keeps a position of its own, and never gives an item that it is past."""

    def __init__(self):
        self.at = 0
        self.given = []

    def __iter__(self):
        while self.at < 60:
            self.at += 1
            self.given.append(self.at - 1)
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def shuffling_loader(**options):
    return DataLoader(Noisy(50), batch_size=4, shuffle=True, collate_fn=as_lists, **options)


def stream(**options):
    return DataLoader(Shuffled(), batch_size=4, collate_fn=as_lists, **options)


@pytest.mark.slow
@pytest.mark.parametrize("make", [shuffling_loader, stream])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_replayed_epoch_goes_on_with_the_same_shuffle_and_the_same_numbers(make, workers):
    whole = ResumableIterator(make(num_workers=workers))
    wanted = [take(whole) for _ in range(3)]
    assert wanted[0] != wanted[1]
    found, state = [[], [], []], whole.state_dict()
    state = ResumableIterator(make(num_workers=workers)).state_dict()
    for batches in (3, 5, None, 2, None, None):
        iterator = ResumableIterator(make(num_workers=workers))
        random.seed(batches)
        torch.manual_seed(batches or 1)
        iterator.load_state_dict(state)
        found[iterator.epoch] += take(iterator, batches)
        state = iterator.state_dict()
    assert found == wanted


def test_the_random_state_of_the_training_is_not_touched():
    random.seed(1), torch.manual_seed(1)
    wanted = [random.random(), torch.rand(()).item()]
    random.seed(1), torch.manual_seed(1)
    iterator = ResumableIterator(shuffling_loader())
    iterator.load_state_dict({"state": edited(iterator.state_dict()["state"], batches=3)})
    assert len(take(iterator)) == 50 - 12
    assert [random.random(), torch.rand(()).item()] == wanted


def edited(text, **fields):
    return json.dumps(json.loads(text) | fields)


def test_samplers_are_told_the_epoch():
    data = Ids(50)
    sampler = DistributedSampler(data, num_replicas=2, rank=0, seed=1)
    iterator = ResumableIterator(DataLoader(data, 4, sampler=sampler, collate_fn=as_lists))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        wanted = list(sampler)
        sampler.set_epoch(77)
        assert take(iterator) == wanted


def test_with_mode_epoch_the_epoch_starts_anew_and_says_so(caplog):
    iterator = ResumableIterator(shuffling_loader(), mode="epoch")
    take(iterator)
    first = take(iterator, 3)
    again = ResumableIterator(shuffling_loader(), mode="epoch")
    again.load_state_dict(iterator.state_dict())
    assert (again.epoch, again.batches) == (1, 0)
    assert "epoch 1 starts anew; 3 batches of it were trained" in caplog.text
    assert take(again, 3) == first


def test_a_position_of_its_own_is_carried_and_nothing_is_replayed(tmp_path):
    def make(data):
        loader = DataLoader(data, batch_size=4, collate_fn=as_lists)
        return ResumableIterator(loader, mode="own", rank=0, world_size=1)

    iterator = make(Counting())
    found = []
    with Checkpointer(tmp_path, {"data": PerRank(iterator)}, every=5) as ckpt:
        for batches in (2, 6):  # the loop is left and begun again
            for _, batch in zip(range(batches), iterator, strict=False):
                found += batch
                ckpt.after_step()
    assert found == list(range(32))
    data = Counting()
    iterator = make(data)
    with Checkpointer(tmp_path, {"data": PerRank(iterator)}, every=100) as ckpt:
        ckpt.restore()
        saved_again = iterator.state_dict()  # before anything is read
        assert flat(iterator) == list(range(20, 60))
    assert saved_again["own"] == {"at": 20}
    assert data.given == list(range(20, 60))
    assert take(iterator) == list(range(60))  # and the next epoch is whole
    assert iterator.epoch == 2


def test_a_loader_that_keeps_its_position_is_carried():
    class Stateful(DataLoader):
        at = 0

        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                if number >= self.at:
                    self.at = number + 1
                    yield batch
            self.at = 0

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    def make():
        loader = Stateful(Ids(40), batch_size=4, collate_fn=as_lists, num_workers=2)
        return ResumableIterator(loader, mode="own")

    iterator = make()
    found = take(iterator, 4)
    again = make()
    again.load_state_dict(iterator.state_dict())
    assert found + take(again) == list(range(40))


def test_nothing_that_keeps_a_position_is_an_error():
    with pytest.raises(TypeError, match="mode='replay'"):
        ResumableIterator(stream(), mode="own")
    with pytest.raises(TypeError, match="2 workers"):
        ResumableIterator(DataLoader(Counting(), num_workers=2), mode="own")
    with pytest.raises(TypeError, match="only once"):
        ResumableIterator(iter([1]))
    with pytest.raises(ValueError, match="mode"):
        ResumableIterator([1], mode="skip")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"world_size": 4}, "ranks was 4, now it is 1"),
        ({"dataset": "v1"}, "'v1', now it is ''"),
        ({"seed": 5}, "seed was 5, now it is 0"),
        ({"format": 3}, "format 3"),
        ({"batches": -1}, "-1"),
        ({"epoch": 1.5}, "1.5"),
        ({"world_size": None}, "None"),
    ],
)
def test_a_state_that_does_not_fit_leaves_the_iterator_as_it_was(fields, said):
    iterator = ResumableIterator(list(range(10)))
    live = iter(iterator)
    assert [next(live), next(live)] == [0, 1]
    state = iterator.state_dict()
    with pytest.raises(DataStateError, match=said):
        iterator.load_state_dict({"state": edited(state["state"], **fields)})
    assert iterator.state_dict() == state
    assert list(live) == list(range(2, 10))


@pytest.mark.parametrize("state", [None, {}, {"state": 5}, "x"])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(DataStateError, match="ResumableIterator: the saved state"):
        ResumableIterator([1]).load_state_dict(state)


@pytest.mark.parametrize(("batches", "options"), [(0, {}), (2, {"on_mismatch": "restart_epoch"})])
def test_other_ranks_are_fine_between_epochs_and_start_the_epoch_anew_if_asked(
    batches, options, caplog
):
    iterator = ResumableIterator(list(range(10)), rank=0, world_size=2)
    state = edited(iterator.state_dict()["state"], world_size=4, batches=batches, epoch=3)
    iterator.load_state_dict({"state": state}, **options)
    assert (iterator.epoch, iterator.batches) == (3, 0)
    assert "ranks was 4, now it is 2" in caplog.text


def test_a_state_without_the_loaders_own_is_refused_where_it_is_needed():
    replayed = ResumableIterator(DataLoader(Counting(), batch_size=4))
    take(replayed, 2)
    own = ResumableIterator(DataLoader(Counting(), batch_size=4), mode="own")
    with pytest.raises(DataStateError, match="without the loader's own"):
        own.load_state_dict(replayed.state_dict())


def test_an_epoch_that_became_shorter_is_an_error():
    iterator = ResumableIterator(list(range(10)))
    for _, _ in zip(range(7), iterator, strict=False):
        pass
    shorter = ResumableIterator(list(range(5)))
    with pytest.raises(DataStateError, match="number of batches was 10, now it is 5"):
        shorter.load_state_dict(iterator.state_dict())

    class Sizeless:
        def __init__(self, length):
            self.length = length

        def __iter__(self):
            return iter(range(self.length))

    iterator = ResumableIterator(Sizeless(10))
    for _, _ in zip(range(7), iterator, strict=False):
        pass
    shorter = ResumableIterator(Sizeless(5))
    shorter.load_state_dict(iterator.state_dict())
    with pytest.raises(DataStateError, match="has 5 batches, 7 were trained"):
        next(iter(shorter))


def test_an_iterator_from_before_a_load_is_stale():
    iterator = ResumableIterator(list(range(10)))
    live = iter(iterator)
    next(live)
    iterator.load_state_dict(iterator.state_dict())
    with pytest.raises(RuntimeError, match="stale"):
        next(live)
    assert lost_and_repeated([0, *iterator], 10) == ([], [])


def test_len_is_the_whole_epoch_and_steps_left_is_the_rest():
    iterator = ResumableIterator(list(range(10)))
    live = iter(iterator)
    next(live)
    assert (len(iterator), iterator.steps_left) == (10, 9)
    for ask in (len, lambda endless: endless.steps_left):
        with pytest.raises(TypeError):
            ask(ResumableIterator(stream()))
