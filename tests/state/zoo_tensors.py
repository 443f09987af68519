"""Tensors of every kind, and how to tell whether one came back as it was."""

import torch

LARGE = 5000  # elements of what has an item of its own
DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)
# Torch fills no memory with them; elements of the same size have their bits.
SIZES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def filled(shape, dtype):
    """A tensor with random bits, of any dtype."""
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        raw %= 2
    made = torch.empty(shape, dtype=dtype)
    if count:
        made.untyped_storage().copy_(raw.untyped_storage())
    return made


def is_quantised(dtype):
    return str(dtype).startswith(("torch.q", "torch.quint"))


# Of those that are left out torch itself saves nothing (int1 to uint7), or makes nothing.
PLAIN_DTYPES = [
    one
    for one in DTYPES
    if not is_quantised(one)
    and not str(one).startswith(("torch.bits", "torch.float4"))
    and str(one) not in {f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
]


class Own(torch.Tensor):
    """A subclass that is plain elements."""


def with_attributes(count):
    made = torch.arange(float(count))
    made.tags = {"kind": ("x", 1)}
    return made


def per_channel(count):
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 3])
    return torch.quantize_per_channel(torch.rand(2, count), scales, zeros, 0, torch.qint8)


def eye(count):
    return torch.eye(count, dtype=torch.float64)


