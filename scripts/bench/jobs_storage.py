"""Worker jobs for `save`, `load` and `reshard`. Each runs on all ranks of one group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from arms_load import LOAD_ARMS
from arms_save import SAVE_ARMS
from harness import Ranks, measure, order, record, remove_folder
from limits import huge_buffers, pread_buffer
from spec import Samples, Spec
from states import build, check, clear, leaves, local_bytes

LARGE_ITEM_BYTES = 64 << 10


def save_job(spec: Spec, ranks: Ranks) -> dict[str, Any]:
    """Measure every save arm, each save into a new folder that is removed afterwards."""
    state = build(leaves(spec.state, spec.scale), rank=ranks.rank, ranks=ranks.count, filled=True)
    arms = {name: SAVE_ARMS[name](ranks) for name in spec.arms}
    huge_buffers()  # the limit arm's source is not part of what its write costs
    samples: Samples = {}
    for round_number, name in order(spec.arms, spec.repeats, spec.seed):
        folder = Path(spec.folder, f"{name}-{round_number}")
        cost = measure(ranks, lambda f=folder, save=arms[name]: save(state, f))
        if round_number:
            record(samples, name, cost)
        remove_folder(folder, ranks)
    return {"samples": samples, "bytes": sum(ranks.gather(local_bytes(state)))}


def save_first_job(spec: Spec, ranks: Ranks) -> dict[str, Any]:
    """Measure the first save of a process, for the one arm of the spec: memory, bytes on storage.

    Buffers that are kept for later saves are taken in the first one, so this is the true peak.
    """
    (name,) = spec.arms
    state = build(leaves(spec.state, spec.scale), rank=ranks.rank, ranks=ranks.count, filled=True)
    if name == "limit":
        huge_buffers()
    save = SAVE_ARMS[name](ranks)
    folder = Path(spec.folder, f"{name}-first")
    cost = measure(ranks, lambda: save(state, folder))
    samples: Samples = {}
    record(samples, name, {"first_extra_peak_bytes": cost["extra_peak_bytes"]} | _sizes(folder))
    remove_folder(folder, ranks)
    return {"samples": samples}


def prepare_job(spec: Spec, ranks: Ranks) -> dict[str, Any]:
    """Save once with every arm of the spec, into a folder of the arm's name that stays."""
    state = build(leaves(spec.state, spec.scale), rank=ranks.rank, ranks=ranks.count, filled=True)
    for name in spec.arms:
        SAVE_ARMS[name](ranks)(state, Path(spec.folder, name))
        ranks.barrier()
    return {}


def load_job(spec: Spec, ranks: Ranks) -> dict[str, Any]:
    """Measure every load arm on files that `prepare_job` wrote; the warm-up round checks values."""
    wanted = leaves(spec.state, spec.scale)
    state = build(wanted, rank=ranks.rank, ranks=ranks.count, filled=False)
    huge_buffers()  # the limits' targets are there before, as the state is
    pread_buffer()
    needed_bytes = sum(ranks.gather(local_bytes(state)))
    samples: Samples = {}
    for round_number, name in order(spec.arms, spec.repeats, spec.seed):
        arm = LOAD_ARMS[name]
        folder = Path(spec.folder, arm.saved_by)
        counts: dict[str, float] = {}
        if not round_number:
            clear(state)

        def load(arm=arm, folder=folder, counts=counts) -> None:
            counts.update(arm.load(state, folder, ranks))

        cost = measure(ranks, load, cold=spec.cold)
        if round_number:
            counted = ranks.gather(counts)
            cost |= {key: float(sum(c[key] for c in counted)) for key in counts}
            cost["read_per_needed"] = cost["syscall_read_bytes"] / needed_bytes
            if counts:
                cost["counted_per_needed"] = (
                    cost["counted_read_bytes"] / cost["counted_needed_bytes"]
                )
            record(samples, name, cost)
        elif not arm.is_limit:
            check(state, wanted, rank=ranks.rank, ranks=ranks.count)
    return {"samples": samples, "bytes": needed_bytes}


def _sizes(folder: Path) -> dict[str, float]:
    """Return what the files weigh, and for DCP checkpoints the worst envelope of a large item."""
    sizes = {"files_bytes": float(sum(f.stat().st_size for f in folder.iterdir()))}
    if not (folder / ".metadata").exists():
        return sizes
    metadata = dcp.FileSystemReader(folder).read_metadata()
    envelopes = []
    for index, stored in metadata.storage_data.items():
        tensor = metadata.state_dict_metadata[index.fqn]
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        at = index.offset if index.offset is not None else torch.Size([0] * len(tensor.size))
        piece = next(c for c in tensor.chunks if c.offsets == at)
        payload_bytes = piece.sizes.numel() * tensor.properties.dtype.itemsize
        if payload_bytes >= LARGE_ITEM_BYTES:
            envelopes.append(stored.length - payload_bytes)
    return sizes | ({"large_item_envelope_bytes": float(max(envelopes))} if envelopes else {})
