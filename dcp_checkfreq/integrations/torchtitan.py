"""torchtitan: a checkpoint manager that saves by the policy, and resumes from the newest whole one.

Its `Trainer` calls it as it calls its own. What a `Checkpointer` does not do (weights to start
from, the model alone at the end, Hugging Face's format) is done by torchtitan's own manager.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from concurrent.futures import Future
from typing import Any

from dcp_checkfreq.checkpointer.checkpointer import Checkpointer
from dcp_checkfreq.data.order.ranks import resolve
from dcp_checkfreq.data.random.rng_state import RNGState
from dcp_checkfreq.dcp.find_latest import find_latest_valid
from dcp_checkfreq.errors import DataStateError, UnsupportedOption, UnsupportedState
from dcp_checkfreq.integrations.needed import needed

with needed("torchtitan"):
    from torchtitan.components.checkpointer import (
        DATALOADER,
        LR_SCHEDULER,
        MODEL,
        OPTIMIZER,
        TRAIN_STATE,
        BaseCheckpointManager,
        CheckpointManager,
    )
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.tools import filesystem

_ALL_OF_THEM = 2**31  # `keep_latest_k=0`
_OF_STOCK = [one.name for one in dataclasses.fields(BaseCheckpointManager.Config)]


def _ranks() -> int:
    return resolve(None, None).world_size


class RankPosition:
    """The position of a torchtitan loader: of each rank its own, for the same number of ranks.

    Args:
        loader: whose position it is.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def split_state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what all ranks have in common, and what is of this one."""
        return {"ranks": _ranks()}, {"of_rank": self._loader.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """Return both in one."""
        common, of_rank = self.split_state_dict()
        return {**common, **of_rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position.

        Raises:
            DataStateError: it was saved on another number of ranks.
        """
        ranks, now = state["ranks"], _ranks()
        if ranks != now:
            raise DataStateError(
                DATALOADER,
                f"the number of ranks was {ranks}, now it is {now}, and this loader has a position "
                "for each. exclude_from_loading=['dataloader'] begins the data anew",
            )
        self._loader.load_state_dict(state["of_rank"])


