"""`ResumableIterator`: makes any loader resume that can be iterated again for each epoch."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

from dcp_checkfreq.data.order.permutation import WORKER_STREAM, derive
from dcp_checkfreq.data.order.ranks import resolve
from dcp_checkfreq.data.order.saved_position import (
    FORMAT,
    OnMismatch,
    changed,
    check_on_mismatch,
    short_id,
)
from dcp_checkfreq.data.order.turns import Turns
from dcp_checkfreq.data.random import global_state
from dcp_checkfreq.data.wrap.handed_out import END, HandedOut
from dcp_checkfreq.data.wrap.made import differences, has_stream, made_by, made_here
from dcp_checkfreq.data.wrap.order_sources import Sources
from dcp_checkfreq.data.wrap.saved import Saved
from dcp_checkfreq.data.wrap.suited import check_replayable, keeper_of
from dcp_checkfreq.data.wrap.trail import Trail
from dcp_checkfreq.errors import DataStateError
from dcp_checkfreq.format.torch_private import keep_queues

_log = logging.getLogger(__name__)

Mode = Literal["replay", "epoch", "own"]
_WHAT = "ResumableIterator"


class ResumableIterator:
    """Makes any re-iterable loader resume in the epoch in which it stopped.

    For what has no index to begin at: `IterableDataset`s, chains of generators, other libraries'
    loaders. Map-style data is better off with `ResumableLoader`, which needs no replay and may
    change ranks within an epoch.

    Around each batch the process's random states are those of the data, which begin each epoch as
    a function of (seed, epoch); the training's own are put back. So a shuffle that draws from them
    is the same when it is replayed, and dropout does not depend on the data. Generators that the
    loader, its samplers or its data set hold begin each epoch as a function of (seed, epoch, what
    they were seeded with). Where there is a ``set_epoch(epoch)`` it is called. Persistent workers
    end with the epoch.

    What makes the batches (batch size, sampler, length, ...) is saved along, and digests of the
    batches that were handed out: a loader that would not continue with what is left is a
    `DataStateError`, when the state is loaded or at the first batch.

    Args:
        loader: to iterate, once per epoch; must give the same batches for the same epoch.
        mode: what happens in the middle of an epoch:

            - "replay": the batches that were trained are fetched again and thrown away.
            - "epoch": the epoch starts anew, which trains its first batches twice; a warning
              says so. Nothing is lost or repeated if saves are made between epochs.
            - "own": the loader, or its data set if it has no workers, keeps a position of its own
              (``state_dict``, ``load_state_dict``), which is carried along. It belongs to a rank:
              resume with as many ranks. The random states around the batches are then new ones
              after a restart.
        seed: of the random states around the batches. All ranks get the same; add the rank if
            they should not.
        rank: data-parallel rank; default: of the default process group.
        world_size: data-parallel ranks; pass both or neither.
        dataset_id: what the data is, in your words; a state is not loaded into other data.
        on_mismatch: what `load_state_dict` does by default if the data is another.
        compare: what of a batch is compared when it is replayed: True all of it (large tensors are
            sampled, those on devices are not looked into), a function what it returns for a batch
            (its ids, say), False nothing.

    Raises:
        TypeError: ``loader`` or its sampler is an iterator, it knows its position itself, or mode
            is "own" and nothing in it keeps a position.
        ValueError: its workers hand out batches in any order.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        mode: Mode = "replay",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        dataset_id: str = "",
        on_mismatch: OnMismatch = "error",
        compare: bool | Callable[[Any], object] = True,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, got {mode!r}")
        check_on_mismatch(on_mismatch)
        self._keeper: Any = keeper_of(loader) if mode == "own" else None
        self._sources = Sources(loader)
        if mode != "own":
            check_replayable(loader, self._sources)
        self.loader = loader
        self.epoch = 0
        self.batches = 0  # of this epoch, handed out to this rank
        self._mode = mode
        self._seed = seed
        self._dataset = short_id(dataset_id)
        self._on_mismatch = on_mismatch
        self._place = resolve(rank, world_size)
        self._is_per_rank = self._place.world_size == 1
        self._own_state: Any = None  # to be given to the keeper when the next iterator is made
        self._turns = Turns(_WHAT)
        self._roots: dict[str, int] = {}  # of a saved state: they count instead of those found
        self._handed_out = HandedOut(compare if mode == "replay" else False, _WHAT)
        self._as_before = False  # an epoch that an earlier version began continues as it did

    def belong_to_rank(self) -> None:
        """Keep what only holds for this rank in the state, too. `PerRank` calls it.

        With one rank it is always so.
        """
        self._is_per_rank = True

    def __len__(self) -> int:
        """Return how many batches the whole epoch has, if the loader knows its length."""
        return len(self.loader)  # type: ignore[arg-type]

    @property
    def steps_left(self) -> int:
        """Batches that are left of this epoch, if the loader knows its length."""
        return max(0, len(self) - self.batches)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch; those made before become stale.

        Raises:
            DataStateError: when asked for its first batch: the replayed epoch is not the one that
                was trained, or has fewer batches.
        """
        self._place.check(_WHAT)
        return self._run(self._turns.begin())

    def _run(self, turn: int) -> Iterator[Any]:
        self._turns.check(turn)
        epoch, skip = self.epoch, self.batches
        key = derive(WORKER_STREAM, self._seed, epoch)
        own = self._own()
        if own is not None:  # nothing is replayed, so its random numbers are not drawn again
            key, skip = derive(WORKER_STREAM, self._seed, epoch, self.batches), 0
        training = global_state.save()
        global_state.seed_all(key)
        try:
            self._sources.begin(epoch, key, self._roots, as_before=self._as_before)
            if own is not None:
                self._keeper.load_state_dict(own)
                self._own_state = None
            elif self._keeper is None:
                self._sources.end_workers()
            batches = iter(self.loader)
            keep_queues(batches)
            trail = self._handed_out.replay(batches, epoch, skip)
            data = global_state.save()
        finally:
            global_state.bring_back(training)
        self._turns.check(turn)
        self._handed_out.resume(trail)
        while True:
            self._turns.check(turn)
            training = global_state.save()
            global_state.bring_back(data)
            try:
                batch = next(batches, END)
                data = global_state.save()
            finally:
                global_state.bring_back(training)
            if batch is END:
                self.epoch, self.batches, self._as_before = epoch + 1, 0, False
                self._handed_out.resume(Trail())
                return
            self._handed_out.add(batch)
            self.batches += 1
            yield batch

    @property
    def asks_others(self) -> bool:
        """Whether `state_dict` asks the loader inside for its own: that may be dear."""
        return self._keeper is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out.

        ``state`` is JSON, under 1 kB. With one rank, or in `PerRank`, it also holds what only one
        rank knows: lengths, what its generators were seeded with, and digests of the batches.
        Without, it is the same on all ranks that take as many batches; `split_state_dict` has the
        rest. With mode "own" there is also ``own``, the loader's own state.
        """
        state = self._of_all()
        if self._is_per_rank:
            state |= self._of_rank()
        own = self._own()
        return {"state": _json(state)} | ({} if own is None else {"own": own})

    def split_state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what all ranks have in common, and what only this one knows.

        A `Checkpointer` keeps the second for each rank. `load_state_dict` takes both in one dict;
        what another rank saved is not compared. With one rank, or in `PerRank`, the first has all.
        """
        if self._is_per_rank:
            return self.state_dict(), {}
        own = self._own()
        of_rank = {
            "of_rank": _json({"format": FORMAT, "rank": self._place.rank, **self._of_rank()})
        }
        return {"state": _json(self._of_all())}, of_rank | ({} if own is None else {"own": own})

    def _of_all(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "format": FORMAT,
            "epoch": self.epoch,
            "batches": self.batches,
            "seed": self._seed,
            "world_size": self._place.world_size,
            "dataset": self._dataset,
            "made": made_by(self.loader, self._sources.loaders),
        }
        if self._as_before:
            state["as_before"] = True
        return state

    def _of_rank(self) -> dict[str, Any]:
        """Return what only this rank knows."""
        state: dict[str, Any] = {
            "here": made_here(self.loader),
            "roots": {**self._sources.roots(), **self._roots},
        }
        if self.batches and (trail := self._handed_out.text()) is not None:
            state["trail"] = trail
        return state

    def _own(self) -> Any:
        """Return the loader's own state in the middle of an epoch; None at its begin."""
        if self._keeper is None or self.batches == 0:
            return None
        return self._keeper.state_dict() if self._own_state is None else self._own_state

    def load_state_dict(
        self, state: Mapping[str, Any], *, on_mismatch: OnMismatch | None = None
    ) -> None:
        """Resume from a saved position; iterators made before become stale.

        Raises:
            DataStateError: the state is no state, or, in the middle of an epoch, of other data or
                another number of ranks. The iterator is as it was.
        """
        chosen = on_mismatch or self._on_mismatch
        check_on_mismatch(chosen)
        given: object = state
        if not isinstance(given, Mapping):
            raise DataStateError(_WHAT, f"the saved state is not one of a data loader: {given!r}")
        saved = Saved.of(given.get("state"), given.get("of_rank"), self._place)
        own = given.get("own") if saved.has_rank or "of_rank" not in given else None
        if not saved.has_rank and self._place.rank == 0:
            _log.info(
                "%s: of what each of %d ranks had for itself (digests of its batches, lengths, "
                "seeds) nothing fits %d ranks now, or it was not saved: only what all have in "
                "common is compared",
                *(_WHAT, saved.world_size, self._place.world_size),
            )
        epoch, batches = saved.epoch, saved.batches
        if batches and self._mode == "epoch":
            _log.warning(
                "%s: epoch %d starts anew; %d batches of it were trained before",
                *(_WHAT, epoch, batches),
            )
            batches = 0
        changes = self._changes(saved, needs_own=batches > 0 and own is None)
        if changes and batches and chosen == "error":
            raise DataStateError(
                _WHAT,
                f"{changes}, and {batches} batches of epoch {epoch} were trained. Bring back what "
                "was, or load with on_mismatch='restart_epoch'",
            )
        if changes:
            _log.warning("%s: %s; epoch %d starts at its first batch", _WHAT, changes, epoch)
            batches = 0
        self.epoch, self.batches = epoch, batches
        self._own_state = own if batches else None
        self._roots = self._sources.taken_over(saved.roots or {})
        self._as_before = saved.as_before and batches > 0
        if batches:
            hint = saved.workers_hint(made_by(self.loader, self._sources.loaders))
            self._handed_out.load(saved.trail, hint)
        else:
            self._handed_out.resume(Trail())
        self._turns.begin()

    def _changes(self, saved: Saved, *, needs_own: bool) -> str:
        pairs: list[tuple[str, object, object]] = [
            ("seed", saved.seed, self._seed),
            ("number of ranks", saved.world_size, self._place.world_size),
            ("dataset_id", saved.dataset, self._dataset),
        ]
        present = {**made_by(self.loader, self._sources.loaders), **made_here(self.loader)}
        size = present.get("batch_size")
        if saved.samples_per_step() is not None and type(size) is int:
            now = size * self._place.world_size
            pairs.append(("number of samples per step", saved.samples_per_step(), now))
        changes = changed(pairs)
        # A data set that keeps its position itself continues behind any batches.
        if self._mode != "own" or self._keeper is self.loader:
            changes += differences(saved.made, present, workers_count=has_stream(self.loader))
            changes += [] if saved.roots is None else self._sources.changes(saved.roots)
        alone = self._sources.left_alone_before()
        if self._mode == "replay" and saved.as_before and saved.epoch and saved.batches and alone:
            changes.append(
                f"the state is of an earlier version, which let {', '.join(alone)} continue from "
                f"epoch to epoch, so that epoch {saved.epoch} cannot be had again"
            )
        if self._mode == "own" and needs_own:
            changes.append("the state was saved without the loader's own")
        return "; ".join(changes)


def _json(state: dict[str, Any]) -> str:
    return json.dumps(state, separators=(",", ":"))
