"""Ways to save a `SimJob`: ours in its modes, and stock DCP, as calls to make after a step."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from sim import SimJob
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from dcp_checkfreq import Checkpointer

NEVER = 1_000_000_000


class NoSaver:
    """Saves nothing: what the others are compared with."""

    def after(self, due: bool) -> None:
        pass

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass

    def history(self) -> list[dict[str, Any]]:
        return []


class StockSync(NoSaver):
    """``dcp.save`` with FileSystemWriter, in the loop."""

    def __init__(self, root: Path, job: SimJob) -> None:
        self._root, self._job = root, job
        self._saves = 0

    def after(self, due: bool) -> None:
        if not due:
            return
        self._saves += 1
        job = self._job
        state = {
            "model": get_model_state_dict(job.model),
            "optim": get_optimizer_state_dict(job.model, job.optimizer),
            "data": job.position.state_dict(),
        }
        # Two folders in turn, as many checkpoints as ours keeps.
        folder = self._root / f"step_{self._saves % 2}"
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))


class Ours(NoSaver):
    """A `Checkpointer` of ours that decides itself when to save; ``due`` is not asked."""

    def __init__(self, root: Path, job: SimJob, **options: Any) -> None:
        self.checkpointer = Checkpointer(root, job.state, preempt_signals=(), **options)
        self.checkpointer.restore()

    def after(self, due: bool) -> None:
        self.checkpointer.after_step()

    def skip(self, steps: int) -> None:
        """Count steps that are not trained, so that the next iteration is the one that saves."""
        for _ in range(steps):
            self.checkpointer.after_step()

    def has_settled(self, steady_saves: int) -> bool:
        """Return whether the last saves left the interval as it is."""
        ckpt = self.checkpointer
        seen = [record.interval_steps for record in ckpt.history][-steady_saves:]
        return seen == [ckpt.interval_steps] * steady_saves

    def drain(self) -> None:
        self.checkpointer.wait()

    def close(self) -> None:
        self.checkpointer.close()

    def history(self) -> list[dict[str, Any]]:
        return [_plain(asdict(record)) for record in self.checkpointer.history]


class OursSync(Ours):
    """Snapshot and persist in the loop."""

    def __init__(self, root: Path, job: SimJob) -> None:
        super().__init__(root, job, every=NEVER, snapshot="blocking")

    def after(self, due: bool) -> None:
        self.checkpointer.after_step()
        if due:
            self.checkpointer.save(wait=True)


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value if isinstance(value, (int, float, str, type(None))) else str(value)
        for name, value in fields.items()
    }
