"""The order looks like a random one. Fixed seeds: each number here is the same in every run.

All results are z-scores, expected to be within 4 of zero for a uniformly random permutation. What
the tests can tell apart is shown at the end, with orders that are not good enough.
"""

import bisect
import itertools
import math

import numpy as np
import pytest

from dcp_checkfreq.data.order import permutation as order_module
from dcp_checkfreq.data.order.permutation import _Feistel, derive, order

pytestmark = pytest.mark.slow

KEYS = 20_000
LARGE = [70_001, 1 << 20, 10_000_019]


def chi_square_z(counts, *, shrink=1.0):
    """Return how far counts are from equal ones, in standard deviations.

    ``shrink`` is the variance relative to independent draws: smaller if drawn without putting back.
    """
    counts = np.asarray(counts, dtype=float).ravel()
    expected = counts.sum() / counts.size
    statistic = ((counts - expected) ** 2).sum() / expected / shrink
    freedom = counts.size - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def correlation_z(a, b):
    return np.corrcoef(a, b)[0, 1] * math.sqrt(len(a))


def sorted_order(key, length):
    return order(key, 0, length)


def feistel(key, length):
    return _Feistel(derive(77, key), length)


def many(make, length):
    positions = np.arange(length)
    return np.array([make(key, length).array(positions) for key in range(KEYS)])


@pytest.fixture(scope="module", params=[sorted_order, feistel], ids=["sorted", "feistel"])
def orders_of_13(request):
    return many(request.param, 13)


def place_z(orders):
    length = orders.shape[1]
    counts = [np.bincount(orders[:, p], minlength=length) for p in range(length)]
    # Rows and columns both add up: (n - 1)^2 degrees of freedom instead of n^2 - 1.
    statistic = sum(((c - KEYS / length) ** 2).sum() / (KEYS / length) for c in counts)
    freedom = (length - 1) ** 2
    # Counts of one permutation hang together, so the statistic is larger by n / (n - 1).
    return (statistic * (length - 1) / length - freedom) / math.sqrt(2 * freedom)


def pair_z(orders):
    length = orders.shape[1]
    both = orders[:, :-1] * length + orders[:, 1:]
    found = np.bincount(both.ravel(), minlength=length * length).reshape(length, length)
    return chi_square_z(found[~np.eye(length, dtype=bool)])


def test_each_item_is_as_likely_at_each_place(orders_of_13):
    assert abs(place_z(orders_of_13)) < 4


def test_each_item_is_as_likely_to_follow_each_other(orders_of_13):
    assert abs(pair_z(orders_of_13)) < 4


def test_all_orders_of_five_are_as_likely():
    found = many(sorted_order, 5)
    code = (found * 5 ** np.arange(5)).sum(axis=1)
    possible = [sum(d * 5**i for i, d in enumerate(p)) for p in itertools.permutations(range(5))]
    counts = np.bincount(code, minlength=5**5)
    assert counts[possible].sum() == KEYS
    assert abs(chi_square_z(counts[possible])) < 4


def longest_rising(values):
    piles = []
    for value in values:
        at = bisect.bisect_left(piles, value)
        piles[at : at + 1] = [value]
    return len(piles)


@pytest.mark.parametrize("make", [sorted_order, feistel])
def test_the_longest_rising_run_is_as_long_as_chance_makes_it(make):
    length, keys = 10_000, 40
    positions = np.arange(length)
    lengths = [longest_rising(make(k, length).array(positions).tolist()) for k in range(keys)]
    # Baik, Deift, Johansson 1999: 2 sqrt(n) - 1.77 n^(1/6), deviation 0.9 n^(1/6).
    sixth = length ** (1 / 6)
    expected, deviation = 2 * math.sqrt(length) - 1.7711 * sixth, 0.9018 * sixth
    assert abs(np.mean(lengths) - expected) < 4 * deviation / math.sqrt(keys)


@pytest.mark.parametrize("length", [1000, 65_536, *LARGE])
def test_neighbours_in_the_order_have_nothing_in_common(length):
    indices = order(1, 2, length).array(np.arange(min(length, 1 << 20)))
    following = order(1, 3, length).array(np.arange(min(length, 1 << 20)))
    for lag in (1, 2, 256):
        assert abs(correlation_z(indices[:-lag], indices[lag:])) < 4
    assert abs(correlation_z(indices, following)) < 4
    assert abs(correlation_z(indices, np.arange(len(indices)))) < 4


@pytest.mark.parametrize("length", LARGE)
def test_steps_from_one_to_the_next_go_everywhere(length):
    indices = order(4, 0, length).array(np.arange(60_000))
    steps = np.diff(indices) % length
    assert abs(chi_square_z(np.bincount(steps * 64 // length, minlength=64))) < 4
    low = np.bincount((indices[:-1] % 8) * 8 + indices[1:] % 8, minlength=64)
    assert abs(chi_square_z(low)) < 4


@pytest.mark.parametrize("length", [10_000, 100_000, 1 << 20])
def test_any_part_of_an_epoch_has_items_from_all_over(length):
    tenth = length // 10
    statistics = [
        chi_square_z(
            np.bincount(
                order(seed, 0, length).array(np.arange(first, first + tenth)) * 50 // length,
                minlength=50,
            ),
            shrink=0.9,
        )
        for seed in range(20)
        for first in (0, 4 * tenth)
    ]
    assert abs(np.mean(statistics)) * math.sqrt(len(statistics)) < 4


# --- what these tests are able to notice ---


def test_too_few_rounds_would_be_noticed(monkeypatch):
    monkeypatch.setattr(order_module, "_ROUNDS", 4)
    found = many(feistel, 13)
    assert max(abs(place_z(found)), abs(pair_z(found))) > 4


def test_a_linear_order_would_be_noticed():
    length = 70_001
    indices = (np.arange(60_000) * 44_111 + 5) % length
    assert abs(chi_square_z(np.bincount(np.diff(indices) % length * 64 // length))) > 100
