"""Where a job is in its data, and what each rank takes next. Pure.

Training consumes the items of an epoch in one order, from the front. So two whole numbers say all:
the epoch, and how many of its samples all data-parallel ranks together have taken. Whoever goes on
from there, on however many ranks and with whatever batch size, deals out the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from dcp_checkfreq.errors import DataStateError

FORMAT = 1
_ID_CHARS = 32  # longer ids are kept as a digest of that many characters

Last = Literal["partial", "carry", "drop", "pad"]
OnMismatch = Literal["error", "restart_epoch"]


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
              a job goes on with more ranks than samples are left, some ranks get a repeated sample
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
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
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
            f"tell batch_size (per rank) or global_batch (of all ranks), one of the two: got "
            f"batch_size={batch_size!r}, global_batch={global_batch!r}"
        )
    if global_batch is None:
        assert batch_size is not None  # one of the two is given
        return batch_size
    if type(global_batch) is not int or global_batch < 1:
        raise ValueError(f"global_batch must be a whole number from 1 on, got {global_batch!r}")
    if world_size < 1 or global_batch % world_size == 0:
        return global_batch // max(world_size, 1)  # `Deal` says what is wrong with the ranks
    ranks = [n for n in range(1, global_batch + 1) if global_batch % n == 0]
    below = global_batch // world_size * world_size
    near = [str(n) for n in (below, below + world_size) if n]
    raise ValueError(
        f"global_batch={global_batch} does not divide among {world_size} ranks: on {world_size} "
        f"ranks it may be {' or '.join(near)}; {global_batch} can be had on "
        f"{', '.join(map(str, ranks))} rank{'s' if ranks[-1] > 1 else ''}"
    )


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a position is only meaningful with.

    Attributes:
        length: items of the data set.
        seed: of the order and of the samples' randomness.
        order: name and version of the order.
        last: what becomes of the last samples.
        dataset: what the caller says the data is; long ids are kept as a digest.
        global_batch: samples of all ranks in a step. May change; it is told because the loss curve
            and the number of steps change with it.
    """

    length: int
    seed: int
    order: str
    last: str
    dataset: str
    global_batch: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """A position that can be gone on from, and what the user should hear about it."""

    position: Position
    warnings: tuple[str, ...] = ()


def short_id(dataset_id: str) -> str:
    """Return the id as it is kept in a state: a digest if it is long."""
    if len(dataset_id.encode()) <= _ID_CHARS and dataset_id.isascii():
        return dataset_id
    return hashlib.sha256(dataset_id.encode()).hexdigest()[:_ID_CHARS]


def encode(position: Position, fingerprint: Fingerprint) -> str:
    """Return the state as JSON: under 200 bytes for up to a billion items."""
    state = {"format": FORMAT, **asdict(position), **asdict(fingerprint)}
    return json.dumps(state, separators=(",", ":"))


def decode(text: object, what: str) -> tuple[Position, Fingerprint]:
    """Return what `encode` was given.

    Args:
        text: to decode.
        what: named in errors.

    Raises:
        DataStateError: it is not such a text, is of a newer format, or says what cannot be.
    """
    state = parse(text, what)
    fingerprint = Fingerprint(
        length=read_number(state, "length", what),
        seed=read_number(state, "seed", what),
        order=read_text(state, "order", what),
        last=read_text(state, "last", what),
        dataset=read_text(state, "dataset", what),
        global_batch=read_number(state, "global_batch", what),
    )
    position = Position(read_number(state, "epoch", what), read_number(state, "samples", what))
    if position.samples >= max(fingerprint.length, 1):
        raise DataStateError(
            what,
            f"the saved state says {position.samples} samples of {fingerprint.length} are consumed",
        )
    return position, fingerprint


