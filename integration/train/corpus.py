"""Real text that is on every machine, and a data position that survives a change of ranks.

The text: the sources of the Python standard library, sorted by path, joined, cut at a byte limit.
A sample is a window of it. The order of an epoch is a keyed permutation that is computed index by
index, so nothing of it has to be kept: the position is two integers.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


def read_corpus(limit_bytes: int) -> bytes:
    """Return the first ``limit_bytes`` of the standard library's sources, always the same ones."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(stdlib.rglob("*.py"), key=lambda p: p.relative_to(stdlib).as_posix()):
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            return bytes(text[:limit_bytes])
    raise ValueError(f"{stdlib} holds only {len(text)} bytes of .py files, not {limit_bytes}")


def permuted(index: int, count: int, *, seed: int, epoch: int) -> int:
    """Return which of ``count`` samples is the ``index``-th of this epoch.

    For a fixed ``seed`` and ``epoch`` this is a permutation of ``range(count)``: a four-round
    Feistel network on the next power of four, walked until it lands inside the range.
    """
    if not 0 <= index < count:
        raise ValueError(f"index must be in [0, {count}), got {index}")
    half = ((count - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    value = index
    while True:
        left, right = value >> half, value & mask
        for turn in range(4):
            text = f"{seed}/{epoch}/{turn}/{right}".encode()
            hashed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
            left, right = right, left ^ (hashed & mask)
        value = (left << half) | right
        if value < count:
            return value


@dataclass(frozen=True, slots=True)
class SampleId:
    epoch: int
    sample: int  # number of the window in the corpus, the same for any number of ranks


class Position:
    """Where training is in the data: an epoch, and samples of it consumed over all ranks.

    The state says nothing of ranks, so any number of them may resume from it. A global batch that
    reaches the end of an epoch continues into the next one: no sample is dropped, none is repeated.
    """

    def __init__(self, count: int, *, seed: int) -> None:
        self._count, self._seed = count, seed
        self.epoch, self.samples = 0, 0

    def take(self, batch: int, *, rank: int, ranks: int) -> list[SampleId]:
        """Consume one global batch and return this rank's part of it, which is a slice."""
        if batch % ranks:
            raise ValueError(f"a global batch of {batch} cannot be split evenly over {ranks} ranks")
        start = self.epoch * self._count + self.samples
        self.epoch, self.samples = divmod(start + batch, self._count)
        own = batch // ranks
        places = range(start + rank * own, start + (rank + 1) * own)
        return [self._sample_at(*divmod(place, self._count)) for place in places]

    def _sample_at(self, epoch: int, index: int) -> SampleId:
        return SampleId(epoch, permuted(index, self._count, seed=self._seed, epoch=epoch))

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.samples = int(state["epoch"]), int(state["samples"])


class Windows:
    """``count`` windows of ``length`` bytes, and for each byte the one that follows it."""

    def __init__(self, count: int, length: int) -> None:
        self._length = length
        text = bytearray(read_corpus(count * length + 1))
        self._text = torch.frombuffer(text, dtype=torch.uint8).long()

    def batch(self, samples: list[SampleId]) -> tuple[Tensor, Tensor]:
        """Return tokens and targets, each [samples, length], int64."""
        starts = [one.sample * self._length for one in samples]
        rows = torch.stack([self._text[start : start + self._length + 1] for start in starts])
        return rows[:, :-1], rows[:, 1:]
