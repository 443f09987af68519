"""`ResumableLoader`: exactly once, whatever is cut, resized, prefetched or broken."""

import json
import os
import random
import signal

import numpy as np
import pytest
import torch
from loader_tools import Dies, Draws, Fails, Ids, Job, as_lists, flat, lost_and_repeated, take
from torch.utils.data import DataLoader, IterableDataset

from dcp_checkfreq import Checkpointer
from dcp_checkfreq.data import DataStateError, ResumableLoader, sample_rng
from dcp_checkfreq.data.order.permutation import order


def loader_of(length=50, batch_size=4, dataset=None, **options):
    options.setdefault("collate_fn", as_lists)
    return ResumableLoader(Ids(length) if dataset is None else dataset, batch_size, **options)


def position(loader):
    return loader.epoch, loader.samples


# --- exactly once ---


@pytest.mark.parametrize("workers", [0, 2])
def test_on_other_ranks_batches_and_workers_every_item_comes_once(workers):
    length = 1003
    uninterrupted, after = Job(1, Draws(length), 12, seed=3).run()
    one, state = Job(4, Draws(length), 3, seed=3).run(10)
    two, state = Job(2, Draws(length), 6, state, seed=3, num_workers=workers).run(7)
    three, state = Job(3, Draws(length), 5, state, seed=3).run(11)
    rest, state = Job(1, Draws(length), 12, state, seed=3, num_workers=workers).run()
    found = flat(one + two + three + rest)
    assert lost_and_repeated([sample[0] for sample in found], length) == ([], [])
    # Also every random number is the one it would have been: what an item looks like is no
    # matter of who loads it, and when.
    assert sorted(found) == sorted(flat(uninterrupted))
    assert [set(step) for step in one + two] == [set(step) for step in uninterrupted[:17]]
    assert json.loads(state["state"])["epoch"] == json.loads(after["state"])["epoch"] == 1


def test_the_order_is_that_of_the_rule_and_the_next_epoch_has_another():
    loader = loader_of(50, seed=5)
    for epoch in (0, 1):
        assert take(loader) == order(5, epoch, 50).at(range(50))
    assert take(loader_of(50, shuffle=False)) == list(range(50))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_fetched_ahead_is_not_counted(workers):
    loader = loader_of(500, 10, num_workers=workers)
    first = take(loader, 3)
    assert loader.samples == 30
    again = loader_of(500, 10)
    again.load_state_dict(loader.state_dict())
    assert lost_and_repeated(first + take(again), 500) == ([], [])


def test_a_loop_that_is_left_and_begun_again_goes_on():
    loader = loader_of(500, 10, num_workers=2)
    found = []
    for _ in range(5):
        found += take(loader, 5)
    found += take(loader)
    assert lost_and_repeated(found, 500) == ([], [])
    assert position(loader) == (1, 0)


def test_three_cuts_in_one_epoch_and_the_epochs_after_are_as_if_nothing_had_been():
    whole = loader_of(97, 4, seed=1)
    wanted = [take(whole) for _ in range(3)]
    found, state = [[], [], []], loader_of(97, 4, seed=1).state_dict()
    for batches in (3, 5, 9, None, None, None):
        loader = loader_of(97, 4, seed=1)
        loader.load_state_dict(state)
        random.seed(batches)
        torch.manual_seed(99)  # disturbs nothing
        epoch = loader.epoch
        found[epoch] += take(loader, batches)
        state = loader.state_dict()
    assert found == wanted


