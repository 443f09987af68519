"""The arms that load data: ours, PyTorch's, and those of peers that are installed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dcp_checkfreq.data import ResumableDALILoader, ResumableDALIReader, ResumableLoader
from torch.utils.data import DataLoader

from data_sets import Images, Numbers, from_random, from_sample_rng
from peers_data import NativeDALI, build_fed, build_native, streaming_loader, write_mds


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one epoch is made of."""

    folder: Path
    paths: list[str] | None  # image files; None: numbers
    length: int
    batch_size: int
    workers: int

    def data(self, draw: Callable[[], list[float]] = from_random) -> Any:
        """Return the map-style data set."""
        return Numbers(self.length) if self.paths is None else Images(self.paths, draw)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataArm:
    """One way to load; what it opens is iterated once per epoch."""

    open: Callable[[Load], Any]
    needs: str | None = None  # module without which the arm is skipped
    dali: bool = False


def _plain(load: Load) -> Any:
    return DataLoader(
        load.data(), load.batch_size, shuffle=True, num_workers=load.workers,
        persistent_workers=load.workers > 0,
    )  # fmt: skip


def _stateful(load: Load) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(
        load.data(), load.batch_size, shuffle=True, num_workers=load.workers,
        persistent_workers=load.workers > 0,
    )  # fmt: skip


def _ours(load: Load, mode: Any) -> Any:
    data = load.data(from_sample_rng if mode == "explicit" else from_random)
    return ResumableLoader(
        data, load.batch_size, seed=1, num_workers=load.workers, augment_rng=mode,
        rank=0, world_size=1,
    )  # fmt: skip


def _streaming(load: Load) -> Any:
    folder = load.folder / "mds"
    write_mds(folder, load.paths, load.length)
    return streaming_loader(folder, load.batch_size, load.workers)


def _threads(load: Load) -> int:
    return max(1, load.workers)  # DALI has threads for workers, and at least one


def _our_dali(load: Load) -> Any:
    return ResumableDALILoader(
        build_fed(_threads(load)), ["image", "label"], load.paths or [], None, load.batch_size,
        seed=1, rank=0, world_size=1,
    )  # fmt: skip


def _our_dali_reader(load: Load) -> Any:
    build = build_native(load.paths or [], load.batch_size, _threads(load))
    return ResumableDALIReader(build, ["image", "label"], "Reader", rank=0, world_size=1)


def _dali_native(load: Load) -> Any:
    return NativeDALI(build_native(load.paths or [], load.batch_size, _threads(load))())


DATA_ARMS = {
    "dataloader": DataArm(open=_plain),
    "stateful": DataArm(open=_stateful, needs="torchdata.stateful_dataloader"),
    "streaming": DataArm(open=_streaming, needs="streaming"),
    **{f"ours_{mode}": DataArm(open=partial(_ours, mode=mode))
       for mode in ("global", "explicit", "none")},
    "dali_native": DataArm(open=_dali_native, needs="nvidia.dali", dali=True),
    "ours_dali": DataArm(open=_our_dali, needs="nvidia.dali", dali=True),
    "ours_dali_reader": DataArm(open=_our_dali_reader, needs="nvidia.dali", dali=True),
}  # fmt: skip


def samples_of(batch: Any) -> int:
    """Return how many samples a batch of any arm has."""
    if isinstance(batch, (list, tuple)):
        return samples_of(batch[0])
    if isinstance(batch, dict):
        return samples_of(next(iter(batch.values())))
    return len(batch)


def state_bytes(state: Any) -> int:
    """Return the size of a loader's state: its text, as JSON, or else pickled."""
    if isinstance(state, dict) and all(isinstance(value, str) for value in state.values()):
        return sum(len(value.encode()) for value in state.values())
    try:
        return len(json.dumps(state))
    except TypeError:
        return len(pickle.dumps(state))
