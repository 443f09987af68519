"""The order of data in pieces: every item once, a few pieces open at a time, the same for ever."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.data.order.interleave import LaneOrder
from dcp_checkfreq.data.order.position import Deal, Position


def items_at(lanes, positions):
    """Return (piece, item) at each position, as whoever reads the pieces finds them."""
    found = [None] * len(positions)
    for run in lanes.runs(positions):
        for place, slot in zip(run.places, run.slots, strict=True):
            window = lanes.window(run.piece, place)
            item = window.start + lanes.within(run.piece, window)(place - window.start)
            found[slot] = (run.piece, item)
    return found


def all_items(sizes):
    return [(piece, item) for piece, size in enumerate(sizes) for item in range(size)]


SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=20)
WINDOWS = st.none() | st.integers(1, 12)


@given(sizes=SIZES, lanes=st.integers(1, 60), epoch=st.integers(0, 3), window=WINDOWS,
       shuffle=st.booleans())  # fmt: skip
def test_the_positions_of_an_epoch_are_all_items_once(sizes, lanes, epoch, window, shuffle):
    rule = LaneOrder(sizes, lanes, seed=3, epoch=epoch, shuffle=shuffle, window=window)
    found = items_at(rule, range(sum(sizes)))
    assert rule.length == sum(sizes)
    assert Counter(found) == Counter(all_items(sizes))
    if not shuffle:
        assert found == all_items(sizes)


@given(sizes=SIZES, lanes=st.integers(1, 60), window=WINDOWS, step=st.integers(1, 70),
       data=st.data())  # fmt: skip
def test_any_stripe_is_that_stripe_of_the_whole(sizes, lanes, window, step, data):
    rule = LaneOrder(sizes, lanes, seed=4, epoch=1, window=window)
    whole = items_at(rule, range(rule.length))
    start = data.draw(st.integers(0, rule.length - 1))
    stop = data.draw(st.integers(start, rule.length))
    assert items_at(rule, range(start, stop, step)) == whole[start:stop:step]


@given(sizes=SIZES, lanes=st.integers(1, 60), window=WINDOWS, data=st.data())
def test_in_each_lane_everything_comes_from_front_to_back(sizes, lanes, window, data):
    rule = LaneOrder(sizes, lanes, seed=5, epoch=0, window=window)
    world = data.draw(st.integers(1, 9))
    last = {}
    for start in range(0, rule.length, 7 * world):
        for rank in range(world):
            stripe = range(start + rank, min(start + 7 * world, rule.length), world)
            for run in rule.runs(stripe):
                assert len(run.places) == len(run.slots) >= 1
                key = (rank, run.lane, run.piece)
                assert run.places[0] > last.get(key, -1)
                last[key] = run.places[-1]


@given(sizes=SIZES, lanes=st.integers(1, 60), shuffle=st.booleans(), data=st.data())
def test_what_is_consumed_of_each_piece_is_what_was_met(sizes, lanes, shuffle, data):
    rule = LaneOrder(sizes, lanes, seed=6, epoch=2, shuffle=shuffle)
    samples = data.draw(st.integers(0, rule.length))
    met = Counter(piece for piece, _ in items_at(rule, range(samples)))
    assert rule.consumed(samples) == [met[piece] for piece in range(len(sizes))]


@pytest.mark.parametrize("window", [None, 5])
def test_in_any_elastic_history_every_item_counts_once(window):
    rng = random.Random(0)
    for _ in range(150):
        sizes = [rng.randint(1, 25) for _ in range(rng.randint(1, 15))]
        lanes, at, found = rng.randint(1, 30), Position(), []
        rule = LaneOrder(sizes, lanes, seed=1, epoch=0, window=window)
        while at.epoch == 0:
            deal = Deal(sum(sizes), rng.randint(1, 9), rng.randint(1, 9))
            for _ in range(rng.randint(1, 6)):
                step = deal.step(at)
                for rank in range(deal.world_size):
                    share = deal.share(step, rank)
                    ((_, positions),) = share.runs
                    found += items_at(rule, positions)[: share.valid]
                at = step.after
                if at.epoch:
                    break
        assert Counter(found) == Counter(all_items(sizes))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("start", [0, 7])
def test_a_rank_meets_its_part_of_the_lanes_wherever_the_epoch_is_gone_on_with(world, start):
    rule = LaneOrder([20] * 50, 24, seed=7, epoch=0)
    for rank in range(world):
        lanes = {run.lane for run in rule.runs(range(start + rank, rule.length, world))}
        assert len(lanes) == 24 // world


def test_items_stay_in_their_window():
    rule = LaneOrder([23, 40], 3, seed=8, epoch=0, window=10)
    for piece, size in enumerate([23, 40]):
        windows = {rule.window(piece, place) for place in range(size)}
        assert sorted(i for w in windows for i in w) == list(range(size))
        assert {len(w) for w in windows} <= {10, 3}
    assert rule.within(1, range(10)).at(range(10)) != rule.within(1, range(10, 20)).at(range(10))


def test_epochs_and_seeds_have_other_orders_and_lanes_are_mixed():
    def first(seed, epoch):
        return items_at(LaneOrder([100] * 40, 8, seed=seed, epoch=epoch), range(400))

    assert first(1, 0) == first(1, 0)
    assert first(1, 0) != first(1, 1)
    assert first(1, 0) != first(2, 0)
    assert len({piece for piece, _ in first(1, 0)[:8]}) == 8


def test_what_a_version_yields_never_changes():
    """Half-done epochs depend on it: if this fails, raise LANES_VERSION."""
    rule = LaneOrder([5, 3, 9, 1, 7], 3, seed=11, epoch=2)
    assert items_at(rule, range(25)) == GOLDEN
    windowed = LaneOrder([5, 3, 9, 1, 7], 3, seed=11, epoch=2, window=4)
    assert items_at(windowed, range(25)) == GOLDEN_WINDOWED


GOLDEN = [
    (0, 3),
    (2, 0),
    (4, 4),
    (0, 4),
    (2, 8),
    (4, 5),
    (0, 1),
    (2, 4),
    (4, 1),
    (0, 2),
    (2, 2),
    (4, 3),
    (0, 0),
    (2, 3),
    (1, 0),
    (2, 6),
    (4, 0),
    (1, 1),
    (2, 1),
    (4, 2),
    (1, 2),
    (2, 7),
    (4, 6),
    (3, 0),
    (2, 5),
]
GOLDEN_WINDOWED = [
    (0, 3),
    (2, 4),
    (4, 3),
    (0, 1),
    (2, 6),
    (4, 4),
    (0, 2),
    (2, 7),
    (4, 5),
    (0, 0),
    (2, 5),
    (4, 6),
    (0, 4),
    (2, 8),
    (1, 0),
    (2, 1),
    (4, 0),
    (1, 1),
    (2, 0),
    (4, 2),
    (1, 2),
    (2, 2),
    (4, 1),
    (3, 0),
    (2, 3),
]


@pytest.mark.parametrize("positions", [range(-1, 3), range(11), range(4, 12, 3)])
def test_positions_outside_are_refused(positions):
    with pytest.raises(IndexError, match=r"not in \[0, 10\)"):
        list(LaneOrder([4, 6], 2, seed=0, epoch=0).runs(positions))


@pytest.mark.parametrize("options", [{"lanes": 0}, {"lanes": 1, "window": 0}])
def test_numbers_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        LaneOrder([4], **options, seed=0, epoch=0)
