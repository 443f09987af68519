"""Which bytes hold a wanted box: compared with torch slicing, box by box."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from dcp_checkfreq.shards.byte_spans import Span, span_of, strides_of

SHAPES = [(), (0,), (1,), (5,), (2, 3), (3, 1, 2), (2, 2, 2), (1, 4), (4, 1), (2, 0, 3), (1, 1, 1)]


def boxes_of(shape):
    """Yield offsets and lengths of every box inside a shape."""
    ranges = [
        [(start, stop - start) for start in range(size + 1) for stop in range(start, size + 1)]
        for size in shape
    ]
    for box in itertools.product(*ranges):
        yield tuple(start for start, _ in box), tuple(length for _, length in box)


def check(shape, offsets, lengths):
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    box = whole
    for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        box = box.narrow(dim, start, length)
    wanted = box.flatten().tolist()
    span = span_of(shape, offsets, lengths)
    if not wanted:
        assert span == Span(0, 0, dense=True)
        return
    assert (span.start, span.stop) == (wanted[0], wanted[-1] + 1), "not the smallest run"
    assert span.dense == (wanted == list(range(span.start, span.stop)))
    run = whole.flatten()[span.start : span.stop]
    assert torch.equal(run.as_strided(lengths, strides_of(shape)), box)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_box_of_a_small_shape_is_what_torch_slices(shape):
    for offsets, lengths in boxes_of(shape):
        check(shape, offsets, lengths)


@examples(200)
@given(data=st.data(), shape=st.lists(st.integers(0, 5), max_size=5))
def test_any_box_is_what_torch_slices(data, shape):
    offsets = [data.draw(st.integers(0, size)) for size in shape]
    lengths = [
        data.draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True)
    ]
    check(shape, offsets, lengths)


@given(shape=st.lists(st.integers(0, 5), max_size=5))
def test_strides_are_those_of_torch(shape):
    assert strides_of(shape) == torch.empty(shape).stride()


def test_rows_of_a_matrix_are_dense_and_columns_are_not():
    assert span_of((4, 6), (1, 0), (2, 6)) == Span(6, 18, dense=True)
    assert span_of((4, 6), (1, 0), (1, 3)) == Span(6, 9, dense=True)
    assert span_of((4, 6), (1, 2), (2, 1)) == Span(8, 15, dense=False)


@pytest.mark.parametrize(
    ("shape", "offsets", "lengths"),
    [
        ((4,), (0,), (5,)),
        ((4,), (3,), (2,)),
        ((4,), (-1,), (2,)),
        ((4,), (0,), (-1,)),
        ((4,), (5,), (0,)),
        ((4,), (0, 0), (1, 1)),
        ((4, 4), (0,), (1,)),
        ((), (0,), (1,)),
        ((4,), (), ()),
        ((0, 3), (0, 2), (0, 2)),
    ],
)
def test_a_box_outside_of_its_chunk_is_an_error(shape, offsets, lengths):
    with pytest.raises(ValueError, match="box"):
        span_of(shape, offsets, lengths)
