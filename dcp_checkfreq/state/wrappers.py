"""Wrapper subclasses (``__tensor_flatten__``) as their inner tensors.

Such a tensor has no bytes of its own: quantised weights are codes and scales. Each inner tensor is
saved under a key of its own, which any DCP reads as a plain tensor. A record next to them says what
they were wrapped in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_checkfreq.errors import UnsupportedState
from dcp_checkfreq.shards.boxes import (
    Box,
    Layout,
    are_usual,
    boxed,
    is_odd,
    layout_of,
    sharded_dim,
)
from dcp_checkfreq.shards.codec import local_of
from dcp_checkfreq.shards.self_described import describes_itself
from dcp_checkfreq.state.wrapper_record import RECORD, Record

PLAIN = (torch.Tensor, torch.nn.Parameter)
Path = tuple[str, ...]


def is_wrapper(value: object) -> bool:
    """Tell whether a value is a tensor that consists of others; DTensor is not meant."""
    return (
        isinstance(value, torch.Tensor)
        and type(value) not in PLAIN
        and hasattr(value, "__tensor_flatten__")
        and not isinstance(value, DTensor)
        and not value.is_nested
        and not describes_itself(value)
    )


def holds_wrapper(value: object) -> bool:
    """Tell whether a value is a wrapper, or a DTensor of which this rank's shard is one."""
    if type(value) in PLAIN or not isinstance(value, torch.Tensor):
        return False
    return is_wrapper(local_of(value) if isinstance(value, DTensor) else value)


def is_usual_shard(value: object) -> bool:
    """Tell whether a value is a DTensor with a plain shard of one box, as nearly all are. Fast."""
    if type(value) is not DTensor or not are_usual(value.placements):
        return False
    return value.device_mesh.get_coordinate() is not None and type(_shard_of(value)) in PLAIN


def _shard_of(value: DTensor) -> Any:
    """Return the local tensor as it is: `to_local` would take most of the time of a capture."""
    names, _ = value.__tensor_flatten__()  # type: ignore[no-untyped-call]
    return getattr(value, names[0])


def stored(value: Any, key: str = "") -> Any:
    """Return what DCP gets for a tensor: itself, its boxes, or inner tensors in a dict.

    Raises:
        UnsupportedState: it is not known where inner tensors of a shard belong.
    """
    if type(value) in PLAIN or not isinstance(value, torch.Tensor):
        return value
    if is_usual_shard(value):
        return value
    if isinstance(value, DTensor):
        local = _shard_of(value)
        if any(placement.is_partial() for placement in value.placements):
            return value  # refused where it is looked at
        if is_wrapper(local):
            return _taken_apart(local, key, layout_of(value), _cuts(value), tuple(value.shape))
        if is_odd(value):
            layout = layout_of(value)
            return boxed(local, layout, value) if len(layout.boxes) != 1 else value
        return value
    return _taken_apart(value, key) if is_wrapper(value) else value


def _cuts(tensor: DTensor) -> frozenset[int]:
    return frozenset(dim for dim in map(sharded_dim, tensor.placements) if dim is not None)


def _taken_apart(
    wrapper: Any,
    key: str,
    around: Layout | None = None,
    cuts: frozenset[int] = frozenset(),
    size: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    names, context = wrapper.__tensor_flatten__()
    found: dict[str, Any] = {}
    for name in names:
        inner = getattr(wrapper, name)
        inner_key = f"{key}.{name}"
        layout = None if around is None or not cuts else _inner_layout(around, cuts, wrapper, name)
        is_unclear = around is not None and cuts and layout is None and inner.ndim
        if is_unclear and not _stays_whole(wrapper, cuts, name):
            raise UnsupportedState(
                inner_key,
                f"inner tensor of a sharded {type(wrapper).__name__}",
                f"its shape {list(inner.shape)} does not say how it is sharded along with "
                f"{list(wrapper.shape)}. Save a dequantised copy",
            )
        if is_wrapper(inner):
            found[name] = (
                _taken_apart(inner, inner_key)
                if layout is None
                else _taken_apart(inner, inner_key, layout, cuts, layout.size)
            )
        elif layout is None:
            found[name] = stored(inner, inner_key)
        else:
            found[name] = boxed(inner, layout)
    made = (tuple(wrapper.shape), tuple(wrapper.stride())) if size is None else (size, None)
    found[RECORD] = tuple(Record.of(wrapper, list(names), context, *made))
    return found


def _inner_layout(
    around: Layout, cuts: frozenset[int], wrapper: torch.Tensor, name: str
) -> Layout | None:
    """Return where an inner tensor of a shard belongs in that of the whole; None: it is whole."""
    inner: torch.Tensor = getattr(wrapper, name)
    if all(dim < inner.ndim and inner.shape[dim] == wrapper.shape[dim] for dim in cuts):
        size = tuple(
            around.size[dim] if dim in cuts else length for dim, length in enumerate(inner.shape)
        )
        rest = range(inner.ndim)
        boxes = (
            Box(
                tuple(box.offset[dim] if dim in cuts else 0 for dim in rest),
                tuple(box.at[dim] if dim in cuts else 0 for dim in rest),
                tuple(box.sizes[dim] if dim in cuts else size[dim] for dim in rest),
            )
            for box in around.boxes
        )
        return Layout(size, tuple(inner.shape), tuple(dict.fromkeys(boxes)))
    # One element of it stands for several rows or blocks of rows.
    if cuts != {0} or inner.ndim != 1 or len(around.boxes) > 1:
        return None
    rows = wrapper.shape[0]
    if not rows or _after_slicing(wrapper, name) != "shorter":
        return None
    count = inner.shape[0]
    (box,) = around.boxes
    total, start = around.size[0] * count, box.offset[0] * count
    if total % rows or start % rows:
        return None
    return Layout((total // rows,), (count,), (Box((start // rows,), (0,), (count,)),))


def _stays_whole(wrapper: torch.Tensor, cuts: frozenset[int], name: str) -> bool:
    return cuts == {0} and _after_slicing(wrapper, name) == "whole"


def _after_slicing(wrapper: torch.Tensor, name: str) -> str:
    """Return "whole" or "shorter": an inner tensor after rows were taken; "" if that is unclear."""
    rows = wrapper.shape[0]
    before = getattr(wrapper, name).shape
    for cut in dict.fromkeys((rows // 2, 1 << max((rows - 1).bit_length() - 1, 0))):
        if not 0 < cut < rows:
            continue
        try:
            after = getattr(wrapper[:cut], name).shape
        except Exception:  # noqa: BLE001  a class that cannot take rows here may raise anything
            continue
        if after == before:
            return "whole"
        if len(after) == 1 and after[0] * rows == before[0] * cut:
            return "shorter"
    return ""


def is_taken_apart(value: object) -> bool:
    """Tell whether a value is what `stored` makes of a wrapper."""
    return type(value) is dict and RECORD in value


def flat(parts: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield what `stored` has made of a wrapper, by path; records too."""
    for name, inner in parts.items():
        if is_taken_apart(inner):
            yield from flat(inner, (*above, name))
        else:
            yield (*above, name), inner


def live_parts(value: torch.Tensor) -> dict[Path, torch.Tensor]:
    """Return the memory of the inner tensors of a wrapper that is here, by path."""
    local = local_of(value)
    if not is_wrapper(local):
        return {(): local}
    wrapper: Any = local
    return {
        (name, *path): inner
        for name in wrapper.__tensor_flatten__()[0]
        for path, inner in live_parts(getattr(wrapper, name)).items()
    }
