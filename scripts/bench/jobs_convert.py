"""Worker job for `convert`: checkpoints to files of others, and one tensor out of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from arms_save import SAVE_ARMS
from harness import Ranks, measure, order, record
from limits import huge_buffers, read_direct, write_direct
from spec import Samples, Spec
from states import build, leaves, local_bytes

Arm = Callable[[Path, Path], None]  # of the folder with the checkpoints, and a place to write to


def _export(saved: Path, to: Path) -> None:
    from dcp_checkfreq import export_safetensors

    export_safetensors(saved / "ours", to)


def _export_torch_save(saved: Path, to: Path) -> None:
    from dcp_checkfreq import export_torch_save

    export_torch_save(saved / "ours", to / "all.pt")


def _stock_torch_save(saved: Path, to: Path) -> None:
    dcp_to_torch_save(saved / "stock_t1", to / "all.pt")


def _open_one(saved: Path, to: Path) -> None:
    from dcp_checkfreq import open_checkpoint

    with open_checkpoint(saved / "ours") as opened:
        key = _middle(opened.tensors())
        opened[key].tensor().sum()


def _stock_one(saved: Path, to: Path) -> None:
    reader = dcp.FileSystemReader(saved / "stock_t1")
    kept = reader.read_metadata().state_dict_metadata
    key = _middle(kept)
    target = {key: torch.empty(kept[key].size, dtype=kept[key].properties.dtype)}
    dcp.load(target, storage_reader=reader)
    target[key].sum()


def _middle(keys: Any) -> str:
    return sorted(keys)[len(keys) // 2]


CONVERT_ARMS: dict[str, Arm | None] = {
    "export_safetensors": _export,
    "export_torch_save": _export_torch_save,
    "stock_to_torch_save": _stock_torch_save,
    "open_one": _open_one,
    "stock_one": _stock_one,
    "limit_read": None,
    "limit_write": None,
}


def convert_job(spec: Spec, ranks: Ranks) -> dict[str, Any]:
    """Measure every arm on checkpoints that are made here; what an arm has written is removed."""
    saved, to = Path(spec.folder, "saved"), Path(spec.folder, "to")
    saved.mkdir()
    state = build(leaves(spec.state, spec.scale), rank=0, ranks=1, filled=True)
    for name in ("ours", "stock_t1"):
        SAVE_ARMS[name](ranks)(state, saved / name)
    size_bytes = local_bytes(state)
    huge_buffers()
    raw = saved / "raw"
    write_direct(raw, size_bytes)
    del state
    limits: dict[str, Arm] = {
        "limit_read": lambda _saved, _to: read_direct(raw, size_bytes),
        "limit_write": lambda _saved, to: write_direct(to / "raw", size_bytes),
    }
    samples: Samples = {}
    for round_number, name in order(spec.arms, spec.repeats, spec.seed):
        arm = CONVERT_ARMS[name] or limits[name]
        to.mkdir()
        cost = measure(ranks, lambda arm=arm: arm(saved, to), cold=spec.cold)
        if round_number:
            record(samples, name, cost)
        for file in to.iterdir():
            file.unlink()
        to.rmdir()
    return {"samples": samples, "bytes": size_bytes}
