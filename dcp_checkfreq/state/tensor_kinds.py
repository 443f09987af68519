"""Tensors that are more than elements in order: sparse, nested, with attributes.

They are taken apart into plain tensors, which are saved as any other, and put together on load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dcp_checkfreq.format.torch_private import MKLDNN_LAYOUT
from dcp_checkfreq.shards.codec import is_same
from dcp_checkfreq.shards.self_described import describes_itself
from dcp_checkfreq.state import user_classes
from dcp_checkfreq.state.tags import need

_PLAIN = (torch.Tensor, nn.Parameter)
_COMPRESSED: dict[str, Any] = {
    name: getattr(torch, name) for name in ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
}
BY_LAYOUT = {layout: name for name, layout in _COMPRESSED.items()}
KINDS = frozenset(["dressed", "coo", "compressed", "nested", "jagged", "mkldnn", "subclass"])


def is_in_order(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is elements in order, whatever its class is. Fast."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def cannot_be_cast(tensor: torch.Tensor) -> bool:
    """Tell whether torch has no other dtypes for a tensor of this kind."""
    return tensor.is_quantized or tensor.layout == MKLDNN_LAYOUT


def is_odd(tensor: torch.Tensor) -> bool:
    """Tell whether DCP cannot keep a tensor as it is, but `taken_apart` or a pickle can."""
    return (type(tensor) in _PLAIN and tensor.is_quantized) or _kind_of(tensor) is not None


def _kind_of(tensor: torch.Tensor) -> str | None:
    kind = type(tensor)
    if kind in _PLAIN and tensor.layout == torch.strided and not tensor.is_nested:
        return None
    if is_lazy(tensor) or tensor.is_meta:
        return None
    if tensor.is_nested:
        return "jagged" if tensor.layout == torch.jagged else "nested"
    if kind not in _PLAIN:
        return "subclass" if user_classes.is_tensor_class(kind) else None
    if tensor.layout == torch.sparse_coo:
        return "coo"
    if tensor.layout in BY_LAYOUT:
        return "compressed"
    return "mkldnn" if tensor.layout == MKLDNN_LAYOUT else None


@torch.no_grad()
def taken_apart(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return the kind and the parts of a tensor; None if it is plain, or none of these."""
    kind = _kind_of(tensor)
    if kind is None:
        return None
    bare: Any = tensor.detach()
    if kind == "subclass":
        own = type(tensor)
        return kind, own.__module__, own.__qualname__, bare.as_subclass(torch.Tensor)
    if kind == "coo":
        indices, values = bare._indices(), bare._values()
        return kind, indices, values, tuple(bare.shape), bare.is_coalesced()
    if kind == "compressed":
        by_row = bare.layout in (torch.sparse_csr, torch.sparse_bsr)
        outer = bare.crow_indices() if by_row else bare.ccol_indices()
        inner = bare.col_indices() if by_row else bare.row_indices()
        return kind, BY_LAYOUT[bare.layout], outer, inner, bare.values(), tuple(bare.shape)
    if kind == "mkldnn":
        return kind, bare.to_dense()
    if kind == "nested":
        return kind, list(bare.unbind()), bare.dtype
    ragged = next(at for at, size in enumerate(bare.shape) if type(size) is not int)
    return kind, bare.values(), bare.offsets(), bare.lengths(), ragged


def is_alike(one: Any, other: Any) -> bool:
    """Tell whether two tensors, or what they were taken apart into, are the same bit by bit."""
    ours, theirs = _parts_of(one), _parts_of(other)
    if ours is not None and theirs is not None:
        return len(ours) == len(theirs) and all(map(is_alike, ours, theirs))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return ours is theirs and is_same(one, other)
    return type(one) is type(other) and bool(one == other)


def _parts_of(value: Any) -> Sequence[Any] | None:
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, (list, tuple)) else None
    if not value.is_quantized:
        return taken_apart(value)
    if value.qscheme() == torch.per_tensor_affine:
        return value.qscheme(), value.q_scale(), value.q_zero_point(), value.int_repr()
    scales, zeros = value.q_per_channel_scales(), value.q_per_channel_zero_points()
    return value.qscheme(), scales, zeros, value.q_per_channel_axis(), value.int_repr()


def dress_of(tensor: torch.Tensor) -> tuple[bool, bool, dict[str, Any]] | None:
    """Return whether it is a parameter, and has a gradient, and its attributes; None if nothing."""
    if describes_itself(tensor) or (type(tensor) not in _PLAIN and _kind_of(tensor) is None):
        return None
    attributes = dict(vars(tensor)) if tensor.layout != getattr(torch, "jagged", None) else {}
    is_parameter = type(tensor) is nn.Parameter
    if not (is_parameter or tensor.requires_grad or attributes):
        return None
    return is_parameter, tensor.requires_grad, attributes


@torch.no_grad()
def put_together(kind: str, content: Sequence[Any]) -> Any:
    """Return the tensor of which `taken_apart` made this.

    Raises:
        Malformed: it did not; or torch raises (`made_of`).
    """
    made: Any
    if kind == "dressed":
        inner, is_parameter, has_gradient, attributes = content
        need(isinstance(inner, torch.Tensor), "tensor")
        made = nn.Parameter(inner, has_gradient) if is_parameter else inner.detach()
        if not is_parameter:
            made.requires_grad_(has_gradient)
        need(type(attributes) is dict and all(type(key) is str for key in attributes), "tensor")
        vars(made).update(attributes)
        return made
    if kind == "nested":
        parts, dtype = content
        need(all(type(one) is torch.Tensor for one in parts), "nested tensor")
        return torch.nested.nested_tensor(list(parts), dtype=dtype)
    if kind == "subclass":
        module, name, inner = content
        need(type(inner) is torch.Tensor, "tensor")
        return inner.as_subclass(user_classes.tensor_class(module, name))
    if kind == "compressed":
        name, outer, inner, values, size = content
        _need_shape(size)
        return torch.sparse_compressed_tensor(
            *(outer, inner, values, size), layout=_COMPRESSED[name], check_invariants=True
        )
    if kind == "coo":
        indices, values, size, is_coalesced = content
        _need_shape(size)
        return torch.sparse_coo_tensor(
            *(indices, values, size), is_coalesced=is_coalesced, check_invariants=True
        )
    if kind == "jagged":
        values, offsets, lengths, ragged = content
        need(type(ragged) is int and 1 <= ragged <= values.dim(), "nested tensor")
        _check_jagged(values.shape[ragged - 1], offsets, lengths)
        return torch.nested.nested_tensor_from_jagged(
            values, offsets, lengths=lengths, jagged_dim=ragged
        )
    (inner,) = content
    need(type(inner) is torch.Tensor, "tensor")
    return inner.to_mkldnn()


def _need_shape(size: Any) -> None:
    need(type(size) is tuple and all(type(one) is int and one >= 0 for one in size), "tensor")


def _check_jagged(rows: int, offsets: Any, lengths: Any) -> None:
    """Raise `Malformed` for rows outside of the values: kernels would read them all the same."""
    for one in (offsets, lengths):
        if one is not None:
            need(one.dim() == 1 and one.dtype in (torch.int32, torch.int64), "nested tensor")
    steps = offsets.diff()
    need(offsets.numel() > 0 and int(offsets[0]) >= 0 and not bool((steps < 0).any()), "tensor")
    if lengths is None:
        need(int(offsets[-1]) <= rows, "nested tensor")
    else:
        need(lengths.numel() == steps.numel() and not bool((lengths < 0).any()), "nested tensor")
        need(not bool((offsets[:-1] + lengths > rows).any()), "nested tensor")
