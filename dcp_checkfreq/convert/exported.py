"""Which tensors of a checkpoint are exported, and what they are called and are made of then."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dcp_checkfreq.errors import StateMismatch
from dcp_checkfreq.opened.lazy import LazyTensor
from dcp_checkfreq.opened.open_checkpoint import OpenedCheckpoint

Rename = Mapping[str, str | None] | Callable[[str], str | None]


def chosen(
    opened: OpenedCheckpoint, prefix: str, rename: Rename | None
) -> tuple[dict[str, LazyTensor], list[str]]:
    """Return tensors by the name they get, and the keys of values that are no tensors.

    Args:
        opened: the checkpoint.
        prefix: of the keys that are wanted; it is not part of the names.
        rename: name by name, or a function; None for a name leaves the tensor out.

    Raises:
        StateMismatch: there is no such tensor, or two would have the same name.
    """
    named: dict[str, LazyTensor] = {}
    left_out: list[str] = []
    for key, one in opened.items():
        if not key.startswith(prefix):
            continue
        if not isinstance(one, LazyTensor):
            left_out.append(key)
            continue
        name = renamed(key[len(prefix) :], rename)
        if name is None:
            continue
        if name in named:
            raise StateMismatch(
                opened.location, f"{named[name].key!r} and {key!r} would both be called {name!r}"
            )
        named[name] = one
    if not named:
        parts = sorted({key.partition(".")[0] for key in opened.tensors()})
        raise StateMismatch(
            opened.location,
            f"no tensor to export has a key that begins with {prefix!r}; there are: "
            f"{', '.join(parts[:10])}",
        )
    return named, left_out


def renamed(name: str, rename: Rename | None) -> str | None:
    """Return what a tensor will be called; None: it is left out."""
    if rename is None:
        return name
    return rename(name) if callable(rename) else rename.get(name, name)


def dtype_of(lazy: LazyTensor, cast_to: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a tensor is exported with: only floating-point ones are cast."""
    if cast_to is not None and lazy.dtype.is_floating_point:
        return cast_to
    return lazy.dtype
