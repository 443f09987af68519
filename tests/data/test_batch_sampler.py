"""`ResumableBatchSampler`: in any loader, if the loop says what it has trained."""

import pytest
from loader_tools import Ids, as_lists, lost_and_repeated
from torch.utils.data import DataLoader

from dcp_checkfreq.data import DataStateError, ResumableBatchSampler


def train(sampler, steps=None, **options):
    """Train through a loader that reads ahead; return the samples of the steps that were done."""
    loader = DataLoader(Ids(1003), batch_sampler=sampler, collate_fn=as_lists, **options)
    found = []
    for number, batch in enumerate(loader, start=1):
        found += batch
        sampler.advance()
        if number == steps:
            break
    return found


def test_on_another_number_of_ranks_every_item_comes_once():
    found, state = [], None
    for world, steps in ((4, 10), (2, 7), (3, None)):
        samplers = [
            ResumableBatchSampler(1003, 5, seed=3, rank=rank, world_size=world)
            for rank in range(world)
        ]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
            found += train(sampler, steps, num_workers=2 if sampler is samplers[0] else 0)
        state = samplers[0].state_dict()
        assert all(sampler.state_dict() == state for sampler in samplers)
    assert lost_and_repeated(found, 1003) == ([], [])
    assert (samplers[0].epoch, samplers[0].samples) == (1, 0)


def test_what_the_loader_asks_for_ahead_is_not_counted():
    sampler = ResumableBatchSampler(100, 10)
    ahead = iter(sampler)
    taken = [next(ahead) for _ in range(6)]
    sampler.advance()
    sampler.advance()
    assert (sampler.samples, sampler.valid, sampler.steps_left) == (20, 10, 8)
    assert len(sampler) == 10
    again = ResumableBatchSampler(100, 10)
    again.load_state_dict(sampler.state_dict())
    assert next(iter(again)) == taken[2]


def test_epochs_follow_each_other():
    sampler = ResumableBatchSampler(1003, 10, seed=1)
    first, second = train(sampler), train(sampler)
    assert sorted(first) == sorted(second) == list(range(1003))
    assert first != second
    assert sampler.epoch == 2


def test_to_forget_to_report_is_an_error_and_no_silent_restart():
    sampler = ResumableBatchSampler(100, 10)
    assert len(list(sampler)) == 10
    with pytest.raises(RuntimeError, match="advance"):
        iter(sampler)
    sampler.advance()
    assert len(list(sampler)) == 9


def test_a_load_makes_earlier_iterators_stale():
    sampler = ResumableBatchSampler(100, 10)
    ahead = iter(sampler)
    next(ahead)
    sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(RuntimeError, match="stale"):
        next(ahead)


def test_what_is_dropped_ends_the_epoch():
    sampler = ResumableBatchSampler(50, 4, last="drop")
    for _ in range(11):
        sampler.advance()
    larger = ResumableBatchSampler(50, 8, last="drop")
    larger.load_state_dict(sampler.state_dict())
    with pytest.raises(RuntimeError, match="no batch left in epoch 0"):
        larger.advance()
    assert list(larger) == []
    assert (larger.epoch, larger.samples) == (1, 0)


def test_a_state_of_other_data_is_refused():
    sampler = ResumableBatchSampler(100, 10, dataset_id="v1")
    sampler.advance()
    with pytest.raises(DataStateError, match=r"ResumableBatchSampler: .*'v1', now it is 'v2'"):
        ResumableBatchSampler(100, 10, dataset_id="v2").load_state_dict(sampler.state_dict())
