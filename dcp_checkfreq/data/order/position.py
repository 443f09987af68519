"""Where a job is in its data, and what each rank takes next. Pure.

Training consumes the items of an epoch in one order, from the front. So two whole numbers say all:
the epoch, and how many of its samples all data-parallel ranks together have taken. A job that
resumes there deals out the rest, on any number of ranks and with any batch size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Last = Literal["partial", "carry", "drop", "pad"]


@dataclass(frozen=True, slots=True)
class Position:
    """The first ``samples`` items of the epoch's order are consumed; never all of them."""

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What all ranks together take in one training step.

    Attributes:
        at: position before it.
        real: samples that count; they are consumed by it.
        after: position after it; ``(epoch + 1, 0)`` if the epoch is over then.
    """

    at: Position
    real: int
    after: Position


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank takes in one step: positions in the orders of one or two (or more) epochs.

    Attributes:
        runs: ``(epoch, positions in its order)``, in the order in which they stand in the batch.
        valid: so many samples, from the front of the batch, are real; others repeat some so that
            no rank is left without.
    """

    runs: tuple[tuple[int, range], ...]
    valid: int

    def __len__(self) -> int:
        return sum(len(positions) for _, positions in self.runs)


@dataclass(frozen=True, slots=True)
class Deal:
    """How the samples of an epoch are dealt out in batches.

    In a step that begins at position p, rank r of W takes p + r, p + r + W, p + r + 2 W, ...

    Attributes:
        length: items of an epoch.
        batch_size: samples per rank and step.
        world_size: data-parallel ranks.
        last: what becomes of the last samples of an epoch, too few for a whole batch each:

            - "partial": the last batch is smaller. Fewer samples than ranks join the batch before,
              so that a rank gets up to one more than ``batch_size``, and none gets nothing. Only if
              a job resumes with more ranks than samples are left, some ranks get a repeated sample
              that does not count (``valid`` is 0).
            - "carry": they open the first batch of the next epoch; every batch is whole.
            - "drop": they are left out.
            - "pad": the last batch is filled up with repeated samples, which do not count.
    """

    length: int
    batch_size: int
    world_size: int = 1
    last: Last = "partial"

    def __post_init__(self) -> None:
        for name in ("length", "batch_size", "world_size"):
            check_count(name, getattr(self, name))
        if self.last not in get_args(Last):
            raise ValueError(f"last must be one of {get_args(Last)}, got {self.last!r}")
        if self.last == "drop" and self.length < self.global_batch:
            raise ValueError(
                f"with last='drop' there would be no batch at all: {self.length} items are fewer "
                f"than {self.world_size} ranks x {self.batch_size}"
            )

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in a whole batch."""
        return self.batch_size * self.world_size

    def step(self, at: Position) -> Step | None:
        """Return the step at a position; None if what is left of the epoch is dropped."""
        left, whole = self.length - at.samples, self.global_batch
        if self.last == "carry":
            turns, samples = divmod(at.samples + whole, self.length)
            return Step(at, whole, Position(at.epoch + turns, samples))
        if self.last == "drop":
            if left < whole:
                return None
            is_last = left < 2 * whole
            taken = whole
        elif self.last == "pad":
            is_last = left <= whole
            taken = min(left, whole)
        else:
            is_last = left < whole + self.world_size
            taken = left if is_last else whole
        after = Position(at.epoch + 1, 0) if is_last else Position(at.epoch, at.samples + taken)
        return Step(at, taken, after)

    def share(self, step: Step, rank: int) -> Share:
        """Return what ``rank`` takes in a step: never nothing, unless the step has no sample."""
        epoch, first, world = step.at.epoch, step.at.samples + rank, self.world_size
        if self.last == "carry":
            return Share(tuple(self._runs(epoch, first)), self.batch_size)
        end = step.at.samples + step.real
        real = range(first, end, world)
        if self.last == "pad":
            wanted = range(first, step.at.samples + self.global_batch, world)
            repeated = ((epoch, range(p % self.length, p % self.length + 1))
                        for p in wanted[len(real):])  # fmt: skip
            runs = ((epoch, real), *repeated) if len(real) else tuple(repeated)
            return Share(runs, len(real))
        if len(real) == 0:
            twin = step.at.samples + rank % step.real
            return Share(((epoch, range(twin, twin + 1)),), 0)
        return Share(((epoch, real),), len(real))

    def _runs(self, epoch: int, first: int) -> Iterator[tuple[int, range]]:
        """Yield a whole batch from ``first`` on, cut where an epoch ends."""
        wanted = self.batch_size
        while wanted:
            epoch, first = epoch + first // self.length, first % self.length
            positions = range(first, self.length, self.world_size)[:wanted]
            yield epoch, positions
            wanted -= len(positions)
            first += len(positions) * self.world_size

    def steps(self, at: Position) -> int:
        """Return how many steps the whole epoch of a position has.

        With "carry" epochs differ by one: the first samples may be in the last batch of the epoch
        before. They are those that whole batches do not make up.
        """
        if self.last != "carry":
            return self.steps_left(Position(at.epoch, 0))
        return at.samples // self.global_batch + self.steps_left(at)

    def steps_left(self, at: Position) -> int:
        """Return how many steps the epoch still has from a position on."""
        left, whole = self.length - at.samples, self.global_batch
        if self.last == "drop":
            return left // whole
        if self.last == "partial":
            return max(1, -(-(left - self.world_size + 1) // whole))
        return -(-left // whole)


def batch_per_rank(batch_size: int | None, global_batch: int | None, world_size: int) -> int:
    """Return how many samples a rank takes in a step.

    Args:
        batch_size: just that.
        global_batch: samples of all ranks in a step, instead.
        world_size: data-parallel ranks.

    Raises:
        ValueError: both or neither are given, or the ranks cannot have equal shares. With shares
            that differ, ranks that average their gradients would weigh samples differently.
    """
    if (batch_size is None) == (global_batch is None):
        raise ValueError(
            f"pass batch_size (per rank) or global_batch (of all ranks), one of the two: got "
            f"batch_size={batch_size!r}, global_batch={global_batch!r}"
        )
    if global_batch is None:
        assert batch_size is not None  # one of the two is given
        return batch_size
    check_count("global_batch", global_batch)
    check_count("world_size", world_size)
    if global_batch % world_size == 0:
        return global_batch // world_size
    ranks = [n for n in range(1, global_batch + 1) if global_batch % n == 0]
    below = global_batch // world_size * world_size
    near = [str(n) for n in (below, below + world_size) if n]
    raise ValueError(
        f"global_batch={global_batch} does not divide among {world_size} ranks: on {world_size} "
        f"ranks it may be {' or '.join(near)}; {global_batch} can be had on "
        f"{', '.join(map(str, ranks))} rank{'s' if ranks[-1] > 1 else ''}"
    )


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless a value is a whole number from 1 on."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
