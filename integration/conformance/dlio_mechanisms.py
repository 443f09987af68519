"""DLIO's checkpoint workload by `dcp.save` and `dcp.load`: stock's classes, and ours.

For its option ``checkpoint.checkpoint_mechanism_classname``: the same tensors on the same ranks as
DLIO's own mechanism has, which is `torch.save`, and the same timer around them. All of these sync:
DLIO e1919d7 does not, as its option for it sets another name than the one that is read.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing
from dlio_benchmark.utils.utility import DLIOMPI


class SyncedTorchSave(PyTorchCheckpointing):
    """DLIO's own `torch.save`, with the fsync of each file that its option asks for."""

    _instance: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.args.checkpoint_fsync = True

    @classmethod
    def get_instance(cls) -> Any:
        """Return the only one, as DLIO asks for it."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance


class StockDCP(SyncedTorchSave):
    """Stock's `FileSystemWriter` and `FileSystemReader`."""

    _instance: Any = None

    def __init__(self) -> None:
        super().__init__()
        mpi = DLIOMPI.get_instance()
        store = dist.FileStore(os.path.join(self.args.output_folder, "ranks"), mpi.size())
        dist.init_process_group("gloo", store=store, rank=mpi.rank(), world_size=mpi.size())

    def save_checkpoint(self, epoch: int, step: int) -> None:
        """Save what DLIO calls the checkpoint of a step."""
        dcp.save(self._state(), storage_writer=self._writer(self._folder(epoch, step)))

    def load_checkpoint(self, epoch: int, step: int) -> None:
        """Load it."""
        dcp.load(self._state(), storage_reader=self._reader(self._folder(epoch, step)))

    def finalize(self) -> None:
        """End the ranks' group."""
        dist.destroy_process_group()

    def _folder(self, epoch: int, step: int) -> str:
        return os.path.join(self.args.checkpoint_folder, f"global_epoch{epoch}_step{step}")

    def _state(self) -> dict[str, Any]:
        """Return the tensors that DLIO's own mechanism would write on this rank."""
        rank = self.args.my_rank
        if self.rank_to_checkpoint != rank:
            return {}
        is_copy = 0 < self.args.zero_stage < 3 and self.data_parallelism_rank != 0
        parts = {
            "model": self.model_state,
            "layers": None if is_copy else self.layer_state,
            "optimizer": self.optimization_state,
        }
        return {f"rank{rank}.{name}": part for name, part in parts.items() if part}

    def _writer(self, folder: str) -> Any:
        return dcp.FileSystemWriter(folder, sync_files=True)

    def _reader(self, folder: str) -> Any:
        return dcp.FileSystemReader(folder)


class CheckFreqDCP(StockDCP):
    """Our writer and reader, with our defaults: always synced, always verified."""

    _instance: Any = None

    def _writer(self, folder: str) -> Any:
        from dcp_checkfreq import CheckFreqWriter

        return CheckFreqWriter(folder)

    def _reader(self, folder: str) -> Any:
        from dcp_checkfreq import CheckFreqReader

        return CheckFreqReader(folder)
