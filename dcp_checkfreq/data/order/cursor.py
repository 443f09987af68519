"""The position of one loader: moved as batches are handed out, saved as one entry of JSON."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dcp_checkfreq.data.order.options import LoaderOptions
from dcp_checkfreq.data.order.position import Deal, Position, Share, Step
from dcp_checkfreq.data.order.saved_position import (
    Fingerprint,
    OnMismatch,
    accept,
    encode,
    short_id,
)
from dcp_checkfreq.data.order.turns import Turns
from dcp_checkfreq.errors import DataStateError as DataStateError

_log = logging.getLogger(__name__)

_ENTRY = "state"


class Cursor:
    """Where a loader is. Not thread-safe: used by the thread that takes batches.

    The state is global, so all ranks save the same, and it loads on any number of ranks. No
    collective is needed to compare ranks: they load one checkpoint, and `Checkpointer` compares
    what they save.

    Args:
        options: of the loader.
        length: items of the data set.
        order: name and version of the order, for the fingerprint.
        what: names the loader in messages.
    """

    def __init__(self, options: LoaderOptions, length: int, order: str, what: str) -> None:
        self.place = options.place
        self.deal = Deal(length, options.per_rank, self.place.world_size, options.last)
        self.seed = options.seed
        self._fingerprint = Fingerprint(
            length=length,
            seed=options.seed,
            order=order,
            last=options.last,
            dataset=short_id(options.dataset_id),
            global_batch=self.deal.global_batch,
        )
        self._what = what
        self._on_mismatch = options.on_mismatch
        self.turns = Turns(what)
        self.position = Position()
        self.valid = 0

    def check_place(self) -> None:
        """Raise RuntimeError if the process group came up after the loader; see `DataRank`."""
        self.place.check(self._what)

    def plan(self, at: Position | None = None) -> Iterator[tuple[Step, Share]]:
        """Return the steps that are left of an epoch, with this rank's share. Moves nothing.

        Args:
            at: from here on; default: from the position at the time of this call.
        """
        return _plan(self.deal, self.place.rank, self.position if at is None else at)

    def count(self, step: Step, share: Share) -> None:
        """Count a batch as handed out: when the training loop gets it, not when it is fetched."""
        self.position = step.after
        self.valid = share.valid

    def end_epoch(self, epoch: int) -> None:
        """Move to the next epoch, if ``epoch`` is still the present one (its rest is dropped)."""
        if self.position.epoch == epoch:
            self.position = Position(epoch + 1, 0)

    def steps(self) -> int:
        """Return how many steps this epoch has, those that are done included."""
        return self.deal.steps(self.position)

    def steps_left(self) -> int:
        """Return how many steps this epoch still has."""
        return self.deal.steps_left(self.position)

    def state_dict(self) -> dict[str, str]:
        """Return one entry of JSON. It loads at any length, also from versions to come."""
        return {_ENTRY: encode(self.position, self._fingerprint)}

    def load_state_dict(
        self, state: Mapping[str, Any], *, on_mismatch: OnMismatch | None = None
    ) -> None:
        """Resume from a saved state; iterators made before become stale.

        Raises:
            DataStateError: it does not fit. The position is as it was.
        """
        accepted = accept(
            _entry(state, self._what),
            self._fingerprint,
            what=self._what,
            on_mismatch=on_mismatch or self._on_mismatch,
        )
        for text in accepted.warnings:
            _log.warning("%s", text)
        self.position = accepted.position
        self.valid = 0
        self.turns.begin()


class HasPosition:
    """A loader or sampler with a cursor. A subclass sets ``_cursor``.

    A loader counts batches that it has handed out, a sampler those that were reported as trained.
    """

    _cursor: Cursor

    @property
    def epoch(self) -> int:
        """Epoch of the next batch: with the last batch of an epoch it is already the next one."""
        return self._cursor.position.epoch

    @property
    def samples(self) -> int:
        """Samples of this epoch that count, of all ranks together."""
        return self._cursor.position.samples

    @property
    def valid(self) -> int:
        """Real samples at the front of this rank's last batch that counts; the rest are repeats."""
        return self._cursor.valid

    @property
    def steps_left(self) -> int:
        """Batches that are left of this epoch: what the next iterator hands out."""
        return self._cursor.steps_left()

    def __len__(self) -> int:
        """Return how many batches the whole epoch has, wherever in it the position is.

        Frameworks ask once, and take the answer for all epochs.
        """
        return self._cursor.steps()

    def state_dict(self) -> dict[str, str]:
        """Return the position after the last batch that counts, as JSON; the same on all ranks."""
        return self._cursor.state_dict()

    def load_state_dict(
        self, state: Mapping[str, Any], *, on_mismatch: OnMismatch | None = None
    ) -> None:
        """Resume from a saved position; iterators made before become stale.

        Args:
            state: of `state_dict`, from any number of ranks, any batch size and workers.
            on_mismatch: "error" refuses other data in the middle of an epoch, "restart_epoch"
                starts the epoch anew with a warning; default: as given at construction.

        Raises:
            DataStateError: it does not fit. The position is as it was.
        """
        self._cursor.load_state_dict(state, on_mismatch=on_mismatch)


class HandOut:
    """The iterator of a loader: hands out the rest of the epoch, counts each batch in that moment.

    Args:
        cursor: moved as batches are handed out. Iterators made before become stale.
        take: returns the next batch, that of the given share.
        on_failure: called if that raises.
    """

    def __init__(
        self, cursor: Cursor, take: Callable[[Share], Any], on_failure: Callable[[], None]
    ) -> None:
        self._cursor = cursor
        self._turn = cursor.turns.begin()
        self._plan = cursor.plan()
        self._epoch = cursor.position.epoch
        self._take = take
        self._on_failure = on_failure
        self._is_done = False

    def __iter__(self) -> HandOut:
        return self

    def __next__(self) -> Any:
        if self._is_done:
            raise StopIteration
        self._cursor.turns.check(self._turn)
        planned = next(self._plan, None)
        if planned is None:
            self._is_done = True
            self._take = _nothing  # may hold workers
            self._cursor.end_epoch(self._epoch)
            raise StopIteration
        step, share = planned
        try:
            batch = self._take(share)
        except BaseException as error:
            # The batches that follow would no longer be those that are counted.
            self._cursor.turns.begin()
            self._take = _nothing
            self._on_failure()
            if isinstance(error, StopIteration):  # would end the epoch silently
                raise RuntimeError("the data set or a transform raised StopIteration") from error
            raise
        self._cursor.count(step, share)
        return batch


def _nothing(share: Share) -> Any:
    raise AssertionError("asked for a batch after the end")


def _plan(deal: Deal, rank: int, at: Position) -> Iterator[tuple[Step, Share]]:
    epoch = at.epoch
    while at.epoch == epoch and (step := deal.step(at)) is not None:
        yield step, deal.share(step, rank)
        at = step.after


def _entry(state: object, what: str) -> object:
    if not isinstance(state, Mapping) or _ENTRY not in state:
        raise DataStateError(what, f"the saved state has no {_ENTRY!r}: {state!r:.200}")
    return state[_ENTRY]
