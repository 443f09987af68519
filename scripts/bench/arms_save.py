"""The ways to save a state. A factory makes one `Save`; what it keeps lives over all its saves."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from harness import Ranks
from limits import write_direct
from states import State, local_bytes, locals_of, nested
from stock_fsspec import FsspecWriter

Save = Callable[[State, Path], None]  # returns when the checkpoint is durable


def own_file(folder: Path, ranks: Ranks, suffix: str) -> Path:
    """Return this rank's file, for the arms that know no DTensor."""
    return folder / f"rank{ranks.rank}.{suffix}"


def _ours(ranks: Ranks) -> Save:
    from dcp_checkfreq import CheckFreqWriter

    return lambda state, folder: _dcp(state, CheckFreqWriter(folder))


def _ours_kept_planner(ranks: Ranks) -> Save:
    from dcp_checkfreq import CheckFreqSavePlanner, CheckFreqWriter

    planner = CheckFreqSavePlanner()
    return lambda state, folder: _dcp(state, CheckFreqWriter(folder), planner)


def _stock(threads: int) -> Callable[[Ranks], Save]:
    return lambda ranks: (
        lambda state, folder: _dcp(state, dcp.FileSystemWriter(folder, thread_count=threads))
    )


def _stock_fsspec(ranks: Ranks) -> Save:
    return lambda state, folder: _dcp(state, FsspecWriter(f"file://{folder}"))


def _torch_save(ranks: Ranks) -> Save:
    def save(state: State, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        with open(own_file(folder, ranks, "pt"), "wb") as file:
            torch.save(locals_of(state), file)
            file.flush()
            os.fsync(file.fileno())
        _fsync(folder)

    return save


def _safetensors(ranks: Ranks) -> Save:
    from safetensors.torch import save_file

    def save(state: State, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        path = own_file(folder, ranks, "safetensors")
        save_file(locals_of(state), path)
        _fsync(path)
        _fsync(folder)

    return save


def _limit(ranks: Ranks) -> Save:
    def save(state: State, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        write_direct(own_file(folder, ranks, "raw"), local_bytes(state))

    return save


def _dcp(
    state: State, writer: dcp.StorageWriter, planner: dcp.planner.SavePlanner | None = None
) -> None:
    dcp.save(nested(state), storage_writer=writer, planner=planner)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


SAVE_ARMS: dict[str, Callable[[Ranks], Save]] = {
    "ours": _ours,
    "ours_kept_planner": _ours_kept_planner,
    "stock_t1": _stock(1),
    "stock_t2": _stock(2),
    "stock_fsspec": _stock_fsspec,
    "torch_save": _torch_save,
    "safetensors": _safetensors,
    "limit": _limit,
}
