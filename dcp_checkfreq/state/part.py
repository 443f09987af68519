"""What all kinds of parts have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from dcp_checkfreq.shards.codec import local_of
from dcp_checkfreq.state.differences import Differences
from dcp_checkfreq.state.saved import Renames, SavedState
from dcp_checkfreq.state.wanted import Wanted

Undo = Callable[[], None]

_TRUSTED = ("torch",)


class Fill(Protocol):
    """One part that is being restored: first all of it is loaded, then it is put in place."""

    claimed: set[str]  # keys of the checkpoint that this part has a place for

    def check(self) -> None:
        """Compare what was loaded with the live part; may add to the differences. Changes nothing.

        Raises:
            StateMismatch: it does not fit.
        """
        ...

    @property
    def may_fail(self) -> bool:
        """Whether `put` runs code of the user."""
        ...

    def keep(self) -> Undo:
        """Return a function that restores the present state of the live part."""
        ...

    def put(self) -> None:
        """Put what was loaded into the live part, and check that it arrived.

        Raises:
            StateMismatch: a value in the live part is not the saved one.
        """
        ...


class Part(Protocol):
    """One registered part of a job."""

    def capture(self) -> Any:
        """Return the state to save, with the live tensors."""
        ...

    def is_empty(self) -> bool:
        """Tell whether there is nothing to save now."""
        ...

    def describe(self) -> list[object]:
        """Return plain values that say what saving it costs, without its content."""
        ...

    def fill(self, saved: SavedState, renames: Renames, wanted: Wanted) -> tuple[Fill, Differences]:
        """Ask for all that was saved of this part to be loaded.

        Raises:
            StateMismatch: something does not fit, whatever is allowed. Nothing was touched.
        """
        ...


def tensor_described(tensor: torch.Tensor) -> list[object]:
    """Return shape, shape of the shard, dtype and kind of device; of a nested one, no shape."""
    if torch.nn.parameter.is_lazy(tensor):
        return ["lazy"]
    if tensor.is_nested:  # one layout has no shape, another one has symbols of this process in it
        return ["nested", tensor.dim(), tensor.numel(), str(tensor.dtype), tensor.device.type]
    local = local_of(tensor)
    return [list(tensor.shape), list(local.shape), str(local.dtype), local.device.type]


def module_described(module: torch.nn.Module) -> list[object]:
    """Return kinds of all parameters and buffers."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return ["module", *([name, *tensor_described(tensor)] for name, tensor in tensors)]


def is_trusted(code: object) -> bool:
    """Tell whether a class or function is torch's own."""
    return _package_of(code) in _TRUSTED


def is_ours(code: object) -> bool:
    """Tell whether a class or function is of this package."""
    return _package_of(code) == "dcp_checkfreq"


def _package_of(code: object) -> str:
    return str(getattr(code, "__module__", "")).partition(".")[0]
