"""The arms that are timed from nothing to their first batch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from dcp_checkfreq.data import ResumableLoader
from dcp_checkfreq.data.order.permutation import order
from torch.utils.data import DataLoader

from data_sets import Numbers
from peers_data import streaming_loader, write_mds

PERCENTS = (10, 50, 99)
BATCH_SIZE = 32
SEED = 1
# arm -> (kind, items); nobody but us can begin 1e9 items, or has the memory for their order
RESUME_ARMS = {
    "ours_1e6": ("ours", 10**6), "ours_1e8": ("ours", 10**8), "ours_1e9": ("ours", 10**9),
    "stateful_1e6": ("stateful", 10**6), "stateful_1e7": ("stateful", 10**7),
    "streaming_1e6": ("streaming", 10**6),
    "dataloader_1e3": ("dataloader", 10**3),  # the time in which workers start
    "dataloader_1e6": ("dataloader", 10**6), "dataloader_1e7": ("dataloader", 10**7),
}  # fmt: skip
NEEDS = {"stateful": "torchdata.stateful_dataloader", "streaming": "streaming"}


class _Arm:
    """A loader of so many numbers."""

    resumes = True

    def __init__(self, length: int, workers: int, folder: Path) -> None:
        self.length = length
        self.workers = workers
        self.folder = folder

    def position(self, percent: int) -> int:
        """Return that part of the items, in whole batches."""
        return self.length * percent // 100 // BATCH_SIZE * BATCH_SIZE

    def open(self) -> Any:
        """Return a new loader."""
        raise NotImplementedError

    def state_at(self, percent: int) -> Any:
        """Return the state that a loader has there."""
        raise NotImplementedError

    def check(self, batch: Any, percent: int) -> None:
        """Raise RuntimeError if it is not the batch that comes there, where that can be told."""


class _Ours(_Arm):
    def open(self) -> Any:
        return ResumableLoader(
            Numbers(self.length), BATCH_SIZE, seed=SEED, num_workers=self.workers, rank=0,
            world_size=1,
        )  # fmt: skip

    def state_at(self, percent: int) -> Any:
        text = self.open().state_dict()["state"]
        return {"state": json.dumps(json.loads(text) | {"samples": self.position(percent)})}

    def check(self, batch: Any, percent: int) -> None:
        first = self.position(percent)
        _same(batch, order(SEED, 0, self.length).at(range(first, first + BATCH_SIZE)))


class _Stateful(_Arm):
    def __init__(self, length: int, workers: int, folder: Path) -> None:
        super().__init__(length, workers, folder)
        loader = self.open()
        next(iter(loader))
        self._first = loader.state_dict()

    def open(self) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import RandomSampler

        sampler = RandomSampler(Numbers(self.length), generator=torch.Generator().manual_seed(SEED))
        return StatefulDataLoader(
            Numbers(self.length), BATCH_SIZE, sampler=sampler, num_workers=self.workers
        )

    def state_at(self, percent: int) -> Any:
        """Return the state after one batch, with the counts of the position put in."""
        return _moved(self._first, self.position(percent) // BATCH_SIZE, self.workers)

    def check(self, batch: Any, percent: int) -> None:
        first = self.position(percent)
        # with workers the sampler is begun twice, so the seed alone does not tell the order
        state = self._first["_snapshot"]["_main_snapshot"] if self.workers else self._first
        generator = torch.Generator()
        generator.set_state(state["_sampler_iter_state"]["sampler_iter_state"]["generator"])
        permutation = torch.randperm(self.length, generator=generator)
        _same(batch, permutation[first : first + BATCH_SIZE].tolist())


class _Streaming(_Arm):
    def __init__(self, length: int, workers: int, folder: Path) -> None:
        super().__init__(length, workers, folder)
        self._mds = folder / f"mds-{length}"
        write_mds(self._mds, None, length)
        loader = self.open()
        next(iter(loader))
        self._first = loader.state_dict()

    def open(self) -> Any:
        return streaming_loader(self._mds, BATCH_SIZE, self.workers)

    def state_at(self, percent: int) -> Any:
        return {**self._first, "sample_in_epoch": self.position(percent)}


class _Plain(_Arm):
    resumes = False

    def open(self) -> Any:
        return DataLoader(Numbers(self.length), BATCH_SIZE, shuffle=True, num_workers=self.workers)


_KINDS = {"ours": _Ours, "stateful": _Stateful, "streaming": _Streaming, "dataloader": _Plain}


def resume_arms(folder: Path, scale: str, workers: int, names: Iterable[str]) -> dict[str, _Arm]:
    """Return the arms; at the small scale all have 10,000 items."""
    found = {}
    for name in names:
        kind, length = RESUME_ARMS[name]
        found[name] = _KINDS[kind](10**4 if scale == "small" else length, workers, folder)
    return found


def _same(batch: torch.Tensor, expected: list[int]) -> None:
    if batch.tolist() != expected:
        raise RuntimeError(f"resumed with {batch.tolist()[:4]}..., expected {expected[:4]}...")


def _moved(state: Any, batches: int, workers: int) -> Any:
    """Return the state of a `StatefulDataLoader` as it is after so many batches."""
    counts = dict.fromkeys(("_num_yielded", "_sampler_iter_yielded", "_snapshot_step"), batches)
    counts |= dict.fromkeys(("yielded", "samples_yielded"), batches * BATCH_SIZE)
    if workers:
        counts["_last_yielded_worker_id"] = (batches - 1) % workers
    return {
        key: _moved(value, batches, workers) if isinstance(value, dict) else counts.get(key, value)
        for key, value in state.items()
    }