@pytest.mark.parametrize(
    ("last", "sizes", "valid"),
    [
        ("partial", [4, 4, 4, 5], [4, 4, 4, 5]),
        ("drop", [4, 4, 4, 4], [4, 4, 4, 4]),
        ("pad", [4, 4, 4, 4, 4], [4, 4, 4, 4, 1]),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_last_batch_is_what_the_policy_says_and_says_what_is_real(last, sizes, valid, workers):
    loader = loader_of(50, 4, last=last, rank=1, world_size=3, num_workers=workers)
    assert len(loader) == len(sizes)
    seen = [(len(batch), loader.valid) for batch in loader]
    assert seen == list(zip(sizes, valid, strict=True))
    assert position(loader) == (1, 0)


def test_with_carry_batches_run_on_into_the_next_epoch():
    loader = loader_of(10, 4, last="carry", seed=2)
    first, second = order(2, 0, 10).at(range(10)), order(2, 1, 10).at(range(10))
    assert take(loader) == first + second[:2]
    assert position(loader) == (1, 2)
    assert take(loader) == second[2:]
    assert position(loader) == (2, 0)


def test_more_ranks_than_samples_left_give_repeats_that_do_not_count():
    state = loader_of(50, 48).state_dict()
    _, state = Job(1, Ids(50), 16).run(3)
    job = Job(4, Ids(50), 2, state)
    (last,), state = job.run()
    assert sorted(last) == sorted(order(0, 0, 50).at([48, 49]))
    assert [loader.valid for loader in job.loaders] == [1, 1, 0, 0]


def test_what_a_larger_batch_would_drop_ends_the_epoch():
    loader = loader_of(50, 4, last="drop")
    take(loader, 11)
    larger = loader_of(50, 8, last="drop")
    larger.load_state_dict(loader.state_dict())
    assert (larger.steps_left, len(larger)) == (0, 6)
    assert take(larger) == []
    assert position(larger) == (1, 0)


def test_len_is_the_whole_epoch_and_steps_left_is_the_rest():
    loader = loader_of(50, 4)
    assert (len(loader), loader.steps_left) == (13, 13)
    for left, _ in zip(range(12, -1, -1), loader, strict=True):
        # after the last batch the next epoch is ahead
        assert (len(loader), loader.steps_left) == (13, left or 13)


def test_resuming_late_in_a_billion_items_takes_no_time():
    loader = loader_of(10**9, 8)
    state = json.loads(loader.state_dict()["state"]) | {"samples": 999_000_000}
    loader.load_state_dict({"state": json.dumps(state)})
    assert take(loader, 2) == order(0, 0, 10**9).at(range(999_000_000, 999_000_016))
    assert len(loader.state_dict()["state"]) < 200


# --- randomness ---


def test_the_random_state_of_the_training_is_not_touched():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    wanted = [random.random(), np.random.rand(), torch.rand(()).item()]
    for workers in (0, 2):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        loader = loader_of(dataset=Draws(30), num_workers=workers, collate_fn=shuffling_collate)
        assert len(take(loader)) == 30
        assert [random.random(), np.random.rand(), torch.rand(()).item()] == wanted


def shuffling_collate(samples):
    return [samples[i] for i in torch.randperm(len(samples)).tolist()]


def test_randomness_in_collate_is_the_same_with_and_without_workers():
    found = [
        take(loader_of(30, num_workers=workers, collate_fn=shuffling_collate)) for workers in (0, 2)
    ]
    assert found[0] == found[1]
    assert sorted(found[0]) == list(range(30))


def test_every_sample_has_its_own_numbers_and_each_epoch_others():
    loader = loader_of(dataset=Draws(200), batch_size=10)
    numbers = [value for _ in range(2) for sample in take(loader) for value in sample[1:]]
    assert len(set(numbers)) == 2 * 200 * 5
    assert abs(np.mean(numbers) - 0.5) < 0.03


class Raw(Ids):
    def __getitem__(self, index):
        return index, random.getrandbits(64), int(sample_rng().bit_generator.random_raw())


def test_the_randomness_of_a_sample_never_changes():
    """Checkpoints of half-done epochs depend on it. Python and NumPy promise these bits."""
    assert take(loader_of(10, dataset=Raw(10), seed=1), 1)[:2] == GOLDEN


GOLDEN = [
    (5, 3614599052794264185, 8022321947851581273),
    (9, 16511810053780787122, 9693286403468359562),
]


def test_torch_and_numpy_do_not_draw_the_same_numbers():
    samples = take(loader_of(dataset=Draws(400)))
    together = np.corrcoef([[s[1], s[2], s[3], s[4]] for s in samples], rowvar=False)
    assert np.abs(together - np.eye(4)).max() < 0.2


class Explicit(Ids):
    def __getitem__(self, index):
        return index, sample_rng().random(), random.random()


def test_explicit_randomness_leaves_the_global_generators_alone():
    random.seed(5)
    stream = [random.random() for _ in range(20)]
    random.seed(5)
    found = take(loader_of(dataset=Explicit(20), augment_rng="explicit"))
    assert [sample[2] for sample in found] == stream
    again = take(loader_of(dataset=Explicit(20), augment_rng="explicit", num_workers=2))
    assert [sample[:2] for sample in found] == [sample[:2] for sample in again]


def test_outside_of_a_sample_there_is_no_generator():
    with pytest.raises(RuntimeError, match="one sample"):
        sample_rng()
    loader = loader_of(dataset=Explicit(20), augment_rng="none")
    with pytest.raises(RuntimeError, match="one sample"):
        take(loader)
    take(loader_of(dataset=Explicit(20)), 2)
    with pytest.raises(RuntimeError, match="one sample"):
        sample_rng()


# --- drop-in ---


def test_batches_are_those_of_dataloader():
    data = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))
    found = list(ResumableLoader(data, 4, shuffle=False))
    wanted = list(DataLoader(data, 4))
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(map(torch.equal, ours, theirs))


