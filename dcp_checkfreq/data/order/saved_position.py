"""A position as it is saved: JSON with a fingerprint of what it is only meaningful with. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from dcp_checkfreq.data.order.position import Position
from dcp_checkfreq.errors import DataStateError

FORMAT = 1
_ID_CHARS = 32  # longer ids are kept as a digest of that many characters

OnMismatch = Literal["error", "restart_epoch"]

# What must not change in the middle of an epoch, and what it is called in errors.
_COMPARED = {
    "length": "number of items",
    "order": "order",
    "last": "policy for the last batch",
    "dataset": "dataset_id",
}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a position is only meaningful with.

    Attributes:
        length: items of the data set.
        seed: of the order and of the samples' randomness.
        order: name and version of the order.
        last: what becomes of the last samples.
        dataset: what the caller says the data is; long ids are kept as a digest.
        global_batch: samples of all ranks in a step. It may change, with a warning: the loss curve
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
    """A position to resume from, and the warnings that the user should see."""

    position: Position
    warnings: tuple[str, ...] = ()


def check_on_mismatch(value: object) -> None:
    """Raise ValueError unless a value is one of `OnMismatch`."""
    if value not in get_args(OnMismatch):
        raise ValueError(f"on_mismatch must be one of {get_args(OnMismatch)}, got {value!r}")


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
    check_on_mismatch(on_mismatch)
    position, saved = decode(text, what)
    if saved.seed != present.seed:
        raise DataStateError(
            what,
            f"the seed was {saved.seed}, now it is {present.seed}: make the loader with "
            f"seed={saved.seed}",
        )
    warnings: tuple[str, ...] = ()
    if saved.global_batch != present.global_batch:
        warnings = (
            f"{what}: a step took {saved.global_batch} samples, now it takes "
            f"{present.global_batch}, and an epoch had {_epoch_steps(saved)} steps, now "
            f"{_epoch_steps(present)}: learning rate and schedule may no longer fit. "
            f"global_batch={saved.global_batch} keeps it as it was, on any number of ranks that "
            "divides it",
        )
    pairs = ((name, getattr(saved, key), getattr(present, key)) for key, name in _COMPARED.items())
    changes = "; ".join(changed(pairs))
    if not changes:
        return Accepted(position, warnings)
    if position.samples == 0:
        return Accepted(position, (f"{what}: {changes}. Epoch {position.epoch} uses it", *warnings))
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
    return Accepted(Position(position.epoch, 0), (warning, *warnings))


def changed(pairs: Iterable[tuple[str, object, object]]) -> list[str]:
    """Return a text for each ``(name, saved value, present value)`` that differ."""
    return [f"the {name} was {old!r}, now it is {new!r}" for name, old, new in pairs if old != new]


def _epoch_steps(fingerprint: Fingerprint) -> int:
    """Return the steps of an epoch; one more than there are if ranks outnumber its last samples."""
    length, whole = fingerprint.length, max(1, fingerprint.global_batch)
    return length // whole if fingerprint.last == "drop" else -(-length // whole)
