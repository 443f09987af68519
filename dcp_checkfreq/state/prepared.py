"""Loaders that accelerate's `prepare` has wrapped: most have `state_dict`, and no position."""

from __future__ import annotations

from typing import Any

from dcp_checkfreq.errors import UnsupportedState

_MODULE = "accelerate.data_loader"


def check_prepared(name: str, part: Any) -> None:
    """Refuse a prepared loader that cannot say where it is.

    Raises:
        UnsupportedState: its class has `state_dict`, but the loader in it has none to ask.
    """
    kind = type(part)  # its `__class__` is that of the loader in it
    if kind.__module__ != _MODULE:
        return
    inner = getattr(part, "base_dataloader", None)
    if not hasattr(inner, "state_dict"):
        raise UnsupportedState(
            name,
            kind.__name__,
            "the loader in it keeps no position. Register a ResumableLoader, which `prepare` "
            "leaves as it is, or prepare it with use_stateful_dataloader=True",
        )