class AtOnce(Ids):
    """Fetches several items at once, as Hugging Face data sets do."""

    asked = 0

    def __getitems__(self, indices):
        self.asked += 1
        return [self[index] for index in indices]


@pytest.mark.parametrize(("mode", "times"), [("none", 5), ("global", 20)])
def test_items_are_fetched_at_once_if_no_random_numbers_come_between(mode, times):
    data = AtOnce(20)
    assert take(loader_of(dataset=data, augment_rng=mode)) == order(0, 0, 20).at(range(20))
    assert data.asked == times


class OnlyAtOnce(Ids):
    """As some data sets are, and `DataLoader` takes them."""

    def __getitem__(self, index):
        raise NotImplementedError

    def __getitems__(self, indices):
        return [(index, random.random()) for index in indices]


def test_a_data_set_that_fetches_only_several_at_once_is_asked_for_each():
    first = dict(take(loader_of(dataset=OnlyAtOnce(20))))
    assert sorted(first) == list(range(20))
    other = dict(take(loader_of(dataset=OnlyAtOnce(20), batch_size=5, num_workers=1)))
    assert first == other  # the random numbers of each are its own


def tell_worker(number):
    torch.utils.data.get_worker_info().dataset.dataset.length = -number


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_in_pinned_memory_if_asked(workers):
    loader = ResumableLoader(Ids(20), 4, num_workers=workers, pin_memory=True)
    assert all(batch.is_pinned() for batch in loader)


@pytest.mark.slow  # spawned workers import torch anew
def test_options_of_dataloader_go_through():
    loader = loader_of(
        20, num_workers=2, prefetch_factor=4, worker_init_fn=tell_worker, timeout=60,
        multiprocessing_context="spawn", persistent_workers=False, in_order=True,
    )  # fmt: skip
    assert sorted(take(loader)) == list(range(20))
    with pytest.raises(TypeError, match="nonsense"):
        loader_of(nonsense=1)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))

    def __len__(self):
        return 10


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"sampler": [1]}, TypeError, "seed= and shuffle="),
        ({"batch_sampler": [[1]]}, TypeError, "ResumableBatchSampler"),
        ({"drop_last": True}, TypeError, "last='drop'"),
        ({"generator": torch.Generator()}, TypeError, "seed="),
        ({"in_order": False}, ValueError, "position"),
        ({"dataset": Stream()}, TypeError, "ResumableIterator"),
        ({"dataset": iter([1])}, TypeError, "not map-style"),
        ({"dataset": []}, ValueError, "length"),
        ({"batch_size": None}, ValueError, "batch_size"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 1 << 64}, ValueError, "seed"),
        ({"last": "keep"}, ValueError, "last"),
        ({"augment_rng": "yes"}, ValueError, "augment_rng"),
        ({"rank": 0}, ValueError, "both"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank"),
        ({"on_mismatch": "yes"}, ValueError, "on_mismatch"),
    ],
)
def test_what_would_break_the_promise_is_refused_at_construction(options, error, said):
    with pytest.raises(error, match=said):
        loader_of(**options)


