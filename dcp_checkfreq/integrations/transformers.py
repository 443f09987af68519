"""Hugging Face's `Trainer`: saves by the policy, and resumes by itself after a restart.

Saves come from a callback. The way back is the `Trainer`'s own: it gets a folder with nothing but
its `TrainerState` in it, skips the samples of that many steps, and makes model, optimizer and
scheduler; then, before the first step, all of them are restored in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from dcp_checkfreq.checkpointer.checkpointer import Checkpointer
from dcp_checkfreq.data.random.rng_state import RNGState
from dcp_checkfreq.errors import UnsupportedOption, UnsupportedState
from dcp_checkfreq.integrations.needed import needed
from dcp_checkfreq.integrations.trainer_part import Loss, TrainerPart
from dcp_checkfreq.integrations.trainer_resuming import IsDone, OtherStep, Resuming
from dcp_checkfreq.state.per_rank import PerRank
from dcp_checkfreq.storage.open import Location

with needed("transformers"):
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

_HOOKS = ("train", "_load_from_checkpoint", "get_total_train_batch_size")
# The sums of which a `Trainer` makes the next loss that it logs; it keeps them nowhere else.
_SUMS = {"sum": "_tr_loss", "last_logged": "_globalstep_last_logged"}


class CheckFreqCallback(TrainerCallback):
    """Saves model, optimizer, scheduler, scaler, random states and `TrainerState` by the policy.

    ::

        trainer = Trainer(..., callbacks=[CheckFreqCallback(root, every=500)])

    It brings nothing back: `enable` does. Alone, each `train` is a new run in the root.

    Args:
        root: folder of the run; see `Checkpointer`.
        max_overhead: see `Checkpointer`.
        every: see `Checkpointer`.
        options: others of `Checkpointer`.
    """

    def __init__(
        self,
        root: Location,
        *,
        max_overhead: float = 0.035,
        every: int | None = None,
        **options: Any,
    ) -> None:
        self._opened: Callable[[dict[str, Any]], Checkpointer] = lambda parts: Checkpointer(
            root, parts, max_overhead=max_overhead, every=every, **options
        )
        self.open = contextlib.ExitStack()
        self.trainer: Any = None  # that `enable` was called with
        self._rng: RNGState | None = None
        # As they were when the epoch began: its order follows from them, whatever draws it.
        self._rng_of_epoch = PerRank({"epoch": -1})
        self._rng_of_first_step: dict[str, Any] | None = None
        self.checkpointer: Checkpointer | None = None  # during `train`

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **others: Any,
    ) -> None:
        """Make the `Checkpointer`; with `enable`, restore the newest checkpoint."""
        self.close()  # of a `train` that has not come to its end
        self._rng = RNGState(seed=args.seed)
        part = TrainerPart(lambda: self._state_now(state), self.samples_per_step(args), self._sums)
        parts = {
            "model": model,
            "optim": optimizer,
            "scheduler": lr_scheduler,
            "rng": self._rng,
            "rng_of_epoch": self._rng_of_epoch,
            "trainer": part,
        }
        scaler = getattr(optimizer, "scaler", None)  # of accelerate, with fp16
        if scaler is not None:
            parts["scaler"] = scaler
        checkpointer = self.open.enter_context(self._opened(parts))
        self.checkpointer = checkpointer
        restored = checkpointer.restore(fresh_start=self.trainer is None)
        if restored is None:
            if state.global_step:  # resumed from elsewhere
                checkpointer.step = state.global_step
            return
        if restored.step != state.global_step:
            self.close()
            raise OtherStep(restored.path)
        self._rng_of_first_step = self._rng.value
        if state.global_step >= state.max_steps:
            self.close()
            raise IsDone(state.global_step)
        if part.loss and restored.world_size == args.world_size:
            self._put_sums(part.loss)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Keep the random states; an epoch that is resumed begins with those that it had."""
        assert self._rng is not None
        kept, epoch = self._rng_of_epoch.value, int(state.epoch or 0)
        if self._rng_of_first_step is not None and kept["epoch"] == epoch:
            self._rng.value = kept["rng"]
        else:
            self._rng_of_epoch.value = {"epoch": epoch, "rng": self._rng.value}

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Say that the step before is done: its losses are logged, its evaluation is over."""
        assert self._rng is not None
        assert self.checkpointer is not None
        if self._rng_of_first_step is not None:
            # What was drawn since then was drawn for batches that are trained already.
            self._rng.value = self._rng_of_first_step
            self._rng_of_first_step = None
        elif state.global_step > self.checkpointer.step:
            self.checkpointer.after_step(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Save the last step, if the best model takes its place before `on_train_end`."""
        is_last = control.should_training_stop or state.global_step >= state.max_steps
        if is_last and args.load_best_model_at_end:
            self._save_last(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Save the last step, and wait until it is published."""
        self._save_last(state)
        self.close()

    def _save_last(self, state: Any) -> None:
        assert self.checkpointer is not None
        if state.global_step > self.checkpointer.step:
            self.checkpointer.after_step(state.global_step)
        self.checkpointer.save(wait=True)

    def close(self) -> None:
        """Give everything back. May be called twice."""
        self.checkpointer = None
        self.open.close()

    # --- what is saved of the trainer ---

    def samples_per_step(self, args: Any) -> int:
        """Return how many samples all ranks together train on in one optimizer step."""
        if self.trainer is not None:
            return int(self.trainer.get_total_train_batch_size(args))
        return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def _state_now(self, state: Any) -> Any:
        """Return the state with that of the callbacks in it, as `Trainer` saves it."""
        if self.trainer is not None:
            handler = self.trainer.callback_handler
            found: dict[str, Any] = {}
            for one in [*handler.callbacks, self.trainer.control]:
                if isinstance(one, ExportableState):
                    found.setdefault(type(one).__name__, []).append(one.state())
            state.stateful_callbacks = {
                name: all_of[0] if len(all_of) == 1 else all_of for name, all_of in found.items()
            }
        return state

    def _sums(self) -> Loss:
        found = {key: getattr(self.trainer, name, None) for key, name in _SUMS.items()}
        return {key: float(value) for key, value in found.items() if value is not None}

    def _put_sums(self, sums: Loss) -> None:
        trainer = self.trainer
        trainer._tr_loss = trainer._tr_loss.new_full((), sums["sum"])
        trainer._total_loss_scalar = -sums["sum"]  # the mean at the end is of this `train` alone
        trainer._globalstep_last_logged = int(sums["last_logged"])


def enable(
    trainer: Any,
    root: Location,
    *,
    max_overhead: float = 0.035,
    every: int | None = None,
    **options: Any,
) -> CheckFreqCallback:
    """Let ``trainer.train()`` save by the policy, and resume from the newest whole checkpoint.

    ::

        trainer = Trainer(model, TrainingArguments("out", save_strategy="no"), train_dataset=data)
        enable(trainer, root)
        trainer.train()

    After a restart, the same script resumes where the last checkpoint was: the same samples, random
    numbers and losses. On another number of ranks, if a step stays as many samples.

    Args:
        trainer: a `Trainer`, of any subclass.
        root: folder of the run; the same for all ranks.
        max_overhead: share of training time that saving may cost; see `Checkpointer`.
        every: save at multiples of this step instead.
        options: others of `Checkpointer`.

    Returns:
        The callback; its ``checkpointer`` is there during `train`.

    Raises:
        UnsupportedState: the trainer's state is in another engine (DeepSpeed).
        UnsupportedOption: it has not the methods that a `Trainer` has, or looks for a batch size.
    """
    missing = [name for name in _HOOKS if not callable(getattr(trainer, name, None))]
    if missing:
        raise UnsupportedOption(
            f"enable({type(trainer).__name__})", f"a Trainer has {', '.join(missing)}"
        )
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise UnsupportedState(
            "trainer", "DeepSpeed", "its engine keeps the optimizer to itself, and saves by itself"
        )
    if getattr(trainer.args, "auto_find_batch_size", False):
        raise UnsupportedOption(
            "auto_find_batch_size", "a step is to be as many samples after a restart as before"
        )
    if options.get("staging_dir") is not None:
        raise UnsupportedOption("staging_dir", "the newest checkpoint is looked for in root alone")
    callback = CheckFreqCallback(root, max_overhead=max_overhead, every=every, **options)
    callback.trainer = trainer
    resuming = Resuming(trainer, root, callback, options.get("storage_options"))
    trainer.add_callback(callback)
    trainer.train = resuming.train
    trainer._load_from_checkpoint = resuming.load_from_checkpoint
    return callback
