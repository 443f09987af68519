"""State of a sharded parameter that is of another shape, or a wrapper: how it was sharded.

A fresh optimizer has no state from which this could be seen. Adafactor's statistics of rows and
columns are DTensors of their own; 8-bit optimizers keep codes and scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dcp_checkfreq.errors import StateMismatch
from dcp_checkfreq.shards.boxes import (
    Box,
    Boxed,
    Layout,
    boxed,
    layout_at,
    layout_of,
    sharded_dim,
)
from dcp_checkfreq.shards.codec import is_same, local_of
from dcp_checkfreq.state.saved import Leaf
from dcp_checkfreq.state.tensor_kinds import cannot_be_cast, is_alike, is_in_order
from dcp_checkfreq.state.tree import nested
from dcp_checkfreq.state.wanted import Wanted, WantedTensor, WantedValue
from dcp_checkfreq.state.wrapper_kinds import Kinds
from dcp_checkfreq.state.wrapper_record import RECORD, record_of
from dcp_checkfreq.state.wrappers import (
    flat,
    holds_wrapper,
    is_taken_apart,
    is_wrapper,
    live_parts,
    stored,
)

LAYOUTS = "__dcp_checkfreq_layouts__"  # among the state of a parameter: see `layouts_of`
_Said = tuple[tuple[str, tuple[int | None, ...]], ...]


def layouts_of(state: Mapping[Any, Any], parameter: torch.Tensor) -> _Said:
    """Return the dimension that each placement cuts, of DTensors of another shape."""
    size = parameter.shape
    return tuple(
        (str(name), tuple(map(sharded_dim, value.placements)))
        for name, value in state.items()
        if type(value) is not torch.Tensor and isinstance(value, DTensor) and value.shape != size
    )


def sharded_as_said(state: dict[Any, Any], said: _Said, parameter: torch.Tensor) -> dict[Any, Any]:
    """Return state in which whole tensors are replaced by this rank's shards, as DTensors."""
    cuts = dict(said)
    return {
        name: _cut(value, cuts[name], parameter)
        if name in cuts and isinstance(value, torch.Tensor) and isinstance(parameter, DTensor)
        else value
        for name, value in state.items()
    }


