"""Randomness of one sample: a function of (seed, epoch, index), not of who loads it and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal

from torch.utils.data import get_worker_info

from dcp_checkfreq.data.order.permutation import COLLATE_STREAM, SAMPLE_STREAM, derive
from dcp_checkfreq.data.random import global_state

if TYPE_CHECKING:
    import numpy as np

AugmentRng = Literal["global", "explicit", "none"]


class _Sample:
    """The sample that is being made now."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.generator: np.random.Generator | None = None


# `sample_rng` is called deep inside of the user's transforms: there is no way to pass it along.
_now: ContextVar[_Sample | None] = ContextVar("sample", default=None)


def sample_rng() -> np.random.Generator:
    """Return the generator of the sample that is being made, inside of ``__getitem__`` or collate.

    All calls for one sample return the same generator. What it draws depends on (seed, epoch,
    index) alone; between versions of NumPy only its raw bits are sure to stay the same.

    Raises:
        RuntimeError: no sample of a `ResumableLoader` is being made in this thread, or its
            ``augment_rng`` is "none".
    """
    sample = _now.get()
    if sample is None:
        raise RuntimeError(
            "sample_rng() gives the random numbers of one sample: call it in __getitem__ or "
            "collate_fn of a ResumableLoader, in the same thread, with augment_rng not 'none'"
        )
    if sample.generator is None:
        import numpy as np

        sample.generator = np.random.Generator(np.random.Philox(key=sample.key))
    return sample.generator


class SampleSeeds:
    """Sets the randomness before each sample. Travels to the workers.

    Args:
        seed: of the loader.
        mode: "global" seeds `random`, NumPy's and torch's global generators and `sample_rng`;
            "explicit" only `sample_rng`; "none" nothing.
    """

    def __init__(self, seed: int, mode: AugmentRng) -> None:
        self._seed = seed
        self._mode = mode

    @property
    def is_off(self) -> bool:
        """Whether nothing is seeded."""
        return self._mode == "none"

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Around the making of one batch: afterwards the random states are what they were.

        In the main process they belong to the training (dropout would follow the data).
        """
        if self.is_off:
            yield
            return
        saved = (
            global_state.save() if self._mode == "global" and get_worker_info() is None else None
        )
        token = _now.set(None)
        try:
            yield
        finally:
            _now.reset(token)
            if saved is not None:
                global_state.bring_back(saved)

    def sample(self, epoch: int, index: int) -> None:
        """From here on the random numbers are those of this sample."""
        self._set(SAMPLE_STREAM, epoch, index)

    def collate(self, epoch: int, first_index: int) -> None:
        """From here on the random numbers are those of the batch that begins with this sample."""
        self._set(COLLATE_STREAM, epoch, first_index)

    def _set(self, stream: int, epoch: int, index: int) -> None:
        if self.is_off:
            return
        key = derive(stream, self._seed, epoch, index)
        _now.set(_Sample(key))
        if self._mode == "global":
            global_state.seed_all(key)
