"""The options that all loaders in our order share: one value, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from dcp_checkfreq.data.order.position import Last, batch_per_rank, check_count
from dcp_checkfreq.data.order.ranks import DataRank, resolve
from dcp_checkfreq.data.order.saved_position import OnMismatch, check_on_mismatch
from dcp_checkfreq.data.random.per_sample import AugmentRng


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """The options that loaders share; their docstrings say what each is for.

    `Cursor` and `Deal` check the rest, for which the length of the data must be known.

    Attributes:
        per_rank: samples per rank and step, whichever of the two was given.
        place: this rank, from the default process group if none was given.

    Raises:
        ValueError: numbers that cannot be, or names that are none.
    """

    batch_size: int | None
    global_batch: int | None
    seed: int
    shuffle: bool = True
    last: Last
    rank: int | None
    world_size: int | None
    dataset_id: str
    on_mismatch: OnMismatch
    num_workers: int = 0
    batches_ahead: int = 0
    augment_rng: AugmentRng = "none"
    place: DataRank = field(init=False)
    per_rank: int = field(init=False)

    def __post_init__(self) -> None:
        place = resolve(self.rank, self.world_size)
        check_count("world_size", place.world_size)
        per_rank = batch_per_rank(self.batch_size, self.global_batch, place.world_size)
        check_on_mismatch(self.on_mismatch)
        if not 0 <= place.rank < place.world_size:
            raise ValueError(f"rank must be in [0, {place.world_size}), got {place.rank}")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be a whole number in [0, 2**64), got {self.seed!r}")
        if self.batches_ahead < 0:
            raise ValueError(f"batches_ahead must not be negative, got {self.batches_ahead}")
        if self.augment_rng not in get_args(AugmentRng):
            raise ValueError(
                f"augment_rng must be one of {get_args(AugmentRng)}, got {self.augment_rng!r}"
            )
        object.__setattr__(self, "place", place)
        object.__setattr__(self, "per_rank", per_rank)