def parse(text: object, what: str) -> dict[str, Any]:
    """Return the fields of a state in JSON whose format this version reads.

    Raises:
        DataStateError: it is no such text, or of a newer format.
    """
    try:
        state: Any = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        state = None
    if not isinstance(state, dict):
        raise DataStateError(what, f"the saved state is not one of a data loader: {text!r:.200}")
    saved_format = read_number(state, "format", what)
    if saved_format > FORMAT:
        raise DataStateError(
            what, f"the state was saved in format {saved_format}, this version reads up to {FORMAT}"
        )
    return state


def _field(state: dict[str, Any], key: str, what: str) -> Any:
    if key not in state:
        raise DataStateError(what, f"the saved state has no {key!r}, only {sorted(state)}")
    return state[key]


def read_number(state: dict[str, Any], key: str, what: str) -> int:
    """Return a whole number from 0 on, or raise DataStateError."""
    value = _field(state, key, what)
    if type(value) is not int or value < 0:
        raise DataStateError(what, f"{key!r} must be a whole number from 0 on, saved was {value!r}")
    return value


def read_text(state: dict[str, Any], key: str, what: str) -> str:
    """Return a text, or raise DataStateError."""
    value = _field(state, key, what)
    if not isinstance(value, str):
        raise DataStateError(what, f"{key!r} must be text, saved was {value!r}")
    return value


def accept(
    text: object, present: Fingerprint, *, what: str, on_mismatch: OnMismatch = "error"
) -> Accepted:
    """Return the position to resume from with the present data.

    Another number of ranks or of workers is fine. So is another number of samples per step, with a
    warning: it changes the training. Other data is fine between two epochs, with a warning, because
    data may grow.

    Args:
        text: the saved state.
        present: of the data that is there now.
        what: named in errors.
        on_mismatch: "restart_epoch" starts the epoch anew, with a warning, where other data would
            be an error in the middle of an epoch.

    Raises:
        DataStateError: the state is no state, the seed differs, or the data differs in the middle
            of an epoch.
    """
    if on_mismatch not in get_args(OnMismatch):
        raise ValueError(f"on_mismatch must be one of {get_args(OnMismatch)}, got {on_mismatch!r}")
    position, saved = decode(text, what)
    if saved.seed != present.seed:
        raise DataStateError(
            what,
            f"the seed was {saved.seed}, now it is {present.seed}: make the loader with "
            f"seed={saved.seed}",
        )
    told: tuple[str, ...] = ()
    if saved.global_batch != present.global_batch:
        told = (
            f"{what}: a step took {saved.global_batch} samples, now it takes "
            f"{present.global_batch}, and an epoch had {_epoch_steps(saved)} steps, now "
            f"{_epoch_steps(present)}: learning rate and schedule may no longer fit. "
            f"global_batch={saved.global_batch} keeps it as it was, on any number of ranks that "
            "divides it",
        )
    changes = "; ".join(
        f"the {name} was {getattr(saved, key)!r}, now it is {getattr(present, key)!r}"
        for key, name in _COMPARED.items()
        if getattr(saved, key) != getattr(present, key)
    )
    if not changes:
        return Accepted(position, told)
    if position.samples == 0:
        return Accepted(position, (f"{what}: {changes}. Epoch {position.epoch} uses it", *told))
    if on_mismatch == "error":
        raise DataStateError(
            what,
            f"{changes}, and {position.samples} samples of epoch {position.epoch} are consumed. "
            "Bring back what was, or load with on_mismatch='restart_epoch'",
        )
    warning = (
        f"{what}: {changes}. Epoch {position.epoch} starts anew; {position.samples} samples of it "
        "were consumed before"
    )
    return Accepted(Position(position.epoch, 0), (warning, *told))


def _epoch_steps(fingerprint: Fingerprint) -> int:
    """Return the steps of an epoch; one more than there are if ranks outnumber its last samples."""
    length, whole = fingerprint.length, max(1, fingerprint.global_batch)
    return length // whole if fingerprint.last == "drop" else -(-length // whole)


_COMPARED = {
    "length": "number of items",
    "order": "order",
    "last": "policy for the last batch",
    "dataset": "dataset_id",
}
