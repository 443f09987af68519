"""Where a job is in its data: every item exactly once, however often the job is cut and resized."""

import json
import random
from collections import Counter
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dcp_checkfreq.data.order.position import Deal, Last, Position, batch_per_rank
from dcp_checkfreq.data.order.saved_position import Fingerprint, accept, decode, encode, short_id
from dcp_checkfreq.errors import DataStateError

FINGERPRINT = Fingerprint(
    length=100, seed=7, order="shuffled-1", last="partial", dataset="", global_batch=8
)


def steps_of(deal, at):
    """Yield the steps that are left of an epoch."""
    epoch = at.epoch
    while at.epoch == epoch and (step := deal.step(at)) is not None:
        yield step
        at = step.after


def taken(deal, step):
    """Return the positions that count and those that do not, over all ranks, in this step."""
    real, repeated = [], []
    for rank in range(deal.world_size):
        share = deal.share(step, rank)
        flat = [(epoch, p) for epoch, positions in share.runs for p in positions]
        assert len(flat) == len(share) >= 1
        real += flat[: share.valid]
        repeated += flat[share.valid :]
    return real, repeated


def random_history(rng, last, epochs=3):
    """Play a job that is cut and resized at random; return (length, real, repeated, sizes)."""
    length = rng.randint(1, 90)
    at, real, repeated = Position(), [], []
    while at.epoch < epochs:
        world, batch = rng.randint(1, 9), rng.randint(1, 9)
        if last == "drop" and world * batch > length:
            world, batch = 1, min(batch, length)
        deal = Deal(length, batch, world, last)
        # A job that goes on knows no more than the saved text.
        at, _ = decode(encode(at, replace(FINGERPRINT, length=length)), "loader")
        for _ in range(rng.randint(1, 12)):
            step = deal.step(at)
            if step is None:
                at = Position(at.epoch + 1, 0)
                break
            counted, others = taken(deal, step)
            sizes = [len(deal.share(step, rank)) for rank in range(world)]
            assert len(counted) == step.real
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) <= batch + (last == "partial")
            if last in ("carry", "drop", "pad"):
                assert sizes == [batch] * world
            real += counted
            repeated += others
            at = step.after
            assert 0 <= at.samples < length
            if at.epoch >= epochs:
                break
    return length, real, repeated


@pytest.mark.slow
@pytest.mark.parametrize("last", ["partial", "pad"])
def test_every_item_counts_exactly_once_per_epoch_in_any_elastic_history(last):
    rng = random.Random(0)
    for _ in range(2000):
        length, real, repeated = random_history(rng, last)
        assert Counter(real) == Counter((e, p) for e in range(3) for p in range(length))
        assert {p for _, p in repeated} <= set(range(length))


@pytest.mark.slow
def test_with_carry_every_item_counts_once_and_no_batch_is_short():
    rng = random.Random(1)
    for _ in range(2000):
        length, real, repeated = random_history(rng, "carry")
        times = Counter(real)
        assert not repeated
        assert set(times.values()) == {1}
        assert set(times) >= {(e, p) for e in range(3) for p in range(length)}


def test_with_drop_nothing_counts_twice_and_only_the_end_is_left_out():
    rng = random.Random(2)
    for _ in range(1000):
        _, real, repeated = random_history(rng, "drop")
        assert not repeated
        for epoch in range(3):
            positions = [p for e, p in real if e == epoch]
            assert sorted(positions) == list(range(len(positions)))


def test_ranks_that_get_a_repeated_sample_are_rare_and_told():
    rng = random.Random(3)
    histories = [random_history(rng, "partial") for _ in range(300)]
    repeated = sum(len(others) for _, _, others in histories)
    assert 0 < repeated < sum(len(real) for _, real, _ in histories) / 20


# 50 items on 3 ranks x 4, two epochs: what each policy takes per epoch.
@pytest.mark.parametrize(
    ("last", "sizes", "repeated"),
    [
        ("partial", [12, 12, 12, 14], 0),
        ("drop", [12, 12, 12, 12], 0),
        ("pad", [12, 12, 12, 12, 12], 10),
        ("carry", [12, 12, 12, 12, 12], 0),
    ],
)
def test_what_becomes_of_the_last_samples(last, sizes, repeated):
    deal = Deal(50, 4, 3, last)
    steps = list(steps_of(deal, Position()))
    assert [sum(len(deal.share(s, rank)) for rank in range(3)) for s in steps] == sizes
    assert sum(len(taken(deal, step)[1]) for step in steps) == repeated
    after = Position(1, 10) if last == "carry" else Position(1, 0)
    assert steps[-1].after == after


