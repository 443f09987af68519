"""A live wrapper subclass that is being restored: its inner tensors are loaded, and copied in."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_checkfreq.shards.boxes import Boxed
from dcp_checkfreq.shards.codec import is_same, local_of
from dcp_checkfreq.state.differences import shapes_differ
from dcp_checkfreq.state.saved import Leaf
from dcp_checkfreq.state.wanted import Wanted, WantedTensor, WantedValue
from dcp_checkfreq.state.wrapper_record import RECORD, why_other
from dcp_checkfreq.state.wrappers import Path, flat, live_parts, stored


class WrapperFill:
    """Restores one wrapper in its place.

    Args:
        live: the wrapper, or a DTensor of which this rank's shard is one.
        name: of it, for errors.
    """

    def __init__(self, live: torch.Tensor, name: str) -> None:
        self._name = name
        self._is_shard = isinstance(live, DTensor)
        self._kind = type(local_of(live)).__name__
        self._parts = stored(live, name)
        self._wanted: dict[Path, WantedTensor] = {}
        self._records: list[tuple[WantedValue, Any]] = []

    def want(self, leaves: list[Leaf], wanted: Wanted) -> list[str]:
        """Have the inner tensors loaded; return what does not fit."""
        saved = {tuple(map(str, leaf.path[1:])): leaf for leaf in leaves}
        here = dict(flat(self._parts))
        if not any(path and path[-1] == RECORD for path in saved):
            return [f"{self._name} is a {self._kind} here, and was saved as a plain tensor"]
        if saved.keys() != here.keys():
            return [
                f"{self._name} is a {self._kind} of {_named(here)} here, and was saved as one of "
                f"{_named(saved)}"
            ]
        wrong = []
        for path, inner in here.items():
            leaf, name = saved[path], ".".join((self._name, *path))
            kept: Any = leaf.kept
            if path[-1] == RECORD:
                if leaf.is_tensor:
                    wrong.append(f"{name} was saved as a tensor")
                else:
                    self._records.append((wanted.value(leaf), self._around(path)))
            elif not leaf.is_tensor:
                wrong.append(f"{name} was not saved as a tensor")
            elif kept.properties.dtype != inner.dtype:
                wrong.append(f"{name}: saved {kept.properties.dtype}, wanted {inner.dtype}")
            elif kept.size != inner.shape and not _knows_no_size(inner):
                wrong.append(shapes_differ(name, kept.size, inner.shape))
            else:
                self._wanted[path] = wanted.tensor(leaf, inner)
        return wrong

    def _around(self, path: Path) -> Any:
        """Return the parts that a record is among."""
        parts = self._parts
        for name in path[:-1]:
            parts = parts[name]
        return parts

    def misfit(self) -> str:
        """Return why the saved wrapper is another one than the live one; "" if it is not."""
        for record, live in self._records:
            why = why_other(record.value, live, self._is_shard)
            if why:
                return f"{self._name}: {why}"
        return ""

    def put(self, live: torch.Tensor) -> None:
        """Copy what was loaded into the inner tensors."""
        for path, inner in live_parts(live).items():
            inner.copy_(self._wanted[path].tensor)

    def is_in(self, live: torch.Tensor) -> bool:
        """Tell whether a live wrapper holds, bit by bit, what was loaded."""
        found = live_parts(live)
        return found.keys() == self._wanted.keys() and all(
            is_same(inner, self._wanted[path].tensor) for path, inner in found.items()
        )


def _named(paths: Any) -> str:
    return ", ".join(sorted(".".join(path) or "itself" for path in paths if path[-1:] != (RECORD,)))


def _knows_no_size(inner: object) -> bool:
    """Tell whether this rank has nothing of a tensor, and so cannot know how long it is."""
    return isinstance(inner, Boxed) and not inner.held.boxes
