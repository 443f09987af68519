"""What an index picks is what torch's own indexing picks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from dcp_checkfreq.opened.picked import picked

SHAPES = some.lists(some.integers(0, 5), max_size=4)
NUMBERS = some.integers(-7, 7)
SLICES = some.builds(
    slice, some.none() | NUMBERS, some.none() | NUMBERS, some.none() | some.integers(1, 3)
)
PARTS = NUMBERS | SLICES | some.just(...)


@given(SHAPES, PARTS | some.lists(PARTS, max_size=5).map(tuple))
def test_an_index_picks_what_torch_picks(shape, index):
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    try:
        expected = whole[index]
    except IndexError:
        with pytest.raises(IndexError):
            picked(index, shape)
        return
    box = picked(index, shape)
    read = whole
    for dim, (start, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
        read = read.narrow(dim, start if length else 0, length)
    got = read[box.rest]
    assert got.shape == expected.shape
    assert torch.equal(got, expected)


@given(some.integers(1, 1000), some.integers(0, 1000), some.integers(1, 9))
def test_no_more_is_read_than_from_the_first_to_the_last(size, start, step):
    box = picked(slice(start, None, step), [size])
    last = max(range(start, size, step), default=None)
    assert box.lengths == ((last - start + 1,) if last is not None else (0,))


@pytest.mark.parametrize("index", [None, True, [0, 1], "0", 1.0, torch.tensor([True, False])])
def test_other_kinds_of_index_are_named(index):
    with pytest.raises(TypeError, match=f"{type(index).__name__}.*tensor"):
        picked(index, [2, 3])


def test_a_slice_that_goes_backward_is_refused_as_torch_refuses_it():
    with pytest.raises(ValueError, match="above zero, got -1"):
        picked(slice(None, None, -1), [3])
