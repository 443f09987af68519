"""The ways to load into a state that is there already, and whose files each of them reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from arms_save import own_file
from harness import Ranks
from limits import read_direct, read_pread
from states import State, local_bytes, locals_of, nested
from stock_fsspec import FsspecReader

Counts = dict[str, float]  # what the reader counted itself, on this rank
Load = Callable[[State, Path, Ranks], Counts]


@dataclass(frozen=True, slots=True)
class LoadArm:
    """One way to load."""

    load: Load
    saved_by: str  # a key of SAVE_ARMS: the files it reads
    reshards: bool = True  # can load on another number of ranks than it was saved on
    is_limit: bool = False  # reads bytes and loads nothing


def _ours(state: State, folder: Path, ranks: Ranks) -> Counts:
    return _ours_with(None, state, folder)


def _ours_own_planner(state: State, folder: Path, ranks: Ranks) -> Counts:
    from dcp_checkfreq import CheckFreqLoadPlanner

    return _ours_with(CheckFreqLoadPlanner(), state, folder)


def _ours_with(planner: dcp.planner.LoadPlanner | None, state: State, folder: Path) -> Counts:
    from dcp_checkfreq import CheckFreqReader

    reader = CheckFreqReader(folder)
    dcp.load(nested(state), storage_reader=reader, planner=planner)
    return {"counted_read_bytes": reader.bytes_read, "counted_needed_bytes": reader.bytes_needed}


def _stock(state: State, folder: Path, ranks: Ranks) -> Counts:
    dcp.load(nested(state), storage_reader=dcp.FileSystemReader(folder))
    return {}


def _stock_fsspec(state: State, folder: Path, ranks: Ranks) -> Counts:
    dcp.load(nested(state), storage_reader=FsspecReader(f"file://{folder}"))
    return {}


def _torch_load(state: State, folder: Path, ranks: Ranks) -> Counts:
    loaded = torch.load(own_file(folder, ranks, "pt"), weights_only=True)
    for key, target in locals_of(state).items():
        target.copy_(loaded[key])
    return {}


def _safetensors(state: State, folder: Path, ranks: Ranks) -> Counts:
    from safetensors import safe_open

    with safe_open(own_file(folder, ranks, "safetensors"), framework="pt") as file:
        for key, target in locals_of(state).items():
            target.copy_(file.get_tensor(key))
    return {}


def _limit_pread(state: State, folder: Path, ranks: Ranks) -> Counts:
    read_pread(own_file(folder, ranks, "raw"), local_bytes(state))
    return {}


def _limit_direct(state: State, folder: Path, ranks: Ranks) -> Counts:
    read_direct(own_file(folder, ranks, "raw"), local_bytes(state))
    return {}


LOAD_ARMS: dict[str, LoadArm] = {
    "ours": LoadArm(_ours, "ours"),
    "ours_own_planner": LoadArm(_ours_own_planner, "ours"),
    "stock": LoadArm(_stock, "stock_t1"),
    "stock_on_ours": LoadArm(_stock, "ours"),
    "stock_fsspec": LoadArm(_stock_fsspec, "stock_t1"),
    "torch_load": LoadArm(_torch_load, "torch_save", reshards=False),
    "safetensors": LoadArm(_safetensors, "safetensors", reshards=False),
    "limit_pread": LoadArm(_limit_pread, "limit", reshards=False, is_limit=True),
    "limit_direct": LoadArm(_limit_direct, "limit", reshards=False, is_limit=True),
}