def jagged(count):
    parts = [torch.rand(2, 3), torch.rand(count, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def hole():
    values, offsets = torch.rand(9, 2), torch.tensor([0, 4, 9])
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths=torch.tensor([2, 3]))


def uncoalesced():
    return torch.sparse_coo_tensor([[1, 1, 0]], [1.0, 2.0, 3.0], (4,))


def shared_memory():
    return torch.rand(40).share_memory_()


def inference():
    with torch.inference_mode():
        return torch.rand(40)


def view_of_a_large_one():
    return torch.rand(1 << 20)[5:9]


EXACT = {
    "0-d": lambda: torch.tensor(2.5),
    "0-size": lambda: [torch.empty(shape) for shape in ((0,), (0, 3), (3, 0), (2, 0, 4), (0, 0))],
    "view": lambda: torch.arange(20.0)[3:9],
    "view of a large one": view_of_a_large_one,
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "stepped": lambda: torch.arange(20)[::3],
    "large and transposed": lambda: torch.rand(100, 90).t(),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "large and expanded": lambda: torch.rand(1, 100).expand(90, 100),
    "channels last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conj": lambda: torch.rand(5, dtype=torch.complex64).conj(),
    "large conj": lambda: torch.rand(LARGE, dtype=torch.complex64).conj(),
    "neg": lambda: torch.rand(5, dtype=torch.complex64).conj().imag,
    "large neg": lambda: torch.rand(LARGE, dtype=torch.complex64).conj().imag,
    "requires grad": lambda: [torch.rand(n).requires_grad_() for n in (3, LARGE)],
    "Parameter": lambda: [torch.nn.Parameter(torch.rand(n)) for n in (3, LARGE)],
    "frozen Parameter": lambda: [torch.nn.Parameter(torch.rand(n), False) for n in (3, LARGE)],
    "integer Parameter": lambda: torch.nn.Parameter(torch.arange(3), False),
    "Buffer": lambda: [torch.nn.Buffer(torch.rand(n)) for n in (3, LARGE)],
    "attributes": lambda: [with_attributes(n) for n in (3, LARGE)],
    "subclass": lambda: [torch.rand(n).as_subclass(Own) for n in (3, LARGE)],
    "shared memory": shared_memory,
    "inference": inference,
    "sparse COO": lambda: [eye(n).to_sparse() for n in (3, LARGE // 100, 3000)],
    "hybrid COO": lambda: torch.rand(3, 2).to_sparse(1),
    "uncoalesced COO": uncoalesced,
    "empty COO": lambda: torch.sparse_coo_tensor(size=(3, 4)),
    "sparse Parameter": lambda: torch.nn.Parameter(eye(4).to_sparse()),
    "CSR": lambda: [eye(n).to_sparse_csr() for n in (3, 3000)],
    "CSC": lambda: eye(4).to_sparse_csc(),
    "BSR": lambda: eye(4).to_sparse_bsr((2, 2)),
    "BSC": lambda: eye(4).to_sparse_bsc((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(LARGE, 3)]),
    "jagged": lambda: [jagged(n) for n in (3, LARGE)],
    "jagged with holes": hole,
    "mkldnn": lambda: [torch.rand(n).to_mkldnn() for n in (3, LARGE)],
    "quantised by tensor": lambda: [
        torch.quantize_per_tensor(torch.rand(n), 0.1, 3, kind)
        for n in (3, LARGE, 5 * LARGE)
        for kind in (torch.quint8, torch.qint8, torch.qint32)
    ],
    "quantised by channel": lambda: [per_channel(n) for n in (3, LARGE)],
}


def some(share, *shape):
    """Random numbers, and zeros for about a share of them."""
    return torch.rand(shape) * (torch.rand(shape) >= share)


def blocks(share):
    return some(share, 2, 2, 1, 1).expand(2, 2, 3, 2).permute(0, 2, 1, 3).reshape(6, 4)


def quantised(*shape, dtype=torch.qint8):
    return torch.quantize_per_tensor(torch.rand(shape), float(torch.rand(())), 3, dtype)


def by_channel(zeros, axis=0):
    return torch.quantize_per_channel(torch.rand(2, 2), torch.rand(2), zeros, axis, torch.quint8)


def summed_twice(share):
    values = some(share, 4, 4).to_sparse()
    return torch.sparse_coo_tensor(values.indices().repeat(1, 2), values.values().repeat(2), (4, 4))


# What a module holds as buffer or parameter: made of random numbers, with a share of zeros.
IN_MODULES = {
    "COO": lambda share: some(share, 4, 4).to_sparse(),
    "uncoalesced COO": summed_twice,
    "hybrid COO": lambda share: some(share, 4, 1).expand(4, 3).to_sparse(1),
    "CSR": lambda share: some(share, 4, 5).to_sparse_csr(),
    "large CSR": lambda share: some(share, 90, 90).to_sparse_csr(),
    "CSC": lambda share: some(share, 4, 5).to_sparse_csc(),
    "BSR": lambda share: blocks(share).to_sparse_bsr((3, 2)),
    "BSC": lambda share: blocks(share).to_sparse_bsc((3, 2)),
    "nested": lambda _: torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(4, 3)]),
    "jagged": lambda _: jagged(4),
    "jagged with holes": lambda _: hole(),
    "mkldnn": lambda _: torch.rand(4, 4).to_mkldnn(),
    "quantised by tensor": lambda _: quantised(3, 4),
    "quantised by tensor, in 32 bits": lambda _: quantised(5000, dtype=torch.qint32),
    "quantised by channel": lambda _: by_channel(torch.tensor([1, 2])),
    "quantised by channel, other axis": lambda _: by_channel(torch.tensor([1, 2]), 1),
    "quantised by channel, zeros that are floats": lambda _: by_channel(torch.rand(2)),
}
REFUSED = {
    "meta": (lambda: torch.empty(3, device="meta"), "meta tensor"),
    "meta sparse": (lambda: eye(3).to_sparse().to("meta"), "sparse_coo"),
    "freed": (lambda: freed(), "without its memory"),
}


def freed():
    made = torch.rand(LARGE)
    made.untyped_storage().resize_(0)
    return made


def differs(a, b):
    """Return what differs between two tensors; None if nothing does."""
    if type(a) is not type(b):
        return f"{type(a)} is {type(b)}"
    if isinstance(a, list):
        found = [why for pair in zip(a, b, strict=True) if (why := differs(*pair))]
        return found or None
    for name in ("dtype", "layout", "requires_grad", "is_quantized", "is_nested"):
        if getattr(a, name) != getattr(b, name):
            return name
    attributes = [vars(one) if one.layout != torch.jagged else {} for one in (a, b)]
    if attributes[0] != attributes[1]:
        return f"attributes: {attributes}"
    if a.is_nested:
        return differs([one.detach() for one in a.unbind()], [one.detach() for one in b.unbind()])
    if a.shape != b.shape:
        return "shape"
    a, b = a.detach(), b.detach()
    if a.layout == torch.sparse_coo:
        same = a.is_coalesced() == b.is_coalesced()
        parts = [[one._indices(), one._values()] for one in (a, b)]
        return differs(*parts) if same else "coalesced"
    if a.layout in (torch.sparse_csr, torch.sparse_bsr):
        return differs(*[[one.crow_indices(), one.col_indices(), one.values()] for one in (a, b)])
    if a.layout in (torch.sparse_csc, torch.sparse_bsc):
        return differs(*[[one.ccol_indices(), one.row_indices(), one.values()] for one in (a, b)])
    if a.layout != torch.strided:
        return differs(a.to_dense(), b.to_dense())
    if a.is_quantized:
        if a.qscheme() != b.qscheme():
            return "qscheme"
        per_tensor = a.qscheme() == torch.per_tensor_affine
        said = [
            (one.q_scale(), one.q_zero_point())
            if per_tensor
            else (
                *(one.q_per_channel_scales().tolist(), one.q_per_channel_zero_points().tolist()),
                one.q_per_channel_axis(),
            )
            for one in (a, b)
        ]
        return "scales" if said[0] != said[1] else differs(a.int_repr(), b.int_repr())
    bits = [
        one.as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous().reshape(-1)
        for one in (a, b)
    ]
    return None if torch.equal(*(one.view(torch.uint8) for one in bits)) else "bits"