class CheckFreqManager(BaseCheckpointManager):
    """Checkpoint manager for torchtitan's `Trainer`.

    ::

        Trainer.Config(..., checkpoint=CheckFreqManager.Config(enable=True, max_overhead=0.035))

    Args:
        config: what is said on the command line or in a registry.
        dataloader: of this rank.
        model_parts: one module; several on a rank are stages of an interleaved pipeline.
        optimizers: the container of them.
        lr_schedulers: the container of them.
        states: others to save, by name.
        sd_adapter: to and from Hugging Face's names.
        base_folder: of the job.

    Raises:
        UnsupportedState: there are several model parts on this rank.
        UnsupportedOption: an option of `Checkpointer` is given that ``config`` has a field for, or
            ``exclude_from_loading`` has the trainer's step or what is not there.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """Fields of torchtitan's own managers, and two more."""

        max_overhead: float | None = None
        """Share of training time that saving may cost. If it is given, interval is not used."""

        options: dict[str, Any] = dataclasses.field(default_factory=dict)
        """Others of Checkpointer: grace_s, staging_dir, mtbf_s and so on."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        self.save_future: Future[None] | None = None
        self._config = config
        given = sorted({"every", "max_overhead", "keep_last"} & set(config.options))
        if given:
            raise UnsupportedOption(
                f"options[{given[0]!r}]", "interval, max_overhead and keep_latest_k say it"
            )
        if len(model_parts) != 1:
            raise UnsupportedState(
                MODEL,
                f"{len(model_parts)} model parts",
                "stages of an interleaved pipeline are not saved; take a schedule with one stage "
                "on a rank",
            )
        self._folder = filesystem.join(base_folder, config.folder)
        self._parts: dict[str, Any] = {MODEL: model_parts[0]}
        names = [OPTIMIZER, *(f"{OPTIMIZER}{one}" for one in range(1, len(optimizers)))]
        self._parts |= zip(names, optimizers, strict=True)
        self._parts |= {**states, LR_SCHEDULER: lr_schedulers}
        if dataloader is not None:
            is_of_rank = isinstance(dataloader, ParallelAwareDataloader)
            self._parts[DATALOADER] = RankPosition(dataloader) if is_of_rank else dataloader
        self._rng = self._parts["rng"] = RNGState(seed=0)
        self._excluded = {
            name: names if name == OPTIMIZER else [name] for name in config.exclude_from_loading
        }
        if TRAIN_STATE in self._excluded:
            raise UnsupportedOption(
                f"exclude_from_loading=[{TRAIN_STATE!r}]", "steps would be counted from 1 again"
            )
        unknown = [name for of in self._excluded.values() for name in of if name not in self._parts]
        if unknown:
            raise UnsupportedOption("exclude_from_loading", f"there is no part {unknown[0]!r}")
        # Its folder is ours: what it has left there is what we start from.
        stock = {name: getattr(config, name) for name in _OF_STOCK}
        self._stock = CheckpointManager(
            CheckpointManager.Config(**{**stock, "keep_latest_k": 0}),
            dataloader=dataloader,
            model_parts=model_parts,
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            states=dict(states),
            sd_adapter=sd_adapter,
            base_folder=base_folder,
        )
        self._open = contextlib.ExitStack()
        self.checkpointer: Checkpointer | None = None  # from `load` to `close`

    def _opened(self) -> Checkpointer:
        if self.checkpointer is None:
            config = self._config
            by_policy = config.max_overhead is not None
            share: dict[str, Any] = {"max_overhead": config.max_overhead} if by_policy else {}
            self.checkpointer = self._open.enter_context(
                Checkpointer(
                    self._folder,
                    self._parts,
                    **share,
                    every=None if by_policy else config.interval,
                    keep_last=config.keep_latest_k or _ALL_OF_THEM,
                    **config.options,
                )
            )
        return self.checkpointer

    def _load(self, step: int = -1) -> bool:
        """Restore this step, or the newest whole one, or what torchtitan's manager would."""
        ckpt = self._opened()
        only = None
        if self._excluded:
            excluded = {name for of in self._excluded.values() for name in of}
            only = [name for name in self._parts if name not in excluded]
        at_start = self._rng.value
        if step != -1 and not self._has_ours():
            restored = ckpt.restore(fresh_start=True)
        else:
            restored = ckpt.restore(None if step == -1 else step, only=only)
        if restored is None:
            loaded = bool(self._stock.load(step))
            ckpt.step = int(self._parts[TRAIN_STATE].step) if loaded else 0
            return loaded
        if restored.world_size != _ranks():
            # Ranks of one shard group draw the same, as torchtitan has seeded them.
            self._rng.value = at_start
        return True

    def _has_ours(self) -> bool:
        options = self._config.options.get("storage_options")
        return find_latest_valid(self._folder, storage_options=options) is not None

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Say that a step is done. Returns whether a save of it was begun, or is published."""
        config = self._config
        if config.load_only:
            return False
        if config.create_seed_checkpoint:
            return bool(self._stock.save(curr_step, last_step))
        ckpt = self._opened()
        begun = ckpt._loop.begun
        ckpt.after_step(curr_step)
        if last_step or (curr_step == 1 and config.enable_first_step_checkpoint):
            ckpt.save(wait=last_step)
        if last_step and config.last_save_model_only:
            self._stock.save(curr_step, last_step)
        is_begun = ckpt._loop.begun > begun
        if last_step:
            self.save_future = None
        elif is_begun:
            self.save_future = Future()
        return is_begun or last_step

    def _wait_for_saving(self) -> None:
        """Wait until the save in flight is published."""
        self.save_future = None
        self._opened().wait()

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: a hook of each optimizer waits for the copy."""

    def _close(self) -> None:
        """Leave the `Checkpointer`; while an error is handled, with this error, as `with` would."""
        self._stock.close()
        self.checkpointer = None
        self._open.__exit__(*sys.exc_info())
