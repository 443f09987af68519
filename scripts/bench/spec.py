"""What one group of worker processes is asked to do; travels as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

Samples = dict[str, dict[str, list[float]]]  # arm -> metric -> one value per repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One job for ``ranks`` worker processes. Every path in it is absolute."""

    job: str  # a key of worker.JOBS
    state: str  # "gpt" or "many"
    scale: str  # "full" or "small"
    folder: str  # where the checkpoints go; the caller makes it and removes it
    ranks: int
    repeats: int
    arms: tuple[str, ...]
    seed: int = 0  # of the order of the arms
    cold: bool = False  # drop the page cache before each measured call
    workers: int = 0  # that load data

    def dump(self, path: Path) -> None:
        """Write this spec to ``path``."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> Spec:
        """Read what `dump` wrote."""
        fields = json.loads(path.read_text())
        return Spec(**{**fields, "arms": tuple(fields["arms"])})
