"""`ResumableIterator`: any loader that can be iterated anew for each epoch, made to go on."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

from dcp_checkfreq.data import global_rng
from dcp_checkfreq.data.order import WORKER_STREAM, derive
from dcp_checkfreq.data.position import FORMAT, OnMismatch, parse, read_number, read_text, short_id
from dcp_checkfreq.data.ranks import resolve
from dcp_checkfreq.errors import DataStateError

_log = logging.getLogger(__name__)

Mode = Literal["replay", "epoch", "own"]
_WHAT = "ResumableIterator"


class ResumableIterator:
    """Makes any re-iterable loader go on in the epoch in which it stopped.

    For what has no index to begin at: `IterableDataset`s, chains of generators, other libraries'
    loaders. Map-style data is better off with `ResumableLoader`, which needs no replay and may
    change ranks within an epoch.

    Around each batch the process's random states are those of the data, which begin each epoch as
    a function of (seed, epoch); the training's own are put back. So a shuffle that draws from them
    is the same when it is replayed, and dropout does not depend on the data.

    Before each epoch ``set_epoch(epoch)`` is called on the loader, its samplers and its data set,
    where they have it.

    Args:
        loader: to iterate, once per epoch; must give the same batches for the same epoch.
        mode: what happens in the middle of an epoch:

            - "replay": the batches that were trained are fetched again and thrown away.
            - "epoch": the epoch starts anew, which trains its first batches twice; told in a
              warning. Nothing is lost or repeated if saves are made between epochs.
            - "own": the loader, or its data set if it has no workers, keeps a position of its own
              (``state_dict``, ``load_state_dict``), which is carried along. It belongs to a rank:
              register ``PerRank(iterator)``, and go on with as many ranks. The random states
              around the batches are then new ones after a restart.
        seed: of the random states around the batches. All ranks get the same; add the rank if
            they should not.
        rank: data-parallel rank; default: of the default process group.
        world_size: data-parallel ranks; tell both or neither.
        dataset_id: what the data is, in your words; a state is not loaded into other data.
        on_mismatch: what `load_state_dict` does by default if the data is another.

    Raises:
        TypeError: ``loader`` is an iterator, or mode is "own" and nothing in it keeps a position.
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
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, got {mode!r}")
        if on_mismatch not in get_args(OnMismatch):
            raise ValueError(
                f"on_mismatch must be one of {get_args(OnMismatch)}, got {on_mismatch!r}"
            )
        if isinstance(loader, Iterator):
            raise TypeError(
                f"{type(loader).__name__} can be iterated only once: pass what iter() is called on"
            )
        self.loader = loader
        self.epoch = 0
        self.batches = 0  # of this epoch, handed out to this rank
        self._mode = mode
        self._seed = seed
        self._dataset = short_id(dataset_id)
        self._on_mismatch = on_mismatch
        self._place = resolve(rank, world_size)
        self._keeper: Any = _keeper_of(loader) if mode == "own" else None
        self._own_state: Any = None  # to be given to the keeper when the next iterator is made
        self._generation = 0

    def __len__(self) -> int:
        """Return how many batches are left of this epoch, if the loader knows its length."""
        return max(0, len(self.loader) - self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the rest of the epoch; those made before become stale.

        Raises:
            DataStateError: the replayed epoch has fewer batches than were trained.
        """
        self._place.check(_WHAT)
        self._generation += 1
        return self._run(self._generation)

    def _run(self, generation: int) -> Iterator[Any]:
        self._check(generation)
        epoch, skip = self.epoch, self.batches
        key = derive(WORKER_STREAM, self._seed, epoch)
        own = self._own()
        if own is not None:  # nothing is replayed, so its random numbers are not drawn again
            key, skip = derive(WORKER_STREAM, self._seed, epoch, self.batches), 0
        training = global_rng.save()
        global_rng.seed_all(key)
        try:
            _tell_epoch(self.loader, epoch)
            if own is not None:
                self._keeper.load_state_dict(own)
                self._own_state = None
            batches = iter(self.loader)
            for done in range(skip):
                if next(batches, _END) is _END:
                    raise DataStateError(
                        _WHAT, f"epoch {epoch} has {done} batches, {skip} were trained"
                    )
            data = global_rng.save()
        finally:
            global_rng.bring_back(training)
        while True:
            self._check(generation)
            training = global_rng.save()
            global_rng.bring_back(data)
            try:
                batch = next(batches, _END)
                data = global_rng.save()
            finally:
                global_rng.bring_back(training)
            if batch is _END:
                self.epoch, self.batches = epoch + 1, 0
                return
            self.batches += 1
            yield batch

    def _check(self, generation: int) -> None:
        if generation != self._generation:
            raise RuntimeError(
                f"{_WHAT}: this iterator is stale: since it was made a state was loaded, or a "
                "newer iterator was made. Take a new one"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out.

        ``state`` is JSON, under 200 bytes and the same on all ranks that take as many batches;
        with mode "own" there is ``own`` beside it, the loader's own state.
        """
        state = {
            "format": FORMAT,
            "epoch": self.epoch,
            "batches": self.batches,
            "seed": self._seed,
            "world_size": self._place.world_size,
            "dataset": self._dataset,
        }
        text = json.dumps(state, separators=(",", ":"))
        own = self._own()
        return {"state": text} if own is None else {"state": text, "own": own}

    def _own(self) -> Any:
        """Return the loader's own state in the middle of an epoch; None at its begin."""
        if self._keeper is None or self.batches == 0:
            return None
        return self._keeper.state_dict() if self._own_state is None else self._own_state

    def load_state_dict(
        self, state: Mapping[str, Any], *, on_mismatch: OnMismatch | None = None
    ) -> None:
        """Go on from a saved position; iterators made before become stale.

        Raises:
            DataStateError: the state is no state, or, in the middle of an epoch, of other data or
                another number of ranks. The iterator is as it was.
        """
        chosen = on_mismatch or self._on_mismatch
        if chosen not in get_args(OnMismatch):
            raise ValueError(f"on_mismatch must be one of {get_args(OnMismatch)}, got {chosen!r}")
        given: object = state
        if not isinstance(given, Mapping):
            raise DataStateError(_WHAT, f"the saved state is not one of a data loader: {given!r}")
        saved = parse(given.get("state"), _WHAT)
        epoch, batches = read_number(saved, "epoch", _WHAT), read_number(saved, "batches", _WHAT)
        if batches and self._mode == "epoch":
            _log.warning(
                "%s: epoch %d starts anew; %d batches of it were trained before",
                *(_WHAT, epoch, batches),
            )
            batches = 0
        changes = self._changes(saved, needs_own=batches > 0 and "own" not in given)
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
        self._own_state = given.get("own") if batches else None
        self._generation += 1

    def _changes(self, saved: dict[str, Any], *, needs_own: bool) -> str:
        pairs = [
            ("seed", read_number(saved, "seed", _WHAT), self._seed),
            ("number of ranks", read_number(saved, "world_size", _WHAT), self._place.world_size),
            ("dataset_id", read_text(saved, "dataset", _WHAT), self._dataset),
        ]
        changes = [f"the {name} was {old!r}, now it is {new!r}" for name, old, new in pairs
                   if old != new]  # fmt: skip
        if self._mode == "own" and needs_own:
            changes.append("the state was saved without the loader's own")
        return "; ".join(changes)


_END = object()


def _keeper_of(loader: Any) -> Any:
    """Return what keeps a position of its own: the loader, or its data set in this process."""
    if _keeps_position(loader):
        return loader
    dataset = getattr(loader, "dataset", None)
    if not _keeps_position(dataset):
        raise TypeError(
            f"neither {type(loader).__name__} nor its data set has state_dict and load_state_dict: "
            "use mode='replay'"
        )
    if getattr(loader, "num_workers", 0):
        raise TypeError(
            f"{type(dataset).__name__} keeps its position in {loader.num_workers} workers, out of "
            "reach: use num_workers=0, a loader that keeps it (torchdata's StatefulDataLoader), or "
            "mode='replay'"
        )
    return dataset


def _keeps_position(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _tell_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` on each part that has it, once."""
    sampler, batch_sampler = (
        getattr(loader, "sampler", None),
        getattr(loader, "batch_sampler", None),
    )
    parts = [loader, sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
    told: list[object] = []
    for part in [*parts, getattr(loader, "dataset", None)]:
        set_epoch: Callable[[int], object] | None = getattr(part, "set_epoch", None)
        if set_epoch is not None and not any(part is other for other in told):
            set_epoch(epoch)
            told.append(part)
