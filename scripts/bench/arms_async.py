"""The ways to save in the background. A factory makes one `Start`; what it keeps lives on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from states import State, nested

Start = Callable[[State, Path], "Future[Any]"]  # returns when training may go on


def _ours() -> Start:
    from dcp_checkfreq import CheckFreqWriter

    return lambda state, folder: dcp.async_save(
        nested(state), storage_writer=CheckFreqWriter(folder)
    )


def _ours_kept_planner() -> Start:
    from dcp_checkfreq import CheckFreqSavePlanner, CheckFreqWriter

    planner = CheckFreqSavePlanner()
    return lambda state, folder: dcp.async_save(
        nested(state), storage_writer=CheckFreqWriter(folder), planner=planner
    )


def _stock() -> Start:
    return lambda state, folder: dcp.async_save(
        nested(state), storage_writer=dcp.FileSystemWriter(folder)
    )


def _stock_kept_stager() -> Start:
    stager = DefaultStager(StagingOptions(False, False, False, False))
    return lambda state, folder: dcp.async_save(
        nested(state), storage_writer=dcp.FileSystemWriter(folder), async_stager=stager
    )


ASYNC_ARMS: dict[str, Callable[[], Start]] = {
    "ours": _ours,
    "ours_kept_planner": _ours_kept_planner,
    "stock": _stock,
    "stock_kept_stager": _stock_kept_stager,
}
