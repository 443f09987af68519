"""An envelope around a tensor's bytes reads with torch.load as if torch.save had written it."""

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from dcp_checkfreq.format.envelope import PAYLOAD_ALIGN_BYTES, Envelopes, make_envelope
from dcp_checkfreq.shards.assign import PAGE_ALIGNED_FROM_BYTES, PAGE_BYTES, Extent, place

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64, torch.complex128, torch.complex32,
]  # fmt: skip
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (2, 3), (5, 1, 2, 2), (1, 100, 1000)]


def payload(dtype, shape, seed=1):
    raw = torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (raw.nbytes,), dtype=torch.uint8, generator=generator)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_load_reads_the_item_back_as_the_tensor(dtype, shape):
    envelope = make_envelope(dtype, shape)
    data = payload(dtype, shape)
    assert envelope.payload_bytes == len(data)
    item = envelope.prefix + bytes(data.tolist()) + envelope.suffix
    assert len(item) == envelope.item_bytes
    loaded = torch.load(io.BytesIO(item), weights_only=True)
    assert (loaded.dtype, tuple(loaded.shape)) == (dtype, shape)
    assert loaded.is_contiguous()
    assert torch.equal(bits(loaded), data)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_payload_lies_at_a_multiple_of_64(dtype, shape):
    envelope = make_envelope(dtype, shape)
    if envelope.payload_bytes:
        assert len(envelope.prefix) % PAYLOAD_ALIGN_BYTES == 0


@examples(40)
@given(shape=st.lists(st.integers(0, 9), max_size=6).map(tuple), dtype=st.sampled_from(DTYPES))
def test_any_shape_makes_a_whole_item(shape, dtype):
    envelope = make_envelope(dtype, shape)
    item = io.BytesIO(envelope.prefix + bytes(envelope.payload_bytes) + envelope.suffix)
    loaded = torch.load(item, weights_only=True)
    assert (loaded.dtype, tuple(loaded.shape)) == (dtype, shape)


def test_the_cache_gives_what_it_gave_before():
    envelopes = Envelopes()
    first = envelopes.get(torch.float32, (2, 3))
    assert envelopes.get(torch.float32, (2, 3)) is first
    assert envelopes.get(torch.float32, (3, 2)) != first
    assert envelopes.get(torch.int32, (2, 3)) != first


def overheads(payload_sizes, envelope):
    """Return what each item costs in a file beyond its payload: archive bytes and the gap."""
    extents = [Extent(len(envelope.prefix), n, len(envelope.suffix)) for n in payload_sizes]
    placement = place(range(len(extents)), extents)
    ends, end = [], 0
    for start, extent in zip(placement.starts, extents, strict=True):
        size = extent.prefix_bytes + extent.payload_bytes + extent.suffix_bytes
        ends.append(start + size - end - extent.payload_bytes)
        end = start + size
    return ends


@pytest.mark.parametrize("shape", [(16384,), (1 << 18, 4096), (65536, 1, 3, 3), (2,) * 16], ids=str)
def test_a_large_item_of_whole_pages_costs_at_most_5_kb(shape):
    envelope = make_envelope(torch.float32, shape)
    pages = [PAGE_BYTES * n for n in (16, 17, 100, 1024, 4096)]
    assert max(overheads(pages * 20, envelope)) <= 5 << 10


def test_large_items_of_any_size_cost_at_most_5_kb_on_average_and_a_page_more_at_worst():
    envelope = make_envelope(torch.bfloat16, (1 << 15, 37))
    sizes = [PAGE_ALIGNED_FROM_BYTES + 2 * n for n in range(0, 6000, 7)]
    costs = overheads(sizes, envelope)
    assert sum(costs) / len(costs) <= 5 << 10
    assert max(costs) < len(envelope.prefix) + len(envelope.suffix) + PAGE_BYTES
    assert len(envelope.prefix) + len(envelope.suffix) <= 2 << 10
