"""Read bytes end up in the wanted box of a live tensor: any cut, order, layout and dtype."""

import itertools
import random
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from dcp_checkfreq.shards.byte_spans import span_of
from dcp_checkfreq.shards.codec import bytes_of
from dcp_checkfreq.shards.read_plan import Want
from dcp_checkfreq.shards.targets import BytesTarget, TensorTarget


def deliver(target, saved, start, stop, cuts, order=None):
    """Hand over bytes ``[start, stop)`` of ``saved`` in pieces that end at ``cuts``."""
    memory = bytes_of(saved)
    borders = [start, *sorted(cut for cut in set(cuts) if start < cut < stop), stop]
    parts = list(itertools.pairwise(borders))
    if order is not None:
        order.shuffle(parts)
    for low, high in parts:
        lent = bytearray(memory[low:high])
        target.take(Want(0, "a", 0, low, high, 0), memoryview(lent))
        lent[:] = b"\xee" * len(lent)  # only lent: it is overwritten right after


@examples(150)
@given(data=st.data(), shape=st.lists(st.integers(1, 5), max_size=4).map(tuple))
def test_any_box_in_any_pieces_and_order_arrives(data, shape):
    offsets = [data.draw(st.integers(0, size - 1)) for size in shape]
    lengths = [
        data.draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True)
    ]
    saved = torch.randperm(torch.Size(shape).numel()).to(torch.int32).reshape(shape)
    wanted = saved
    for dim, (at, length) in enumerate(zip(offsets, lengths, strict=True)):
        wanted = wanted.narrow(dim, at, length)
    live = torch.full(lengths, -1, dtype=torch.int32)
    span = span_of(shape, offsets, lengths)
    target = TensorTarget(live, shape, torch.int32, span)
    # As the reader does: rounded out to blocks, so more than the box may come.
    start = data.draw(st.integers(0, span.start * 4))
    stop = data.draw(st.integers(span.stop * 4, saved.nbytes))
    cuts = data.draw(st.lists(st.integers(0, saved.nbytes), max_size=5))
    deliver(target, saved, start, stop, cuts, random.Random(len(cuts)))
    assert torch.equal(live, wanted)


LIVE = {
    "plain": lambda: torch.full((4, 6), -1.0),
    "parameter": lambda: torch.nn.Parameter(torch.full((4, 6), -1.0)),
    "transposed": lambda: torch.full((6, 4), -1.0).t(),
    "columns of a larger one": lambda: torch.full((4, 12), -1.0)[:, ::2],
    "rows of a larger one": lambda: torch.full((9, 6), -1.0)[3:7],
    "other dtype": lambda: torch.full((4, 6), -1.0, dtype=torch.float64),
    "imaginary part": lambda: torch.full((4, 6), 1j).imag,
    "negated view": lambda: torch.full((4, 6), 1j).conj().imag,
}


@pytest.mark.parametrize("kind", LIVE)
def test_a_live_tensor_of_any_layout_gets_the_values(kind):
    saved = torch.arange(24.0).reshape(4, 6)
    live = LIVE[kind]()
    target = TensorTarget(live, (4, 6), torch.float32, span_of((4, 6), (0, 0), (4, 6)))
    deliver(target, saved, 0, saved.nbytes, [10, 50, 51])
    assert torch.equal(live.detach().to(torch.float32), saved)


def test_what_lies_around_the_box_is_not_touched():
    storage = torch.full((9, 6), -1.0)
    saved = torch.arange(24.0).reshape(4, 6)
    target = TensorTarget(storage[3:5], (4, 6), torch.float32, span_of((4, 6), (1, 0), (2, 6)))
    deliver(target, saved, 0, saved.nbytes, [1, 47, 90])
    assert torch.equal(storage[3:5], saved[1:3])
    assert torch.equal(storage[:3], torch.full((3, 6), -1.0))
    assert torch.equal(storage[5:], torch.full((4, 6), -1.0))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e5m2, torch.complex64])
def test_bits_arrive_as_they_were_saved(dtype):
    saved = (torch.arange(8) % 2).to(dtype)
    live = torch.zeros(8, dtype=dtype)
    target = TensorTarget(live, (8,), dtype, span_of((8,), (0,), (8,)))
    deliver(target, saved, 0, saved.nbytes, range(saved.nbytes))
    assert torch.equal(live.view(torch.uint8), saved.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)], ids=str)
def test_a_scalar_and_an_empty_tensor_are_boxes_too(shape):
    saved, live = torch.full(shape, 3.0), torch.full(shape, -1.0)
    zeros = (0,) * len(shape)
    target = TensorTarget(live, shape, torch.float32, span_of(shape, zeros, shape))
    deliver(target, saved, 0, saved.nbytes, [])
    assert torch.equal(live, saved)


def test_a_strided_box_appears_only_when_it_is_whole():
    saved = torch.arange(24.0).reshape(4, 6)
    live = torch.full((4, 2), -1.0)
    target = TensorTarget(live, (4, 6), torch.float32, span_of((4, 6), (0, 1), (4, 2)))
    memory = bytes_of(saved)
    target.take(Want(0, "a", 0, 0, 40, 0), memory[:40])
    assert torch.equal(live, torch.full((4, 2), -1.0))
    target.take(Want(0, "a", 0, 40, 96, 0), memory[40:])
    assert torch.equal(live, saved[:, 1:3])


def test_threads_deliver_different_pieces_at_once():
    saved = torch.arange(60_000.0).reshape(300, 200)
    live = torch.full((300, 199), -1.0)
    span = span_of((300, 200), (0, 1), (300, 199))
    target = TensorTarget(live, (300, 200), torch.float32, span)
    memory = bytes_of(saved)
    step = saved.nbytes // 8
    barrier = threading.Barrier(8)

    def one(number):
        barrier.wait()
        for start in range(number * step, (number + 1) * step, 1000):
            stop = min(start + 1000, (number + 1) * step)
            target.take(Want(0, "a", 0, start, stop, 0), memory[start:stop])

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(live, saved[:, 1:])


def test_a_byte_item_is_gathered_whole():
    target = BytesTarget(10)
    target.take(Want(0, "a", 0, 4, 10, 0), memoryview(b"456789"))
    target.take(Want(0, "a", 0, 0, 4, 0), memoryview(b"0123"))
    assert bytes(target.data) == b"0123456789"
