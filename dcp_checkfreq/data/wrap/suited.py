"""Which loaders can be wrapped: those that can be replayed, and those that keep a position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dcp_checkfreq.data.wrap.order_sources import Sources

_WHAT = "ResumableIterator"


def check_replayable(loader: Any, sources: Sources) -> None:
    """Refuse what is known not to yield the same batches when it is iterated anew.

    Raises:
        TypeError: it, or its sampler, can be iterated once only, or it moves on by itself.
        ValueError: its workers hand out batches as they are ready.
    """
    if isinstance(loader, Iterator):
        raise TypeError(
            f"{type(loader).__name__} can be iterated only once: pass what iter() is called on"
        )
    for path, one in {**sources.loaders, "": loader}.items():
        _check_loader(one, f"{path}." if path else "")
    own = [type(loader).__name__] if hasattr(type(loader), "steps_left") else sources.positioned
    if own:
        raise TypeError(
            f"{own[0]} knows its position and resumes by itself; to replay it would "
            "pass over batches that were not trained. Register it as it is, without "
            f"{_WHAT}"
        )


def _check_loader(loader: Any, prefix: str) -> None:
    for name in ("sampler", "batch_sampler"):
        sampler = getattr(loader, name, None)
        if isinstance(sampler, Iterator):
            raise TypeError(
                f"{prefix}{name}={type(sampler).__name__} can be iterated only once, so a second "
                "epoch would be empty: pass what iter() is called on"
            )
    if getattr(loader, "in_order", True) is False and getattr(loader, "num_workers", None):
        raise ValueError(
            f"{prefix}in_order=False hands batches out as workers get them ready: another order "
            "each time. Use in_order=True"
        )


def keeper_of(loader: Any) -> Any:
    """Return what keeps a position of its own: the loader, or its data set in this process."""
    if _keeps_position(loader):
        return loader
    dataset = getattr(loader, "dataset", None)
    if not _keeps_position(dataset):
        raise TypeError(
            f"neither {type(loader).__name__} nor its data set has state_dict and load_state_dict: "
            "use mode='replay'"
        )
    if getattr(loader, "num_workers", 0):
        raise TypeError(
            f"{type(dataset).__name__} keeps its position in {loader.num_workers} workers, out of "
            "reach: use num_workers=0, a loader that keeps it (torchdata's StatefulDataLoader), or "
            "mode='replay'"
        )
    return dataset


def _keeps_position(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