def _cut(value: torch.Tensor, cuts: tuple[int | None, ...], parameter: DTensor) -> torch.Tensor:
    if isinstance(value, DTensor):
        return value
    mesh = parameter.device_mesh
    placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in cuts]
    if len(cuts) != mesh.ndim:  # saved on another kind of mesh: cut where the parameter is cut
        (dim,) = dims if len(dims := {one for one in cuts if one is not None}) == 1 else (None,)
        placements = [
            Replicate() if dim is None or sharded_dim(one) is None else Shard(dim)
            for one in parameter.placements
        ]
    coordinate = mesh.get_coordinate()
    layout = layout_at(tuple(value.shape), placements, tuple(mesh.shape), coordinate)
    local = value.new_empty(layout.local)
    for box in layout.boxes:
        box.of(local).copy_(Box(box.offset, box.offset, box.sizes).of(value))
    return DTensor.from_local(
        local.to(parameter.to_local().device),
        mesh,
        placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


class StateWrapper:
    """A wrapper in the state of a parameter. It is always made anew.

    Args:
        leaves: of it, as they were saved.
        live: the state that is in its place now, if there is some.
        parameter: whose state it is.
        wanted: takes down what is to be loaded.
    """

    def __init__(
        self, leaves: list[Leaf], live: object, parameter: torch.Tensor, wanted: Wanted
    ) -> None:
        parts = (
            {path: one for path, one in flat(stored(live)) if path[-1] != RECORD}
            if holds_wrapper(live)
            else {}
        )
        self._parameter = parameter
        self._is_sharded = isinstance(parameter, DTensor)
        # Of a wrapper that was saved in one piece only its class knows what belongs to which rows.
        several = any(leaf.is_tensor and len(leaf.kept.chunks) > 1 for leaf in leaves)  # type: ignore[union-attr]
        self._is_whole = self._is_sharded and not several and not parts
        self._loaded: list[tuple[tuple[str, ...], WantedTensor | WantedValue]] = []
        for leaf in leaves:
            path = tuple(map(str, leaf.path[3:]))
            if not leaf.is_tensor:
                self._loaded.append((path, wanted.value(leaf)))
                continue
            kept: Any = leaf.kept
            like = parts.get(path)
            if like is not None and like.shape != kept.size:
                like = None
            if like is None and self._is_sharded and not self._is_whole:
                like = self._inner_like(leaf)
            self._loaded.append((path, wanted.tensor(leaf, like)))

    def _inner_like(self, leaf: Leaf) -> DTensor | Boxed | None:
        """Return how an inner tensor is sharded here, of which nothing is here yet."""
        parameter: Any = self._parameter
        kept: Any = leaf.kept
        if kept.size == parameter.shape:
            return parameter  # type: ignore[no-any-return]
        if len(kept.chunks) == 1:
            return None
        around = layout_of(parameter)
        cuts = {dim for dim in map(sharded_dim, parameter.placements) if dim is not None}
        layout = _along(around, cuts, tuple(kept.size))
        if layout is None:
            return None
        room = torch.empty(layout.local, dtype=kept.properties.dtype)
        return boxed(room, layout)

    def made(self, kinds: Kinds, where: str, key: str) -> torch.Tensor:
        """Return the wrapper, made of what was loaded.

        Raises:
            StateMismatch: that cannot be done.
        """
        device = local_of(self._parameter).device
        parts = nested(
            (path, one.value if isinstance(one, WantedValue) else one.tensor.to(device))
            for path, one in self._loaded
        )
        if RECORD not in parts:
            raise StateMismatch(where, f"{key!r}: what its inner tensors were is not in it")
        parameter = self._parameter
        size = record_of(parts).size
        if not isinstance(parameter, DTensor) or size != tuple(parameter.shape):
            return kinds.made(parts, where, key, size)
        local = parameter.to_local()
        if self._is_whole:
            made = self._own_rows(kinds.made(parts, where, key, size), where, key)
        else:
            made = kinds.made(parts, where, key, tuple(local.shape))
        sharded = DTensor.from_local(
            made,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        if not is_wrapper(sharded.to_local()):
            raise StateMismatch(
                where, f"{key!r}: {type(made).__name__} does not stay one in a DTensor"
            )
        return sharded

    def _own_rows(self, whole: torch.Tensor, where: str, key: str) -> torch.Tensor:
        parameter: Any = self._parameter
        layout = layout_of(parameter)
        cuts = {dim for dim in map(sharded_dim, parameter.placements) if dim is not None}
        if not cuts or layout.local == tuple(whole.shape):
            return whole
        try:
            if cuts != {0} or len(layout.boxes) != 1:
                raise ValueError("it is not cut along rows")
            (box,) = layout.boxes
            rows = whole[box.offset[0] : box.offset[0] + box.sizes[0]]
        except Exception as error:
            raise StateMismatch(
                where,
                f"{key!r} was saved in one piece, and {type(whole).__name__} cannot give the shard "
                f"of this rank: {error}. Restore once the optimizer has made its state",
            ) from error
        return rows


def _along(around: Layout, cuts: set[int], size: tuple[int, ...]) -> Layout | None:
    """Return this rank's part of an inner tensor that has fewer elements than the wrapper."""
    if len(around.boxes) != 1:
        return None
    (box,) = around.boxes
    if all(dim < len(size) and size[dim] == around.size[dim] for dim in cuts):
        offset = tuple(box.offset[dim] if dim in cuts else 0 for dim in range(len(size)))
        sizes = tuple(box.sizes[dim] if dim in cuts else size[dim] for dim in range(len(size)))
    elif cuts == {0} and len(size) == 1:
        start, stop = (size[0] * row for row in (box.offset[0], box.offset[0] + box.sizes[0]))
        if start % around.size[0] or stop % around.size[0]:
            return None
        offset, sizes = (
            (start // around.size[0],),
            ((stop - start) // around.size[0],),
        )
    else:
        return None
    return Layout(size, sizes, (Box(offset, (0,) * len(size), sizes),))


def same(live: torch.Tensor, loaded: torch.Tensor) -> bool:
    """Tell whether two tensors are the same in all bits, of inner tensors too."""
    if not (is_in_order(live) and is_in_order(loaded)):
        return is_alike(live, loaded)
    if not holds_wrapper(loaded) and not holds_wrapper(live):
        return is_same(live, loaded)
    if type(local_of(live)) is not type(local_of(loaded)):
        return False
    ours, theirs = live_parts(live), live_parts(loaded)
    return ours.keys() == theirs.keys() and all(is_same(ours[path], theirs[path]) for path in ours)


def without_wrapper_tensors(value: Any) -> Any:
    """Return state with plain tensors for wrappers, and for others that torch cannot cast."""
    if holds_wrapper(value) or (isinstance(value, torch.Tensor) and cannot_be_cast(value)):
        return torch.zeros(())
    if type(value) is dict:
        return {key: without_wrapper_tensors(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(without_wrapper_tensors(inner) for inner in value)
    return value


def record_keys(name: str, state: Mapping[Any, Any], kept: Mapping[Any, Any]) -> Iterable[str]:
    """Yield the keys of records that may differ between ranks: those of sharded wrappers."""
    for key, value in state.items():
        if is_taken_apart(kept[key]) and isinstance(value, DTensor):
            for path, _ in flat(kept[key]):
                if path[-1] == RECORD:
                    yield ".".join((name, str(key), *path))
