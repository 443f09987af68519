"""What no chunk covers is counted exactly, whatever overlaps."""

import itertools
import math
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.shards.coverage import TooTangled, uncovered


@st.composite
def tensors(draw):
    size = draw(st.lists(st.integers(0, 5), max_size=4))
    boxes = []
    for _ in range(draw(st.integers(0, 6))):
        starts = [draw(st.integers(0, n)) for n in size]
        lengths = [draw(st.integers(0, n - s)) for n, s in zip(size, starts, strict=True)]
        boxes.append((tuple(starts), tuple(lengths)))
    return tuple(size), boxes


@given(tensors())
def test_it_counts_what_counting_one_by_one_counts(tensor):
    size, boxes = tensor
    missing = sum(
        not any(
            all(s <= i < s + n for i, s, n in zip(element, starts, lengths, strict=True))
            for starts, lengths in boxes
        )
        for element in itertools.product(*map(range, size))
    )
    assert uncovered(size, boxes) == missing


def grid(size, parts, rng):
    """Cut a tensor into boxes along each dimension, in random order."""
    cuts = [[n * i // p for i in range(p + 1)] for n, p in zip(size, parts, strict=True)]
    boxes = [
        ([a for a, _ in spans], [b - a for a, b in spans])
        for spans in itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts))
    ]
    rng.shuffle(boxes)
    return boxes


@pytest.mark.parametrize("parts", [(4096, 1), (1, 4096), (64, 64), (16, 256)])
def test_thousands_of_shards_take_little_and_one_that_is_missing_is_found(parts):
    size = (1 << 20, 1 << 16)
    boxes = grid(size, parts, random.Random(1))
    begun = time.process_time()
    assert uncovered(size, boxes) == 0
    lost = boxes.pop()
    assert uncovered(size, boxes) == math.prod(lost[1])
    boxes.append(boxes[0])  # an overlap of the very volume that is missing
    assert uncovered(size, boxes) == math.prod(lost[1])
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("dims", [2, 3, pytest.param(6, marks=pytest.mark.slow)])
def test_made_up_overlaps_are_given_up_soon(dims):
    size = (1 << 20,) * dims
    boxes = [((n,) * dims, (1 << 19,) * dims) for n in range(3000)]
    begun = time.process_time()
    with pytest.raises(TooTangled):
        uncovered(size, boxes)
    assert time.process_time() - begun < 5
