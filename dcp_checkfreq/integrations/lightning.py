"""Lightning: saves by the policy, and `trainer.fit` resumes from the newest whole checkpoint.

Lightning's own dump says where its loops, callbacks and schedulers are. Model and optimizers are
left out of it: they are saved and restored in place, with all the rest, by a `Checkpointer`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dcp_checkfreq.checkpointer.checkpointer import Checkpointer
from dcp_checkfreq.checkpointer.load_part import load_part
from dcp_checkfreq.data.random.rng_state import RNGState
from dcp_checkfreq.dcp.find_latest import find_latest_valid
from dcp_checkfreq.errors import NoValidCheckpoint, UnsupportedOption
from dcp_checkfreq.integrations.needed import needed

with needed("lightning"):
    from lightning.pytorch.callbacks import OnExceptionCheckpoint
    from lightning.pytorch.strategies import (
        DDPStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
    )

_OF_TRAINER = "lightning"
_OURS = ("state_dict", "optimizer_states")  # in a dump; saved by the `Checkpointer`


class LightningPart:
    """What Lightning dumps of a trainer, without model and optimizers; of each rank its own.

    Args:
        dump: returns it.
    """

    def __init__(self, dump: Callable[[], dict[str, Any]] = dict) -> None:
        self._dump = dump
        self.dumped: dict[str, Any] = {}  # that was restored

    def split_state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what all ranks have in common: nothing but a mark; and what is of this one."""
        return {"format": 1}, {"dump": self._dump()}

    def state_dict(self) -> dict[str, Any]:
        """Return both in one."""
        common, of_rank = self.split_state_dict()
        return {**common, **of_rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what was saved; nothing is put into the live trainer."""
        self.dumped = dict(state.get("dump", {}))


class CheckFreqStrategy:
    """Mix-in for a strategy of Lightning: what lies in a `Checkpointer`'s root is restored by it.

    ::

        class Mine(CheckFreqStrategy, FSDPStrategy): ...

    `CheckFreqModelParallel`, `CheckFreqDDP` and `CheckFreqSingleDevice` are made of it.
    """

    checkfreq: CheckFreqCheckpoint | None = None
    _is_dumping = False
    _is_ours = False

    @contextlib.contextmanager
    def without_tensors(self) -> Any:
        """Dump no model and no optimizers in the block."""
        self._is_dumping = True
        try:
            yield
        finally:
            self._is_dumping = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state, for Lightning's own checkpoints."""
        mine: dict[str, Any] = {}
        return mine if self._is_dumping else self._stock().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state, for Lightning's own checkpoints."""
        mine: dict[str, Any] = {}
        return mine if self._is_dumping else self._stock().optimizer_state(optimizer)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **others: Any) -> Any:
        """Read where the trainer was; model and optimizers come when the training starts."""
        saves = self.checkfreq
        self._is_ours = saves is not None and saves.has(checkpoint_path)
        if saves is None or not self._is_ours:
            return self._stock().load_checkpoint(checkpoint_path, *args, **others)
        return saves.read()

    def load_model_state_dict(self, checkpoint: Any, *args: Any, **others: Any) -> None:
        """Put the model's state back, if it is of one of Lightning's own checkpoints."""
        if not self._is_ours:
            self._stock().load_model_state_dict(checkpoint, *args, **others)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Put the optimizers' state back, if it is of one of Lightning's own checkpoints."""
        if not self._is_ours:
            self._stock().load_optimizer_state_dict(checkpoint)

    def _stock(self) -> Any:
        return super()


class CheckFreqModelParallel(CheckFreqStrategy, ModelParallelStrategy):
    """`ModelParallelStrategy` (FSDP2 and tensor parallelism)."""


class CheckFreqDDP(CheckFreqStrategy, DDPStrategy):
    """`DDPStrategy`."""


class CheckFreqSingleDevice(CheckFreqStrategy, SingleDeviceStrategy):
    """`SingleDeviceStrategy`."""


class CheckFreqCheckpoint(OnExceptionCheckpoint):
    """Callback: saves by the policy, and tells ``fit(ckpt_path="last")`` the newest whole one.

    ::

        trainer = Trainer(strategy=CheckFreqDDP(), callbacks=[CheckFreqCheckpoint("run")])
        trainer.fit(model, ResumableLoader(dataset, 32, seed=1), ckpt_path="last")

    Args:
        root: folder of the run.
        max_overhead: see `Checkpointer`.
        every: see `Checkpointer`.
        options: others of `Checkpointer`.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        max_overhead: float = 0.035,
        every: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root)
        for name in ("staging_dir", "storage_options"):
            if options.get(name) is not None:
                raise UnsupportedOption(name, "Lightning looks for the newest checkpoint itself")
        self._root = Path(root).absolute()
        self._opened: Callable[[dict[str, Any]], Checkpointer] = lambda parts: Checkpointer(
            self._root, parts, max_overhead=max_overhead, every=every, **options
        )
        self._open = contextlib.ExitStack()
        self._read_step: int | None = None
        self._rng: RNGState | None = None
        self._rng_of_first_step: dict[str, Any] | None = None
        self.checkpointer: Checkpointer | None = None  # during `fit`

    @property
    def ckpt_path(self) -> str:
        """The newest whole checkpoint, or nothing. Lightning asks for it before ranks can agree."""
        found = find_latest_valid(self._root, no_dist=True)
        return "" if found is None else found.path

    def has(self, path: Any) -> bool:
        """Tell whether this path is in the root."""
        return self._root in Path(path).absolute().parents

    def read(self) -> dict[str, Any]:
        """Return what Lightning restores from: all ranks read the same, and none that is damaged.

        Raises:
            NoValidCheckpoint: all of them are.
        """
        found = find_latest_valid(self._root, depth="digest")
        if found is None:
            raise NoValidCheckpoint(str(self._root), "none of its checkpoints is whole")
        part = LightningPart()
        load_part(found, _OF_TRAINER, into=part)
        self._read_step = found.step
        return {**part.dumped, "state_dict": {}, "optimizer_states": []}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Meet the strategy."""
        if not isinstance(trainer.strategy, CheckFreqStrategy):
            raise UnsupportedOption(
                f"strategy={type(trainer.strategy).__name__}",
                "it would not know our checkpoints. Take CheckFreqDDP or another with the mix-in "
                "CheckFreqStrategy",
            )
        trainer.strategy.checkfreq = self

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore model, optimizers and random states, if the loops were."""
        strategy = trainer.strategy

        def dump() -> dict[str, Any]:
            with strategy.without_tensors():
                dumped: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(
                    weights_only=False
                )
            return {key: one for key, one in dumped.items() if key not in _OURS}

        self._rng = RNGState(seed=0)
        parts = {"model": strategy.model, "rng": self._rng, _OF_TRAINER: LightningPart(dump)}
        parts |= {f"optim{number}": one for number, one in enumerate(strategy.optimizers)}
        ckpt = self._open.enter_context(self._opened(parts))
        self.checkpointer = ckpt
        if self._read_step is None:
            ckpt.restore(fresh_start=True)
        else:
            ckpt.restore(self._read_step)
            self._rng_of_first_step = self._rng.value

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draw on from where the saved step was."""
        if self._rng_of_first_step is not None and self._rng is not None:
            self._rng.value = self._rng_of_first_step
            self._rng_of_first_step = None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Say that a step is done, if the optimizer made one."""
        if self.checkpointer is not None and trainer.global_step > self.checkpointer.step:
            self.checkpointer.after_step(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step, and wait until it is published."""
        if self.checkpointer is not None:
            self.checkpointer.save(wait=True)
            self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the `Checkpointer` with this error, as `with` would."""
        self.checkpointer = None
        self._open.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give everything back; the checkpoints stay."""
        self._close()

    def _close(self) -> None:
        self.checkpointer = None
        self._open.close()
