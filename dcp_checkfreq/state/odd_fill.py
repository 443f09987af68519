"""A live tensor without elements in order that is being restored: sparse, nested, quantised, ..."""

from __future__ import annotations

from typing import Any

import torch

from dcp_checkfreq.format.texts import clipped
from dcp_checkfreq.state.packed import TENSORS, TREE, is_packed
from dcp_checkfreq.state.saved import Leaf
from dcp_checkfreq.state.tensor_kinds import BY_LAYOUT, is_alike, taken_apart
from dcp_checkfreq.state.tree import tree_of
from dcp_checkfreq.state.unpacked import Make, unpacked_from
from dcp_checkfreq.state.wanted import Wanted

_LONGEST_TEXT = 200


class OddFill:
    """Restores one such tensor.

    Args:
        name: of it, for errors.
        live: the tensor; None: there is none yet.
        leaves: of it, in the checkpoint.
        wanted: takes down what is to be loaded.

    Attributes:
        value: what was loaded, once `assemble` has put it together.
    """

    def __init__(
        self, name: str, live: torch.Tensor | None, leaves: list[Leaf], wanted: Wanted
    ) -> None:
        self._name, self._live = name, live
        self._loaded = [(leaf, wanted.either(leaf)) for leaf in leaves]
        self.value: Any = None

    @staticmethod
    def is_saved(leaves: list[Leaf]) -> bool:
        """Tell whether the saved leaves may be such a tensor."""
        return {one for leaf in leaves for one in leaf.path[1:2]} == {TREE, TENSORS}

    def assemble(self, where: str, make: Make) -> list[str]:
        """Put together what was loaded; return why it cannot be copied into the live tensor."""
        value: Any = tree_of([(leaf.path[1:], one) for leaf, one in self._loaded])
        if is_packed(value):
            value = unpacked_from(value, self._name, where, make)
        if not isinstance(value, torch.Tensor):
            return [f"{self._name} is a tensor, and was not saved as one"]
        self.value = value
        if self._live is not None and _form(value) != _form(self._live):
            saved, wanted = _described(value), _described(self._live)
            why = "of other forms" if saved == wanted else f"saved {saved}, wanted {wanted}"
            return [f"{self._name}: {why}"]
        return []

    def put(self, live: torch.Tensor) -> None:
        """Copy what was loaded into the tensor itself."""
        copy_odd(live, self.value)

    def is_in(self, live: torch.Tensor) -> bool:
        """Tell whether a tensor is, bit by bit, what was loaded."""
        return is_alike(live.detach(), self.value)


def is_without_size(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has no shape that could be asked for."""
    return tensor.is_nested and tensor.layout is torch.strided


@torch.no_grad()
def copy_odd(live: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy a tensor of the same form into a live one.

    An alias of it (`detach`) would not do: indices and scales are not in the memory they share.
    """
    if live.is_nested and live.layout is not torch.strided:
        # With holes between the rows, which `copy_` leaves out.
        inner: Any = live.detach()
        other: Any = saved.detach()
        inner.values().copy_(other.values())
        return
    if live.layout in BY_LAYOUT:
        live.detach().resize_as_sparse_(saved)
    live.copy_(saved)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return all that cannot change in a live tensor, which may be more than `_described` says."""
    form: tuple[object, ...] = (tensor.layout, tensor.dtype, tensor.is_nested)
    if tensor.is_nested and tensor.layout is not torch.strided:
        _, values, offsets, lengths, ragged = taken_apart(tensor) or ()
        rows = [None if one is None else one.tolist() for one in (offsets, lengths)]
        return (*form, values.shape, rows, ragged)
    if tensor.is_nested:
        return (*form, [one.shape for one in tensor.unbind()])
    if tensor.is_quantized:
        return (*form, tensor.shape, tensor.qscheme())
    if tensor.layout is torch.sparse_coo:
        return (*form, tensor.shape, tensor.sparse_dim())
    if tensor.layout in BY_LAYOUT:
        return (*form, tensor.shape, tensor.values().shape[1:])
    return (*form, tensor.shape)


def _described(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        sizes: Any = [list(one.shape) for one in tensor.detach().unbind()]
    else:
        sizes = list(tensor.shape)
    scheme = f" {tensor.qscheme()}" if tensor.is_quantized else ""
    nested = "nested " if tensor.is_nested else ""
    text = f"{nested}{tensor.layout}{scheme} {tensor.dtype} {sizes}"
    return clipped(text, _LONGEST_TEXT)