# --- states ---


def edited(state, **fields):
    return {"state": json.dumps(json.loads(state["state"]) | fields)}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"length": 49}, "49, now it is 50"),
        ({"order": "sequential"}, "'sequential', now it is 'shuffled-1'"),
        ({"dataset": "v1"}, "'v1', now it is ''"),
        ({"last": "drop"}, "'drop', now it is 'partial'"),
        ({"seed": 1}, "was 1, now it is 0"),
        ({"samples": -4}, "-4"),
        ({"samples": 50}, "50 samples of 50"),
        ({"samples": 8.0}, "8.0"),
        ({"samples": True}, "True"),
        ({"format": 9}, "format 9"),
    ],
)
def test_a_state_that_does_not_fit_leaves_the_loader_as_it_was(fields, said):
    loader = loader_of(50)
    iterator = iter(loader)
    found = next(iterator) + next(iterator)
    state = loader.state_dict()
    with pytest.raises(DataStateError, match=said):
        loader.load_state_dict(edited(state, **fields))
    assert loader.state_dict() == state
    found += flat(iterator)  # not even the iterator has noticed
    assert lost_and_repeated(found, 50) == ([], [])


@pytest.mark.parametrize("state", [{}, {"samples": 3}, {"state": None}, {"state": "{"}, None, "x"])
def test_what_is_no_state_is_refused(state):
    loader = loader_of(50)
    with pytest.raises(DataStateError, match="ResumableLoader: the saved state"):
        loader.load_state_dict(state)
    assert position(loader) == (0, 0)


def test_grown_data_is_fine_between_epochs_and_starts_the_epoch_anew_if_asked(caplog):
    loader = loader_of(50)
    take(loader)
    grown = loader_of(60)
    grown.load_state_dict(loader.state_dict())
    assert "was 50, now it is 60" in caplog.text
    assert position(grown) == (1, 0)
    take(loader, 2)
    caplog.clear()
    asked, told_before = loader_of(60), loader_of(60, on_mismatch="restart_epoch")
    asked.load_state_dict(loader.state_dict(), on_mismatch="restart_epoch")
    told_before.load_state_dict(loader.state_dict())
    assert position(asked) == position(told_before) == (1, 0)
    assert len(take(asked)) == 60
    assert "8 samples of it were consumed" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_from_before_a_load_is_stale(workers):
    loader = loader_of(50, num_workers=workers)
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="stale"):
        next(iterator)
    assert len(take(loader)) == 46


def test_of_two_iterators_the_older_is_stale():
    loader = loader_of(50, num_workers=2)
    older = iter(loader)
    next(older)
    assert len(take(loader)) == 46
    with pytest.raises(RuntimeError, match="stale"):
        next(older)


def test_a_data_set_that_knows_its_id_need_not_be_told():
    data = Ids(50)
    data.dataset_id = "v1"
    loader = loader_of(dataset=data)
    take(loader, 1)
    with pytest.raises(DataStateError, match="'v1', now it is 'v2'"):
        loader_of(50, dataset_id="v2").load_state_dict(loader.state_dict())
    loader_of(50, dataset_id="v1").load_state_dict(loader.state_dict())


def test_an_iterator_that_is_done_stays_done():
    loader = loader_of(8)
    iterator = iter(loader)
    assert len(list(iterator)) == 2
    assert len(take(loader)) == 8
    assert list(iterator) == []


@pytest.mark.parametrize("length", [24, 23])
@pytest.mark.parametrize("then", [(3, 1), (6, 1), (1, 5)])
def test_after_three_steps_on_four_ranks_the_rest_comes_once_on_others(length, then):
    """Case 36: states of single ranks would be dropped, or skip too much or too little."""
    first, state = Job(4, Ids(length), 1, seed=3).run(3)
    rest, _ = Job(then[0], Ids(length), then[1], state, seed=3).run()
    assert len(flat(first)) == 12
    assert lost_and_repeated(flat(first + rest), length) == ([], [])