def test_with_carry_one_batch_may_span_several_epochs():
    deal = Deal(3, 4, 2, "carry")
    step = deal.step(Position(5, 2))
    assert step.after == Position(8, 1)
    real, _ = taken(deal, step)
    assert sorted(real) == [(5, 2), *((e, p) for e in (6, 7) for p in range(3)), (8, 0)]


def test_ranks_share_a_step_in_stripes():
    deal = Deal(100, 3, 4)
    step = deal.step(Position(0, 24))
    assert deal.share(step, 2).runs == ((0, range(26, 36, 4)),)


@given(
    length=st.integers(1, 400),
    batch=st.integers(1, 20),
    world=st.integers(1, 12),
    last=st.sampled_from(["partial", "carry", "drop", "pad"]),
    data=st.data(),
)
def test_the_steps_that_are_left_are_counted_right(length, batch, world, last, data):
    if last == "drop" and batch * world > length:
        return
    deal = Deal(length, batch, world, last)
    at = Position(2, data.draw(st.integers(0, length - 1)))
    assert deal.steps_left(at) == len(list(steps_of(deal, at)))


@given(data=st.data(), world=st.integers(1, 8), batch=st.integers(1, 8))
def test_the_same_samples_per_step_make_the_same_steps_on_any_ranks(data, world, batch):
    """Ranks times batch size is what decides the loss curve, except for a joined last batch."""
    length = data.draw(st.integers(1, 200))
    whole = world * batch
    for last in ("carry", "pad"):
        one = list(steps_of(Deal(length, whole, 1, last), Position()))
        assert one == list(steps_of(Deal(length, batch, world, last), Position()))


@pytest.mark.parametrize(
    "bad",
    [(0, 1, 1), (5, 0, 1), (5, 1, 0), (5, 1.0, 1), (True, 1, 1), (5, 1, 1, "keep"),
     (5, 3, 2, "drop")],
)  # fmt: skip
def test_a_deal_that_cannot_be_is_refused(bad):
    with pytest.raises(ValueError, match=r"must be|no batch at all"):
        Deal(*bad)


# --- the saved text ---


@pytest.mark.slow
@given(
    epoch=st.integers(0, 10**9),
    samples=st.integers(0, 99),
    seed=st.integers(0, (1 << 64) - 1),
    dataset=st.text(max_size=40),
)
def test_what_is_encoded_is_decoded(epoch, samples, seed, dataset):
    saved = replace(FINGERPRINT, seed=seed, dataset=short_id(dataset))
    assert decode(encode(Position(epoch, samples), saved), "x") == (Position(epoch, samples), saved)


def test_the_state_of_a_billion_items_is_under_200_bytes():
    large = Fingerprint(
        length=10**9,
        seed=12345678,
        order="shuffled-1",
        last="partial",
        dataset=short_id("x" * 1000),
        global_batch=65536,
    )
    text = encode(Position(1000, 10**9 - 1), large)
    assert len(text.encode()) < 200
    assert text.isascii()


def test_long_ids_are_told_apart():
    assert short_id("imagenet-v2") == "imagenet-v2"
    ids = {short_id("x" * n) for n in range(100)} | {short_id("é"), short_id("è")}
    assert len(ids) == 102
    assert max(map(len, ids)) == 32


