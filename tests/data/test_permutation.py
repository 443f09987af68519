"""The order of an epoch: a permutation, the same for ever, and the same with and without NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.data.order import permutation as order_module
from dcp_checkfreq.data.order.permutation import (
    ORDER_VERSION,
    Ahead,
    derive,
    order,
)

LARGE = 1 << 16  # up to here the order is a sort, above it a Feistel network
SEEDS = st.integers(0, (1 << 64) - 1)
LENGTHS = st.integers(1, 300) | st.integers(LARGE - 2, LARGE + 300) | st.integers(1, 1 << 62)

# What version 1 yields, for ever: checkpoints of half-done epochs depend on it. A change of these
# numbers needs a new version beside the old one.
GOLDEN = {
    (0, 0, 1): [0],
    (0, 0, 10): [6, 1, 7, 3, 4, 8, 2, 0, 5, 9],
    (7, 3, 1000): [510, 458, 954, 46, 85, 786, 788, 130],
    (2**64 - 1, 5, 65536): [14701, 42804, 1589, 6179, 31780, 21880],
    (0, 0, 65537): [45513, 35657, 59969, 62600, 49667, 18836],
    (1, 0, 1281167): [945011, 288098, 267313, 759125, 544228, 283864],
    (0, 1, 10**9): [636190303, 820364167, 380689087, 121481258, 601262017, 770887129],
    (42, 7, 2**62): [1435065120187577780, 1645825668248676358, 4232282952551359829],
}


@pytest.fixture(params=["numpy", "no numpy"])
def numpy_or_not(request, monkeypatch):
    if request.param == "no numpy":
        monkeypatch.setattr(order_module, "numpy_or_none", lambda: None)


@pytest.mark.parametrize(("key", "wanted"), GOLDEN.items(), ids=str)
@pytest.mark.usefixtures("numpy_or_not")
def test_the_order_of_version_1_never_changes(key, wanted):
    assert ORDER_VERSION == 1
    found = order(*key)
    assert [found(position) for position in range(len(wanted))] == wanted
    assert found.at(range(len(wanted))) == wanted


def test_derived_bits_of_version_1_never_change():
    assert [derive(), derive(0), derive(1, 2, 3), derive(3, 2, 1)] == DERIVED


DERIVED = [0, 16294208416658607535, 15020427595393229491, 15432287184251514724]


@pytest.mark.parametrize("length", [*range(1, 70), LARGE - 1, LARGE, LARGE + 1, 70_001, 99_991])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_item_comes_once(length, shuffle):
    indices = order(5, 1, length, shuffle=shuffle).array(np.arange(length))
    assert np.array_equal(np.sort(indices), np.arange(length))


@given(seed=SEEDS, epoch=st.integers(0, 10**6), length=LENGTHS, data=st.data())
def test_one_by_one_in_lists_and_in_arrays_it_is_the_same(seed, epoch, length, data):
    found = order(seed, epoch, length)
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20))
    one_by_one = [found(position) for position in positions]
    assert found.at(positions) == one_by_one
    assert found.array(np.array(positions)).tolist() == one_by_one
    assert all(0 <= index < length for index in one_by_one)


@pytest.mark.parametrize("length", [1000, LARGE, LARGE + 5000, 10**9, 1 << 62])
def test_without_numpy_it_is_the_same(length, monkeypatch):
    first = min(length, 1000) - 1
    positions = range(first, max(first - 900, -1), -7) if length == 1000 else range(0, 900, 7)
    wanted = order(3, 4, length).at(positions)
    monkeypatch.setattr(order_module, "numpy_or_none", lambda: None)
    assert order(3, 4, length).at(positions) == wanted


@given(seed=SEEDS, length=LENGTHS)
def test_seed_and_epoch_each_make_another_order(seed, length):
    if length < 50:
        return
    positions = range(50)
    orders = [
        tuple(order(s, epoch, length).at(positions))
        for s in (seed, seed ^ 1)
        for epoch in (0, 1, 2)
    ]
    assert len(set(orders)) == 6


def test_without_shuffle_it_is_the_order_of_the_data_set():
    assert order(1, 2, 10**12, shuffle=False).at(range(5, 100, 9)) == list(range(5, 100, 9))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("length", [10, 10**6])
@pytest.mark.parametrize("bad", [-1, "length"])
def test_a_position_outside_is_an_error(length, shuffle, bad):
    found = order(0, 0, length, shuffle=shuffle)
    bad = length if bad == "length" else bad
    for call in (found, lambda p: found.at([0, p]), lambda p: found.array(np.array([p, 0]))):
        with pytest.raises(IndexError, match="not in"):
            call(bad)


@pytest.mark.parametrize("bad", [(-1, 0, 5), (0, -1, 5), (0, 0, -5), (0, 0, (1 << 62) + 1)])
def test_numbers_that_cannot_be_are_refused(bad):
    with pytest.raises(ValueError, match="must"):
        order(*bad)


@given(
    length=st.integers(1, 500),
    items=st.integers(1, 50),
    world=st.integers(1, 7),
    batches=st.lists(st.integers(1, 9), max_size=40),
)
def test_computing_ahead_changes_nothing(length, items, world, batches):
    found = order(1, 2, length)
    ahead = Ahead(found, items)
    first = 0
    for batch in batches:
        positions = range(first, length, world)[:batch]
        assert ahead.at(positions) == found.at(positions)
        first += batch * world


def test_computing_ahead_asks_for_many_at_once():
    class Counting:
        length, calls = 10_000, 0

        def at(self, positions):
            self.calls += 1
            return list(positions)

    counting = Counting()
    ahead = Ahead(counting, items=1000)
    for first in range(0, 8000, 32):
        assert ahead.at(range(first, first + 32, 2)) == list(range(first, first + 32, 2))
    assert counting.calls <= 5
