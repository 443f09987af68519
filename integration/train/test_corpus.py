"""The data position and the order of samples, without any process."""

from __future__ import annotations

import pytest
from corpus import Position, SampleId, Windows, permuted, read_corpus
from hypothesis import given
from hypothesis import strategies as st


@given(count=st.integers(1, 300), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
def test_the_order_of_an_epoch_holds_every_sample_once(count: int, seed: int, epoch: int) -> None:
    order = [permuted(index, count, seed=seed, epoch=epoch) for index in range(count)]
    assert sorted(order) == list(range(count))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(permuted(index, 50, seed=seed, epoch=epoch) for index in range(50))
        for seed in (1, 2)
        for epoch in range(5)
    }
    assert len(orders) == 10


def take(position: Position, ranks: int) -> list[SampleId]:
    """Return a global batch of 12, taken by as many ranks as told, each with its own position."""
    before = position.state_dict()
    parts = []
    for rank in range(ranks):
        position.load_state_dict(before)
        parts += position.take(12, rank=rank, ranks=ranks)
    return parts


@given(
    count=st.integers(1, 70),
    ranks_by_step=st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=20),
)
def test_the_samples_of_a_step_do_not_depend_on_the_ranks(
    count: int, ranks_by_step: list[int]
) -> None:
    alone, shared = Position(count, seed=7), Position(count, seed=7)
    seen: list[SampleId] = []
    for ranks in ranks_by_step:
        batch = take(shared, ranks)
        assert batch == take(alone, 1)
        assert shared.state_dict() == alone.state_dict()
        resumed = Position(count, seed=7)  # a position is all that its state says
        resumed.load_state_dict(shared.state_dict())
        shared = resumed
        seen += batch
    assert len(set(seen)) == len(seen) == 12 * len(ranks_by_step)
    whole_epochs, rest = divmod(len(seen), count)
    assert shared.state_dict() == {"epoch": whole_epochs, "samples": rest}


def test_a_batch_that_cannot_be_split_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="evenly"):
        Position(100, seed=1).take(12, rank=0, ranks=5)


@pytest.mark.slow  # lists the whole standard library
def test_a_window_is_text_and_its_target_is_the_next_byte() -> None:
    text = read_corpus(10 * 16 + 1)
    tokens, targets = Windows(10, 16).batch([SampleId(0, 3), SampleId(0, 9)])
    assert bytes(tokens[0].tolist()) == text[48:64]
    assert bytes(targets[0].tolist()) == text[49:65]
    assert bytes(targets[1].tolist()) == text[145:161]
