"""Tensors as bytes: every dtype and layout, alive as long as someone looks at them."""

import gc
import io
import weakref

import pytest
import torch

from dcp_checkfreq.errors import UnsupportedState
from dcp_checkfreq.format.digest import digest
from dcp_checkfreq.format.envelope import Envelopes
from dcp_checkfreq.shards.codec import (
    byte_item,
    bytes_of,
    dense,
    memory_of,
    pieces,
    tensor_item,
)
from dcp_checkfreq.shards.layout import lay_out


def bits(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
    torch.int64, torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def some(dtype, *shape):
    return (torch.arange(torch.Size(shape).numel()) % 2).reshape(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3)], ids=str)
def test_the_bytes_of_a_tensor_are_its_memory(dtype, shape):
    tensor = some(dtype, *shape)
    view = bytes_of(tensor)
    assert (view.format, view.ndim, view.nbytes) == ("B", 1, tensor.nbytes)
    assert bytes(view) == bits(tensor)


def test_the_view_writes_through_to_the_tensor():
    tensor = torch.zeros(3, dtype=torch.int32)
    bytes_of(tensor)[4:8] = (5).to_bytes(4, "little")
    assert tensor.tolist() == [0, 5, 0]


@pytest.mark.slow
def test_a_view_and_every_slice_of_it_keeps_the_tensor_alive():
    tensor = torch.full((1000,), 7, dtype=torch.int64)
    gone = weakref.ref(tensor)
    view = bytes_of(tensor)
    part = view[8:16][4:]
    del tensor, view
    gc.collect()
    assert gone() is not None
    others = [torch.full((1000,), 9, dtype=torch.int64) for _ in range(50)]
    assert bytes(part) == bytes(4)
    del others, part
    gc.collect()
    assert gone() is None


NOT_PLAIN = {
    "transposed": lambda: some(torch.float32, 3, 4).t(),
    "every other": lambda: torch.arange(10.0)[::2],
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "conj": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "neg": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "conj transposed": lambda: torch.tensor([[1 + 2j, 3], [5, 6 - 1j]]).conj().t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_what_is_not_plain_memory_is_made_so_with_its_values(kind):
    tensor = NOT_PLAIN[kind]()
    plain = dense(tensor)
    assert plain.is_contiguous()
    assert not plain.is_conj()
    assert not plain.is_neg()
    assert torch.equal(plain, tensor)
    assert bytes(bytes_of(plain)) == bits(tensor.resolve_conj().resolve_neg())


def test_plain_memory_is_not_copied():
    tensor = torch.arange(6.0).reshape(2, 3)
    for plain in (tensor, torch.nn.Parameter(tensor), tensor[1:], tensor.reshape(-1)[2:4]):
        assert dense(plain).data_ptr() == plain.data_ptr()


def test_only_the_same_elements_of_the_memory_of_are_the_same():
    tensor = torch.zeros(4, 4, dtype=torch.complex64)
    same = memory_of(tensor)
    assert memory_of(tensor[:]) == same
    others = [tensor.t(), tensor[:2], tensor[1:], tensor.view(16), tensor.conj(), tensor.clone(),
              tensor.real, tensor.view(torch.float32)]  # fmt: skip
    assert all(memory_of(other) != same for other in others)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.empty(2, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    ],
    ids=["sparse", "meta", "quantized"],
)
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:UserWarning")
def test_what_has_no_bytes_of_its_own_is_refused_by_name(make):
    with pytest.raises(UnsupportedState, match=r"model\.weight"):
        tensor_item(make(), "model.weight", Envelopes())


def written(items, max_files=1):
    """Return the files that the items make, as bytes."""
    placements = lay_out(items, max_files)
    return [(placement, b"".join(pieces(items, placement))) for placement in placements]


def test_a_file_holds_every_item_where_its_placement_says():
    tensors = [
        some(torch.float32, 3, 5),
        torch.empty(0),
        some(torch.bfloat16, 200, 300),
        some(torch.int64),
        some(torch.float32, 300, 500).t(),
        torch.tensor([1 + 2j]).conj(),
        torch.arange(1 << 20),
    ]
    envelopes = Envelopes()
    items = [tensor_item(tensor, "t", envelopes) for tensor in tensors]
    items.insert(3, byte_item(io.BytesIO(b"some bytes")))
    tensors.insert(3, None)
    ((placement, content),) = written(items)
    assert len(content) == placement.size_bytes
    for position, start in zip(placement.items, placement.starts, strict=True):
        item, tensor = items[position], tensors[position]
        archive = content[start : start + item.envelope.item_bytes]
        if tensor is None:
            assert content[start : start + item.payload_bytes] == b"some bytes"
            continue
        assert torch.equal(torch.load(io.BytesIO(archive), weights_only=True), tensor)
        payload = content[start + len(item.envelope.prefix) :][: item.payload_bytes]
        blocks = range(0, item.payload_bytes, item.block)
        assert item.digests == [digest(payload[at : at + item.block]) for at in blocks]


def test_gaps_between_items_are_zero():
    items = [
        tensor_item(torch.full((n,), -1, dtype=torch.int8), "t", Envelopes()) for n in (3, 70_000)
    ]
    ((placement, content),) = written(items)
    end = placement.starts[0] + items[0].envelope.item_bytes
    assert set(content[end : placement.starts[1]]) <= {0}
    end = placement.starts[1] + items[1].envelope.item_bytes
    assert set(content[end:]) <= {0}


def test_a_stream_is_taken_from_its_start_wherever_it_stands():
    stream = io.BytesIO(b"abc")
    stream.seek(2)
    assert bytes(byte_item(stream).source) == b"abc"


def test_pieces_are_few():
    items = [tensor_item(torch.zeros(4), "t", Envelopes()) for _ in range(100)]
    ((placement, _),) = written(items)
    assert len(list(pieces(items, placement))) <= 2 * len(items) + 1
