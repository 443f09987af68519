"""DALI's own checkpoint inside of a saved position: only for the pipeline that it was taken of."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dcp_checkfreq.data.order.saved_position import parse, read_number, read_text
from dcp_checkfreq.errors import DataStateError

_ENTRY, _PART = "state", "dali"


@dataclass(frozen=True, slots=True)
class DALIState:
    """DALI's checkpoint after a batch, and what else it is meaningless with.

    DALI itself compares the operators of the graph, and nothing else.

    Attributes:
        version: of DALI.
        rank: data-parallel rank.
        world_size: data-parallel ranks.
        batch_size: samples per rank and step.
        checkpoint: opaque; None before the first batch.
    """

    version: str
    rank: int
    world_size: int
    batch_size: int
    checkpoint: bytes | None


def add_dali(state: Mapping[str, str], dali: DALIState) -> dict[str, str]:
    """Return a cursor's state with DALI's in it: still one entry, so that it loads anywhere."""
    whole = json.loads(state[_ENTRY])
    coded = None if dali.checkpoint is None else base64.b64encode(dali.checkpoint).decode()
    whole[_PART] = asdict(dali) | {"checkpoint": coded}
    return {_ENTRY: json.dumps(whole, separators=(",", ":"))}


def dali_of(state: object, present: DALIState, what: str) -> bytes | None:
    """Return DALI's checkpoint of a saved state; None if it was saved before the first batch.

    Raises:
        DataStateError: there is none, or it is of another pipeline.
    """
    whole = parse(state.get(_ENTRY) if isinstance(state, Mapping) else None, what)
    saved = whole.get(_PART)
    if not isinstance(saved, dict):
        raise DataStateError(
            what, "the state was saved without DALI's checkpoint; load it with dali_rng=False"
        )
    pairs = [
        ("version of DALI", read_text(saved, "version", what), present.version),
        ("rank", read_number(saved, "rank", what), present.rank),
        ("number of ranks", read_number(saved, "world_size", what), present.world_size),
        ("batch size", read_number(saved, "batch_size", what), present.batch_size),
    ]
    changes = [f"the {name} was {old}, now it is {new}" for name, old, new in pairs if old != new]
    if changes:
        raise DataStateError(
            what,
            f"{'; '.join(changes)}, and DALI's checkpoint fits nothing else. With dali_rng=False "
            "the order continues, and DALI's random operators begin anew",
        )
    return _decoded(saved, what)


def _decoded(saved: dict[str, Any], what: str) -> bytes | None:
    if saved.get("checkpoint", ...) is None:
        return None
    text = read_text(saved, "checkpoint", what)
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise DataStateError(what, f"DALI's checkpoint is not base64: {error}") from error
