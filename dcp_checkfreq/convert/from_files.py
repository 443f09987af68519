"""`import_files`: a checkpoint of safetensors or `torch.save` files, which any ranks can load."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from dcp_checkfreq.convert.exported import Rename, renamed
from dcp_checkfreq.convert.safetensors_layout import INDEX, is_of_a_model
from dcp_checkfreq.dcp.save_planner import CheckFreqSavePlanner
from dcp_checkfreq.dcp.writer import CheckFreqWriter
from dcp_checkfreq.errors import BadLocation, BrokenShard, StateMismatch, UnsafePickle
from dcp_checkfreq.runtime import options
from dcp_checkfreq.storage.open import Location


def import_files(
    source: str | os.PathLike[str],
    to: Location,
    *,
    part: str = "model",
    rename: Rename | None = None,
    allow_pickle: bool = False,
    threads: int = 2,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Make a checkpoint of a model of others: atomic, durable, with digests, loadable by any ranks.

    The files are mapped, not read into memory first.

    Args:
        source: a ``.safetensors`` file, a folder as Hugging Face lays it out, or a file of
            `torch.save` with a dict in it. On a local disk.
        to: folder of the checkpoint, local or a URL; nothing may be in it.
        part: name that the model gets: its tensors are ``model.NAME``, which ``load_part(to,
            "model", into=module)`` takes. Empty: the dict itself is the state, a dict of parts.
        rename: as `export_safetensors` has it, of names in the files.
        allow_pickle: let a `torch.save` file run code. Only for a writer you trust.
        threads: files written at once.
        storage_options: for the file system of a URL.

    Raises:
        BadLocation: there is nothing of that kind.
        BrokenShard: a file is damaged, or one is missing. Nothing was written.
        UnsafePickle: a `torch.save` file needs code; it was not run. Nothing was written.
        StateMismatch: two files have a tensor of the same name, or it holds no dict.
        SaveFailed: see there.
    """
    options.check(options.IMPORT_FILES, locals())
    found = Path(source)
    if found.is_dir():
        tensors: dict[str, Any] = _of_folder(found)
    elif found.suffix == ".safetensors":
        tensors = _of_safetensors(found)
    elif found.exists():
        tensors = _of_torch_save(found, allow_pickle=allow_pickle)
    else:
        raise BadLocation(str(source), "there is no such file or folder")
    named = {
        new: value for name, value in tensors.items() if (new := renamed(name, rename)) is not None
    }
    save(
        {part: named} if part else named,
        storage_writer=CheckFreqWriter(to, threads=threads, storage_options=storage_options),
        planner=CheckFreqSavePlanner(),
        no_dist=True,
    )


def _of_folder(folder: Path) -> dict[str, Any]:
    index = folder / INDEX
    if index.exists():
        try:
            wanted: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(wanted.values()))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BrokenShard(str(folder), f"{INDEX} is damaged: {error}", False) from error
    else:
        names = sorted(name for name in os.listdir(folder) if is_of_a_model(name))
        wanted = {}
    if not names:
        raise BadLocation(str(folder), f"neither {INDEX} nor model.safetensors is there")
    tensors: dict[str, Any] = {}
    for name in names:
        for key, tensor in _of_safetensors(folder / name).items():
            if key in tensors:
                raise StateMismatch(str(folder), f"{key!r} is in {name}, and in another file, too")
            tensors[key] = tensor
    missing = sorted(wanted.keys() - tensors.keys())
    if missing:
        raise BrokenShard(
            str(folder),
            f"{INDEX} names {missing[0]!r}, which is not in {wanted[missing[0]]}",
            False,
        )
    return tensors


def _of_safetensors(file: Path) -> dict[str, Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "to read safetensors files: pip install 'dcp-checkfreq[safetensors]'"
        ) from error
    try:
        with safe_open(file, framework="pt") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  no mapping
    except FileNotFoundError as error:
        raise BrokenShard(str(file.parent), f"{file.name} is missing", False) from error
    except SafetensorError as error:
        raise BrokenShard(str(file.parent), f"{file.name} is damaged: {error}", False) from error


def _of_torch_save(file: Path, *, allow_pickle: bool) -> dict[str, Any]:
    try:
        loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=not allow_pickle)
    except Exception as error:
        text = str(error)
        if "Weights only load failed" in text or "WeightsUnpickler" in text:
            raise UnsafePickle(str(file), "it needs code to unpickle") from error
        raise BrokenShard(str(file), f"not what torch.save writes: {text}", False) from error
    if not isinstance(loaded, Mapping):
        raise StateMismatch(str(file), f"it holds a {type(loaded).__name__}, not a dict")
    return dict(loaded)
