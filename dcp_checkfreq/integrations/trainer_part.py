"""What is saved of a Hugging Face `Trainer` besides its model, optimizer and random states."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from dcp_checkfreq.errors import DataStateError

FORMAT = 1
_WHAT = "Trainer"
_OF_RANK = ("log_history",)  # the times in it were taken on this rank
_NOT_SAVED = ("is_local_process_zero", "is_world_process_zero")

Loss = dict[str, float]


class TrainerPart:
    """`TrainerState`, and the sums of which the next logged loss is made.

    What all ranks share is saved once, the log and the sums for each rank.

    Args:
        state: returns the live `TrainerState`.
        samples_per_step: of all ranks in one optimizer step: what a position in steps means.
        loss: returns the sums of this rank.
    """

    def __init__(
        self,
        state: Callable[[], Any] | None = None,
        samples_per_step: int = 0,
        loss: Callable[[], Loss] = dict,
    ) -> None:
        self._state, self._loss = state, loss
        self.samples_per_step = samples_per_step
        self.fields: dict[str, Any] = {}  # of the `TrainerState` that was restored
        self.loss: Loss = {}  # that was restored; empty on a rank that was not there before

    @property
    def step(self) -> int:
        """The optimizer step that was restored."""
        return int(self.fields["global_step"])

    def split_state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what all ranks have in common, and what is of this one."""
        if self._state is None:
            return {}, {}
        fields = dataclasses.asdict(self._state())
        log = {name: fields.pop(name) for name in _OF_RANK}
        for name in _NOT_SAVED:
            fields.pop(name, None)
        common = {
            "format": FORMAT,
            "samples_per_step": self.samples_per_step,
            "state": json.dumps(fields),
        }
        return common, {"log": json.dumps(log), "loss": self._loss()}

    def state_dict(self) -> dict[str, Any]:
        """Return both in one."""
        common, of_rank = self.split_state_dict()
        return {**common, **of_rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what was saved; nothing is put into the live trainer.

        Raises:
            DataStateError: it is none of ours.
        """
        if state.get("format") != FORMAT or not isinstance(state.get("state"), str):
            raise DataStateError(
                _WHAT, f"the saved state is not of format {FORMAT}, which this version reads"
            )
        self.samples_per_step = int(state["samples_per_step"])
        self.fields = {**json.loads(state["state"]), **json.loads(state.get("log", "{}"))}
        self.loss = dict(state.get("loss", {}))

    def check_samples(self, now: int) -> None:
        """Make sure that a step still is as many samples as it was.

        Raises:
            DataStateError: the position, in steps, would be another one in the data.
        """
        if self.samples_per_step != now:
            raise DataStateError(
                _WHAT,
                f"a step was {self.samples_per_step} samples when it was saved, of all ranks and "
                f"accumulated batches together, and now is {now}: samples would be left out or "
                "trained twice. Set per_device_train_batch_size or gradient_accumulation_steps so "
                "that it is the same",
            )

    def as_json(self) -> str:
        """Return what was restored as `TrainerState.load_from_json` reads it."""
        return json.dumps(self.fields)
