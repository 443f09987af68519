"""`export_torch_save`: tensors and values of a checkpoint in one file for `torch.load`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dcp_checkfreq.convert.exported import Rename, renamed
from dcp_checkfreq.errors import BadLocation, StateMismatch
from dcp_checkfreq.format.names import new_attempt
from dcp_checkfreq.opened.lazy import LazyTensor
from dcp_checkfreq.opened.open_checkpoint import open_checkpoint
from dcp_checkfreq.runtime import options
from dcp_checkfreq.storage.open import Location


def export_torch_save(
    path: Location,
    to: str | os.PathLike[str],
    *,
    prefix: str = "",
    rename: Rename | None = None,
    allow_pickle: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Write a dict of names to tensors and values; with ``prefix="model."`` it is a state dict.

    Tensors that lie in one piece on a local disk are written from there; others are held in memory
    until all are written. The file gets its name when it is whole and durable.

    Args:
        path: of the checkpoint, as for `open_checkpoint`.
        to: the file. It must not be there yet.
        prefix: as `export_safetensors` has it.
        rename: as `export_safetensors` has it.
        allow_pickle: let values run code when they are unpickled. Only for a writer you trust.
        storage_options: for the file system of a URL.

    Returns:
        The number of tensors and values.

    Raises:
        BadLocation: the file is there already. Nothing was written.
        StateMismatch: there is nothing to export, or two would have the same name.
        UnsafePickle, BrokenShard, BrokenMetadata: as `open_checkpoint` and its tensors.
    """
    options.check(options.EXPORT_TORCH_SAVE, locals())
    target = Path(to)
    if target.exists():
        raise BadLocation(str(target), "is there already: remove it first, or take another name")
    with open_checkpoint(path, storage_options=storage_options) as opened:
        taken: dict[str, Any] = {}
        for key, one in opened.items():
            name = renamed(key[len(prefix) :], rename) if key.startswith(prefix) else None
            if name is None:
                continue
            if name in taken:
                raise StateMismatch(opened.location, f"two would both be called {name!r}")
            taken[name] = (
                one.tensor()
                if isinstance(one, LazyTensor)
                else one.value(allow_pickle=allow_pickle)
            )
    if not taken:
        raise StateMismatch(opened.location, f"no key begins with {prefix!r}")
    scratch = target.with_name(f".{target.name}.{new_attempt()}.tmp")
    try:
        with open(scratch, "xb") as file:
            torch.save(taken, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(scratch, target)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    return len(taken)