@pytest.mark.parametrize(
    ("last", "world"), [("partial", 3), ("partial", 4), ("pad", 3), ("pad", 4), ("drop", 3)]
)
def test_ten_samples_on_ranks_that_do_not_divide_them(last, world):
    """Case 38: every rank has as many steps, and what is repeated or left out is told."""
    job = Job(world, Ids(10), 3, last=last)
    for epoch in range(2):
        lengths = {len(loader) for loader in job.loaders}
        steps, state = job.run()
        assert lengths == {len(steps)}
        lost, repeated = lost_and_repeated(flat(steps), 10)
        assert (len(lost), repeated) == (1 if last == "drop" else 0, [])
        assert json.loads(state["state"])["epoch"] == epoch + 1


# --- failures ---


def test_a_killed_worker_costs_no_sample(tmp_path):
    loader = loader_of(dataset=Dies(100, 30, tmp_path / "died"), num_workers=2)
    found, failures = [], 0
    while loader.epoch == 0:
        try:
            for batch in loader:
                found += batch
        except (RuntimeError, ConnectionResetError):
            failures += 1
    assert failures == 1
    assert lost_and_repeated(found, 100) == ([], [])


class PidOf(Ids):
    def __getitem__(self, index):
        return os.getpid()


def test_a_worker_that_dies_between_epochs_is_replaced():
    loader = loader_of(dataset=PidOf(40), num_workers=2)
    pids = set(take(loader))
    os.kill(pids.pop(), signal.SIGKILL)
    found = []
    for _ in range(3):
        try:
            found = take(loader)
            break
        except (RuntimeError, ConnectionResetError):
            assert (loader.epoch, loader.samples) == (1, 0)
    assert len(found) == 40
    assert pids.isdisjoint(found)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [OSError("bad file"), StopIteration()])
def test_an_item_that_fails_is_not_counted_and_comes_again(workers, error):
    data = Fails(40, 17, error)
    loader = loader_of(dataset=data, num_workers=workers)
    found = []
    iterator = iter(loader)
    with pytest.raises((OSError, RuntimeError)):
        found.extend(sample for batch in iterator for sample in batch)
    with pytest.raises(RuntimeError, match="stale"):
        next(iterator)
    assert loader.samples == len(found) < 40
    data.at = None
    assert lost_and_repeated(found + take(loader), 40) == ([], [])


# --- with Checkpointer ---


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_position_saved_with_a_step_is_the_one_after_it(tmp_path, workers):
    trained = {}
    loader = loader_of(200, 4, num_workers=workers, prefetch_factor=4 if workers else None)
    with Checkpointer(tmp_path, {"data": loader}, every=3, keep_last=100) as ckpt:
        ckpt.restore()
        for batch in loader:
            trained[ckpt.step + 1] = batch
            ckpt.after_step()
    for step in range(3, 51, 3):
        again = loader_of(200, 4)
        with Checkpointer(tmp_path, {"data": again}, every=1000) as ckpt:
            ckpt.restore(step)
        assert again.samples == 4 * step % 200
        if step < 50:
            assert take(again, 1) == trained[step + 1]


def test_all_ranks_hold_the_same_state():
    """Case 30: all ranks save the same text, so that it does not matter whose is kept."""
    job = Job(3, Ids(100), 4)
    _, state = job.run(2)
    assert [loader.state_dict() for loader in job.loaders] == [state] * 3


def test_a_state_that_does_not_fit_fails_the_restore_by_name(tmp_path):
    with Checkpointer(tmp_path, {"data": loader_of(50)}, every=1) as ckpt:
        ckpt.save(wait=True)
    loader = loader_of(50, seed=4)
    with Checkpointer(tmp_path, {"data": loader}, every=1) as ckpt:  # noqa: SIM117
        with pytest.raises(DataStateError, match="the seed was 0, now it is 4"):
            ckpt.restore()
