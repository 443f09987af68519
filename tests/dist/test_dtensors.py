"""DTensors of every kind, and wrappers in them, come back as they were, also to other ranks."""

import pytest
import torch
from launch import start, values

from dcp_checkfreq import find_latest_valid, open_checkpoint

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]

JOBS = [
    "dtensors_through_checkpointer",
    "sharded_states",
    "partial_is_refused",
    "plain_saves_of_odd_shards",
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("dtensors")


@pytest.fixture(scope="module")
def two(shared):
    return start(2, shared, JOBS)


@pytest.fixture(scope="module")
def one(shared, two):
    return start(1, shared, [*JOBS[:2], "sharded_states_of_one"])


@pytest.fixture(scope="module")
def two_again(shared, one):
    return start(2, shared, ["sharded_states_of_one"])


def test_every_placement_and_wrapper_comes_back(two):
    assert values(two["dtensors_through_checkpointer"]) == [[], []]


def test_they_come_back_to_one_rank(one):
    assert values(one["dtensors_through_checkpointer"]) == [[]]


def test_they_are_opened_in_whole_and_in_part_without_ranks(shared, two):
    shapes = {
        "uneven": (5, 3),
        "empty": (1, 3),
        "columns": (3, 5),
        "copies": (3, 5),
        "qkv": (12, 3),
        "qkv_uneven": (7, 2),
        "qkv_columns": (2, 12),
    }
    with open_checkpoint(find_latest_valid(shared / "dtensors")) as opened:
        for name, shape in shapes.items():
            elements = torch.Size(shape).numel()
            saved = torch.arange(3, 3 + elements, dtype=torch.float32).reshape(shape)
            lazy = opened[f"model.{name}"]
            assert torch.equal(lazy.tensor(), saved)
            assert torch.equal(lazy[-1], saved[-1])
            assert torch.equal(lazy[..., 1:], saved[..., 1:])
        tensors = opened.tensors().items()
        inner = [list(one.shape) for key, one in tensors if key.startswith("model.two.")]
        assert inner == [[4, 3], [4, 3]]


def test_a_fresh_optimizer_gets_its_state_sharded_as_it_was(two):
    assert values(two["sharded_states"]) == [[], []]


def test_a_fresh_optimizer_of_one_rank_gets_it(one):
    assert values(one["sharded_states"]) == [[]]


def test_state_of_one_rank_is_cut_as_its_class_cuts_it(one, two_again):
    assert values(one["sharded_states_of_one"]) == [[]]
    assert values(two_again["sharded_states_of_one"]) == [[], []]


def test_partial_sums_are_refused_by_key_when_registered(two):
    for text in values(two["partial_is_refused"]):
        assert "'v.deep.0'" in text
        assert "Partial" in text
        assert "redistribute" in text


def test_plain_saves_name_the_key_of_shards_that_stock_takes_for_others(two):
    for said in values(two["plain_saves_of_odd_shards"]):
        assert len(said) == 4
        for text, what in zip(said, ["Partial"] * 2 + ["strided"] * 2, strict=True):
            assert "'deep.w' is a DTensor with" in text
            assert what in text
