"""The way back of a `Trainer`: from the newest whole checkpoint, through its own resuming."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any, Protocol

from dcp_checkfreq.checkpointer.load_part import load_part
from dcp_checkfreq.dcp.find_latest import Found, find_latest_valid
from dcp_checkfreq.errors import (
    BrokenMetadata,
    BrokenShard,
    NoValidCheckpoint,
    UnsupportedOption,
)
from dcp_checkfreq.integrations.needed import needed
from dcp_checkfreq.integrations.trainer_part import TrainerPart
from dcp_checkfreq.ranks.collectives import Ranks
from dcp_checkfreq.recovery.scan import Depth
from dcp_checkfreq.storage.open import Location

with needed("transformers"):
    from transformers import trainer_utils

_log = logging.getLogger(__name__)

_STATE_FILE = "trainer_state.json"  # what `Trainer` looks for in the folder that it resumes from


class Saving(Protocol):
    """What is asked of the callback that saves."""

    open: contextlib.ExitStack  # holds the `Checkpointer`, which hears of errors in the training

    def samples_per_step(self, args: Any) -> int:
        """Return how many samples all ranks together train on in one optimizer step."""
        ...


class OtherStep(Exception):
    """What was read of the trainer is not of the checkpoint that was restored."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class IsDone(Exception):
    """All steps are trained already; the model is restored."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class Resuming:
    """`Trainer.train` of one trainer, from the newest whole checkpoint on."""

    def __init__(
        self, trainer: Any, root: Location, callback: Saving, storage_options: Any
    ) -> None:
        self._trainer, self._root, self._callback = trainer, root, callback
        self._storage_options = storage_options
        self._train: Callable[..., Any] = trainer.train
        self._load: Callable[..., Any] = trainer._load_from_checkpoint
        self._folder = ""

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **others: Any
    ) -> Any:
        """Train what is left. ``resume_from_checkpoint`` counts if there is no checkpoint yet."""
        if trial is not None:
            raise UnsupportedOption("trial", "all trials would go on from one root")
        found: Found | str | None = self._find("size")
        with self._callback.open:
            while True:
                try:
                    if found is None:
                        return self._train(resume_from_checkpoint, trial, *args, **others)
                    return self._resumed(found, args, others)
                except OtherStep as other:
                    found = other.path
                except IsDone as done:
                    _log.info("all %d steps are trained already", done.step)
                    self._trainer.is_in_train = False
                    return trainer_utils.TrainOutput(done.step, 0.0, {})

    def _find(self, depth: Depth) -> Found | None:
        return find_latest_valid(self._root, depth=depth, storage_options=self._storage_options)

    def _read(self, found: Found | str) -> TrainerPart | None:
        """Return what is saved of the trainer; None on all ranks if one finds it damaged."""
        saved = TrainerPart()
        problem = ""
        try:
            load_part(found, "trainer", into=saved, storage_options=self._storage_options)
        except (BrokenShard, BrokenMetadata) as error:
            _log.warning("%s", error)
            problem = str(error)
        ranks = Ranks()
        try:
            return None if ranks.reduce_on_rank_0(bool(problem), any) else saved
        finally:
            ranks.close()

    def _resumed(self, found: Found | str, args: Any, others: Any) -> Any:
        saved = self._read(found)
        if saved is None:  # damaged: let all of each be read before one is chosen
            deep = self._find("digest")
            saved = None if deep is None else self._read(deep)
            if saved is None:
                raise NoValidCheckpoint(f"{self._root}", "what it says of the trainer is damaged")
        saved.check_samples(self._callback.samples_per_step(self._trainer.args))
        with tempfile.TemporaryDirectory(prefix="checkfreq-") as folder:
            with open(os.path.join(folder, _STATE_FILE), "w", encoding="utf-8") as file:
                file.write(saved.as_json())
            self._folder = folder
            return self._train(folder, None, *args, **others)

    def load_from_checkpoint(self, folder: str, *args: Any, **others: Any) -> None:
        """Load nothing from our folder: the model is restored with all the rest."""
        if folder != self._folder:
            self._load(folder, *args, **others)