def changed(**fields):
    state = json.loads(encode(Position(3, 40), FINGERPRINT))
    state.update(fields)
    return json.dumps({key: value for key, value in state.items() if value != "gone"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "None"),
        (b"{}", "b'{}'"),
        ("", "''"),
        ("[1]", r"\[1\]"),
        ("{", "'{'"),
        (changed(format=2), "format 2, this version reads up to 1"),
        (changed(format="gone"), "no 'format'"),
        (changed(samples="gone"), "no 'samples'"),
        (changed(seed="gone"), "no 'seed'"),
        (changed(samples=-1), "-1"),
        (changed(epoch=-1), "-1"),
        (changed(samples=True), "True"),
        (changed(samples=40.0), "40.0"),
        (changed(epoch=None), "None"),
        (changed(order=7), "7"),
        (changed(samples=100), "100 samples of 100"),
        (changed(samples=1000), "1000 samples of 100"),
        (changed(length=10), "40 samples of 10"),
        (changed(seed=8), "the seed was 8, now it is 7"),
        (changed(length=101), "items was 101, now it is 100"),
        (changed(order="shuffled-2"), "'shuffled-2', now it is 'shuffled-1'"),
        (changed(order="sequential"), "'sequential', now it is 'shuffled-1'"),
        (changed(last="pad"), "'pad', now it is 'partial'"),
        (changed(dataset="v1"), "dataset_id was 'v1', now it is ''"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_with_both_values(text, said):
    with pytest.raises(DataStateError, match=f"loader: .*{said}"):
        accept(text, FINGERPRINT, what="loader")


@pytest.mark.parametrize(
    "fields", [{"length": 120}, {"order": "sequential"}, {"last": "pad"}, {"dataset": "v1"}]
)
def test_other_data_starts_the_epoch_anew_if_asked_and_between_epochs_it_is_fine(fields):
    found = accept(changed(**fields), FINGERPRINT, what="x", on_mismatch="restart_epoch")
    assert found.position == Position(3, 0)
    assert "40 samples of it" in found.warnings[0]
    found = accept(changed(samples=0, **fields), FINGERPRINT, what="x")
    assert found.position == Position(3, 0)
    assert len(found.warnings) == 1


@pytest.mark.parametrize("samples", [0, 40])
def test_another_seed_is_refused_whatever_is_asked(samples):
    with pytest.raises(DataStateError, match="the seed was 8"):
        accept(changed(seed=8, samples=samples), FINGERPRINT, what="x", on_mismatch="restart_epoch")


@pytest.mark.parametrize("fields", [{}, {"samples": 0}, {"samples": 0, "length": 120}])
def test_another_number_of_samples_per_step_is_fine_and_a_warning_with_both_figures(fields):
    found = accept(changed(global_batch=16, **fields), FINGERPRINT, what="x")
    assert found.position == Position(3, fields.get("samples", 40))
    assert "16 samples, now it takes 8" in found.warnings[-1]
    was = 8 if "length" in fields else 7
    assert f"an epoch had {was} steps, now 13" in found.warnings[-1]
    assert "global_batch=16" in found.warnings[-1]


def test_steps_of_an_epoch_that_is_dropped_at_its_end():
    present = replace(FINGERPRINT, last="drop")
    (said,) = accept(changed(global_batch=16, last="drop"), present, what="x").warnings
    assert "an epoch had 6 steps, now 12" in said


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 5), st.sampled_from(get_args(Last)))
def test_a_whole_epoch_has_the_same_steps_wherever_in_it_one_asks(length, batch, world, last):
    assume(last != "drop" or length >= batch * world)
    deal, at = Deal(length, batch, world, last), Position()
    for _ in range(3):
        steps = list(steps_of(deal, at))
        for number, step in enumerate(steps):
            assert deal.steps(step.at) == len(steps)
            assert deal.steps_left(step.at) == len(steps) - number
        at = steps[-1].after if last != "drop" else Position(at.epoch + 1, 0)


@given(st.integers(1, 500), st.integers(1, 40))
def test_a_global_batch_is_shared_equally_or_refused_with_numbers_that_would_do(whole, world):
    if whole % world == 0:
        assert batch_per_rank(None, whole, world) * world == whole
        return
    with pytest.raises(ValueError, match=f"global_batch={whole} .*{world} ranks") as caught:
        batch_per_rank(None, whole, world)
    batches, ranks = str(caught.value).split("it may be ")[1].split(f"; {whole} can be had on ")
    for batch in map(int, batches.split(" or ")):
        assert batch_per_rank(None, batch, world) * world == batch
    for number in map(int, ranks.split(" rank")[0].split(", ")):
        assert batch_per_rank(None, whole, number) * number == whole


@pytest.mark.parametrize(
    "told", [(None, None), (4, 8), (None, 0), (None, -4), (None, 8.0), (None, True), (None, "8")]
)
def test_a_batch_is_told_once_and_is_a_number(told):
    with pytest.raises(ValueError, match="global_batch"):
        batch_per_rank(*told, 2)


def test_what_a_later_version_adds_is_ignored():
    found = accept(changed(note="hello"), FINGERPRINT, what="x")
    assert (found.position, found.warnings) == (Position(3, 40), ())


def test_an_unknown_way_out_is_refused():
    with pytest.raises(ValueError, match="on_mismatch"):
        accept(changed(), FINGERPRINT, what="x", on_mismatch="ignore")
