"""Digests of batches: they tell batches apart, are the same in every process, and cost little."""

import collections
import dataclasses
import enum
import random
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.data.wrap.content import digest_of
from dcp_checkfreq.data.wrap.trail import Comparison, Trail, marks


@dataclasses.dataclass
class Sample:
    image: object
    label: int


class Kind(enum.Enum):
    A, B = 1, 2


def images(value, dtype=torch.float32):
    batch = torch.zeros(64, 3, 128, 128, dtype=dtype)
    batch[37] += value
    return batch


# Pairs that are alike and not the same.
APART = [
    (1, 2), (1, True), (1, 1.0), (0, None), ("a", "b"), ("a", b"a"), ("", None), (-1, 255),
    (10**40, 10**40 + 1), ([1, 2], [2, 1]), ([1, 2], (1, 2)), ([[1], 2], [1, [2]]), ({}, []),
    ({"a": 1}, {"a": 2}), ({"a": 1}, {"b": 1}), ({1, 2}, {1, 3}), (Kind.A, Kind.B),
    (Sample(1, 2), Sample(1, 3)), (types.SimpleNamespace(x=1), types.SimpleNamespace(x=2)),
    (collections.OrderedDict(a=1), {"a": 1}), (float("nan"), 0.0), ("x" * 99_999, "x" * 99_998),
    (torch.zeros(3), torch.zeros(4)), (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
    (torch.zeros(2, 3), torch.zeros(3, 2)), (torch.tensor(1), torch.tensor(2)),
    (torch.tensor(1), 1), (torch.tensor([True]), torch.tensor([False])),
    (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)),
    (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64) * 1j),
    (torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(3, 2)),
    (images(0), images(1)), (images(0, torch.uint8), images(1, torch.uint8)),
    (torch.arange(4096).repeat(64, 1), torch.arange(1, 4097).repeat(64, 1)),
    (np.zeros(3), torch.zeros(3)), (np.arange(3), np.arange(1, 4)), (np.float32(1), np.float64(1)),
    (np.array(["a", "b"]), np.array(["a", "c"])), (np.array([{"a": 1}]), np.array([{"a": 2}])),
    (np.array(5), np.array(6)), (torch.empty(0, 3), torch.empty(0, 4)),
    ([torch.zeros(2)] * 40 + [torch.ones(2)], [torch.zeros(2)] * 41),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), APART)
def test_what_is_not_the_same_is_told_apart(one, other):
    assert digest_of(one) == digest_of(one)
    assert digest_of(one) != digest_of(other)
    assert digest_of([{"x": one}]) != digest_of([{"x": other}])


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(2, device="meta"),
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        object(),
        lambda: 0,
        np.array([], dtype=object),
        memoryview(b"abc"),
        range(10**9),
        [[[[[[[[[[[[1]]]]]]]]]]]],
    ],
)
def test_odd_things_have_one(value):
    assert digest_of(value) == digest_of(value)


def test_a_ring_ends():
    ring = []
    ring.append([ring, ring])
    assert digest_of(ring) == digest_of(ring)


@pytest.mark.slow
def test_it_is_the_same_in_a_process_that_hashes_otherwise():
    code = (
        "import torch; from dcp_checkfreq.data.wrap.content import digest_of\n"
        "names = {'cat', 'dog', 'eel', 'fox', 'gnu'}\n"
        "print(digest_of({'names': names, **{n: torch.arange(3) for n in names}}))"
    )
    found = {
        subprocess.check_output([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed,
                                                                  "PYTHONPATH": ":".join(sys.path)})
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1


def test_a_large_batch_costs_no_more_than_a_small_one():
    large = {"image": torch.zeros(256, 3, 224, 224), "ids": list(range(10**6)), "text": "x" * 10**7}
    digest_of(large)
    best = min(timed(large) for _ in range(5))
    assert best < 0.05  # 150 MB: to read all of it takes more


def timed(value):
    begin = time.perf_counter()
    digest_of(value)
    return time.perf_counter() - begin


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7, 8, 9, 100, 1000])
def test_a_trail_has_the_digests_at_its_marks(count):
    trail, short = Trail(), {}
    for number in range(1, count + 1):
        short[number] = trail.add(number * 7)
    comparison = Comparison(trail.text(), count)
    assert all(comparison.see(at, value) is None for at, value in short.items())
    assert marks(count)[-4:] == list(range(max(1, count - 3), count + 1))[-4:]
    assert len(trail.text()) < 250


@given(st.integers(1, 200), st.data())
def test_where_a_replay_parts_is_told(count, data):
    wrong = data.draw(st.integers(1, count))
    trail, other = Trail(), Trail()
    for number in range(1, count + 1):
        trail.add(number)
    comparison = Comparison(trail.text(), count)
    for number in range(1, count + 1):
        parting = comparison.see(number, other.add(number + (number == wrong)))
        if parting is not None:
            assert parting.after < wrong <= parting.at < 2 * wrong + 1
            assert f"{parting.at}" in str(parting)
            return
    pytest.fail("not noticed")


def test_digests_of_another_scheme_are_not_compared():
    comparison = Comparison("2:whatever", 5)
    assert not comparison.is_known
    assert comparison.see(1, 5) is None


@pytest.mark.parametrize("text", ["1:", "1:00", "1:zzzzzzzz", "", "1"])
def test_a_trail_of_other_batches_is_no_trail(text):
    if text == "":
        assert not Comparison(text, 1).is_known
        return
    with pytest.raises(ValueError, match=r"digits|invalid"):
        Comparison(text, 1)


def test_samples_of_a_large_tensor_come_from_every_item_of_the_batch():
    batch = torch.zeros(256, 3, 64, 64)
    whole = digest_of(batch)
    for item in random.Random(0).sample(range(256), 20):
        changed = batch.clone()
        changed[item] = 1
        assert digest_of(changed) != whole
