"""The blocks of a tensor are all of it, in order, none of them too large."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as some

from dcp_checkfreq.convert.blocks import blocks


@given(some.lists(some.integers(0, 6), max_size=4), some.integers(1, 40))
def test_the_blocks_follow_each_other(shape, most):
    whole = torch.arange(math.prod(shape)).reshape(shape)
    parts = [whole[index].reshape(-1) for index in blocks(shape, most)]
    assert all(0 < len(part) <= most for part in parts)
    assert torch.equal(torch.cat([torch.zeros(0, dtype=torch.int64), *parts]), whole.reshape(-1))


@given(some.lists(some.integers(1, 9), max_size=3), some.integers(1, 40))
def test_there_are_few_of_them(shape, most):
    # of rows that fit, each but the last is more than half full
    if shape and math.prod(shape[1:]) <= most < math.prod(shape):
        taken = [index[0].stop - index[0].start for index in blocks(shape, most)]
        assert all(2 * rows * math.prod(shape[1:]) > most for rows in taken[:-1])
