"""What makes the batches of a loader, as far as it can be known: compared when a job resumes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Sampler,
    Subset,
)

from dcp_checkfreq.data.wrap.content import digest_of

Made = dict[str, Any]

_NAMES = {
    "loader": "kind of loader",
    "batch_size": "batch size",
    "drop_last": "drop_last",
    "sampler": "sampler",
    "collate": "collate_fn",
    "workers": "number of workers",
    "items": "number of items",
    "batches": "number of batches",
    "subset": "choice of items (Subset, random_split)",
    "order": "sampler's order",
}
# What samplers are given, and that decides about their order. The rank is no part of it: all ranks
# hold the same state. The epoch moves.
_SAMPLER_OPTIONS = (
    "seed", "shuffle", "replacement", "num_samples", "num_replicas", "total_size", "drop_last",
    "batch_size", "skip_batches", "split_batches", "even_batches",
)  # fmt: skip
_SAMPLER_CONTENT = ("weights", "indices")
_MAX_DEPTH = 4


def made_by(loader: Any, inside: Mapping[str, DataLoader[Any]]) -> Made:
    """Return what all ranks have in common.

    Args:
        loader: the whole.
        inside: loaders that it takes from, by path; without a path it is the whole itself.
    """
    made = _made_by(loader)
    parts = {path: _made_by(one) for path, one in inside.items() if path}
    for path, one in inside.items():
        if path and not has_stream(one):
            del parts[path]["workers"]
    if parts:
        made["inside"] = parts
    return made


def _made_by(loader: Any) -> Made:
    made: Made = {"loader": _name(type(loader))}
    for name in ("batch_size", "drop_last"):
        value = getattr(loader, name, None)
        if isinstance(value, (bool, int)):
            made[name] = value
    if isinstance(loader, DataLoader):
        made["sampler"] = "/".join(_name(type(one)) for one in _samplers(loader))
        made["collate"] = _name(loader.collate_fn)
        made["workers"] = loader.num_workers
    return made


def made_here(loader: Any) -> Made:
    """Return what may be another on each rank: lengths, and what its sampler was given."""
    if not isinstance(loader, DataLoader):
        length = _length(loader)
        return {} if length is None else {"batches": length}
    made: Made = {}
    length = _length(loader.dataset)
    if length is not None:
        made["items"] = length
    if chosen := _chosen(loader.dataset, 0):
        made["subset"] = f"{digest_of(chosen):016x}"
    if not has_stream(loader):  # to ask for it would make torch count
        batches = _length(loader)
        if batches is not None:
            made["batches"] = batches
    given = [_given(sampler) for sampler in _samplers(loader)]
    if any(given):
        made["order"] = given
    return made


def has_stream(loader: Any) -> bool:
    """Tell whether workers decide about the order: each has a part of what is iterated."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def differences(saved: Mapping[str, Any], present: Made, *, workers_count: bool) -> list[str]:
    """Return what differs, with both values. What only one of them says is not compared."""
    found = _differences(saved, present, "", workers_count=workers_count)
    was, now = saved.get("inside"), present.get("inside")
    if not isinstance(was, dict) or not isinstance(now, dict):
        return found
    for path in sorted(now.keys() & was.keys()):
        if isinstance(was[path], dict):
            found += _differences(was[path], now[path], f" of {path!r}", workers_count=True)
    return found


def _differences(
    saved: Mapping[str, Any], present: Made, of: str, *, workers_count: bool
) -> list[str]:
    return [
        f"the {name}{of} was {_shown(saved[key])}, now it is {_shown(present[key])}"
        for key, name in _NAMES.items()
        if key in saved and key in present and saved[key] != present[key]
        and (key != "workers" or workers_count)
    ]  # fmt: skip


def _shown(value: object) -> str:
    if isinstance(value, list):
        return "; ".join(
            ", ".join(f"{key}={one}" for key, one in given.items())
            for given in value if isinstance(given, dict) and given
        )  # fmt: skip
    return repr(value)


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """Return the sampler of batches, if it is not torch's own, and those inside of it."""
    found: list[Any] = []
    part: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while part is not None and len(found) < _MAX_DEPTH:
        if type(part) is not BatchSampler:  # batch_size and drop_last are the loader's
            found.append(part)
        inner = getattr(part, "batch_sampler", None)
        part = getattr(part, "sampler", None) if inner is None else inner
    if has_stream(loader):  # torch's own counts for ever, and has no say
        return [one for one in found if not _name(type(one)).startswith("_Infinite")]
    return found


def _chosen(dataset: Any, depth: int) -> list[Any]:
    """Return what torch's subsets in a data set take: `random_split` makes them at random."""
    inside: list[Any] = []
    if isinstance(dataset, Subset):
        inside = [dataset.dataset]
    elif isinstance(dataset, (ConcatDataset, ChainDataset)):
        inside = list(dataset.datasets)
    if depth >= _MAX_DEPTH:
        return []
    own = [dataset.indices] if isinstance(dataset, Subset) else []
    return own + [found for one in inside if (found := _chosen(one, depth + 1))]


def _given(sampler: Any) -> Made:
    given: Made = {}
    for name in _SAMPLER_OPTIONS:
        try:
            value = getattr(sampler, name, None)
        except (TypeError, NotImplementedError):  # computed from a length that is not known
            continue
        if isinstance(value, (bool, int)):
            given[name] = value
    for name in _SAMPLER_CONTENT:
        value = getattr(sampler, name, None)
        if value is not None and not callable(value):
            given[name] = f"{digest_of(value):016x}"
    length = _length(sampler) if isinstance(sampler, Sampler) else None
    if length is not None:
        given["length"] = length
    return given


def _length(thing: Any) -> int | None:
    try:
        length = len(thing)
    except (TypeError, NotImplementedError):  # it has none, or does not know
        return None
    return length if type(length) is int else None


def _name(thing: Any) -> str:
    """Return what a class or function is called: the same in every process."""
    if isinstance(thing, functools.partial):
        return _name(thing.func)
    name = getattr(thing, "__qualname__", None) or type(thing).__qualname__
    return str(name)
