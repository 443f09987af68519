"""`ResumableDALILoader`: DALI pipelines that are fed in our order and resume where they stopped."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dcp_checkfreq.data.dali.checkpoint import DALIState, add_dali, dali_of
from dcp_checkfreq.data.dali.graph import check_fed, random_operators
from dcp_checkfreq.data.dali.plugin import import_plugin
from dcp_checkfreq.data.dali.source import LABEL_TYPES, DALISource, names_id
from dcp_checkfreq.data.order.cursor import Cursor, HandOut, HasPosition
from dcp_checkfreq.data.order.options import LoaderOptions
from dcp_checkfreq.data.order.permutation import SHUFFLED
from dcp_checkfreq.data.order.position import Last, Position, Share, check_count
from dcp_checkfreq.data.order.saved_position import OnMismatch
from dcp_checkfreq.errors import DataStateError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)

_WHAT = "ResumableDALILoader"
_SHOWN = 5


class ResumableDALILoader(HasPosition):
    """Loads batches through a DALI pipeline, and knows exactly which samples were trained.

    The promises are those of `ResumableLoader`: every item once per epoch, also if the job resumes
    with another number of ranks, batch size, prefetch depth or number of threads. What the pipeline
    makes of a sample out of its path and its random numbers is the same, bit for bit, where the
    operators are deterministic: those that run on a CPU are. On GPUs only the order is promised.

    ::

        @pipeline_def
        def images(source):
            path, label, u = source.inputs()
            image = fn.decoders.image(fn.io.file.read(path))
            image = fn.flip(image, horizontal=fn.cast(u[0] < 0.5, dtype=types.INT32))
            return fn.resize(image, size=(224, 224)), label

        def build(source, max_batch_size, **options):
            return images(source, batch_size=max_batch_size, num_threads=4, device_id=0, **options)

        loader = ResumableDALILoader(build, ["image", "label"], paths, labels, 32, seed=1)
        for epoch in range(loader.epoch, epochs):
            for batch in loader:  # the rest of the epoch
                train_step(batch["image"], batch["label"])

    Args:
        build: ``build(source, max_batch_size, **options)`` returns a new `Pipeline` that begins
            with ``source.inputs()`` and passes ``options`` to its constructor. It is called again
            whenever a state was loaded, because a pipeline has fetched ahead.
        output_map: a name for each output of the pipeline.
        paths: of the files, local.
        labels: a number or an array per file; None: the file's index.
        batch_size: samples per rank and step.
        global_batch: samples of all ranks in a step, instead: the same on any number of ranks that
            divides it.
        seed: of the order and of the samples' random numbers, in ``[0, 2**64)``.
        rank: data-parallel rank; default: of the default process group.
        world_size: data-parallel ranks; pass both or neither.
        last: what becomes of the last samples of an epoch; see `Deal`. With the default "partial"
            the last batch may have ``batch_size + 1`` samples.
        dali_rng: save DALI's own checkpoint with the position, for pipelines that draw from DALI's
            random operators. A state then belongs to a rank (register ``PerRank(loader)``) and
            loads only with the same rank, number of ranks, batch size and version of DALI.
        nrand: random numbers that the pipeline gets with each sample.
        dataset_id: what the data is, in your words; default: a digest of the files' names, below
            the folder that they have in common. A state is not loaded into other data.
        on_mismatch: what `load_state_dict` does by default if the data is another.

    Raises:
        ImportError: DALI is not installed.
        TypeError: ``paths`` is a single path, or ``labels`` are no numbers.
        ValueError: numbers that cannot be, or not as many labels as paths.
    """

    def __init__(
        self,
        build: Callable[..., Any],
        output_map: Sequence[str],
        paths: Sequence[str | os.PathLike[str]],
        labels: Sequence[Any] | NDArray[Any] | None,
        batch_size: int | None = None,
        *,
        global_batch: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        last: Last = "partial",
        dali_rng: bool = False,
        nrand: int = 6,
        dataset_id: str | None = None,
        on_mismatch: OnMismatch = "error",
    ) -> None:
        import_plugin(_WHAT)
        if type(nrand) is not int or nrand < 1:
            raise ValueError(f"nrand must be a whole number from 1 on, got {nrand!r}")
        self._build = build
        self._output_map = list(output_map)
        self._paths = _checked_paths(paths)
        self._labels = _checked_labels(labels, len(self._paths))
        self._nrand = nrand
        check_count("length", len(self._paths))
        options = LoaderOptions(
            batch_size=batch_size, global_batch=global_batch, seed=seed, last=last, rank=rank,
            world_size=world_size, on_mismatch=on_mismatch,
            dataset_id=names_id(self._paths) if dataset_id is None else dataset_id,
        )  # fmt: skip
        self.batch_size = options.per_rank
        self._cursor = Cursor(options, len(self._paths), SHUFFLED, _WHAT)
        self._dali_rng = dali_rng
        self._has_warned = False
        # DALI's checkpoint after the last batch handed out; None: that of a new pipeline.
        self._checkpoint: bytes | None = None
        self._feed: _Feed | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Return an iterator over the rest of the epoch; those made before become stale.

        Raises:
            ValueError: the pipeline has a reader, or an external source, with an order of its own.
        """
        self._cursor.check_place()
        if self._feed is None:
            feed = self._new_feed(self._checkpoint)
            feed.begin(self._cursor.position)
            self._feed = feed
            if feed.random and not self._dali_rng and not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "%s: %s would begin anew after a resume: make random numbers from those of "
                    "source.inputs(), or pass dali_rng=True",
                    *(_WHAT, ", ".join(feed.random[:_SHOWN])),
                )
        return HandOut(self._cursor, self._take, self._drop_feed)

    def _take(self, share: Share) -> dict[str, Any]:
        assert self._feed is not None  # only `load_state_dict` and failures drop it: stale then
        batch = self._feed.next(len(share))
        if self._dali_rng:
            self._checkpoint = self._feed.checkpoint()
        return batch

    def _drop_feed(self) -> None:
        """Begin with a new pipeline next time: this one may be a batch ahead."""
        self._feed = None

    def _new_feed(self, checkpoint: bytes | None) -> _Feed:
        deal = self._cursor.deal
        source = DALISource(self._cursor, self._paths, self._labels, nrand=self._nrand)
        options = {"enable_checkpointing": True, "checkpoint": checkpoint} if self._dali_rng else {}
        most = deal.batch_size + (deal.last == "partial")  # the samples of a tail join a batch
        return _Feed(self._build(source, most, **options), source, self._output_map)

    def state_dict(self) -> dict[str, str]:
        """Return the position after the last batch handed out, as JSON.

        The same on all ranks, except with ``dali_rng``.
        """
        state = self._cursor.state_dict()
        return add_dali(state, self._dali_state(self._checkpoint)) if self._dali_rng else state

    def _dali_state(self, checkpoint: bytes | None) -> DALIState:
        place, size = self._cursor.place, self.batch_size
        return DALIState(
            import_plugin(_WHAT).version, place.rank, place.world_size, size, checkpoint
        )

    def load_state_dict(
        self, state: Mapping[str, Any], *, on_mismatch: OnMismatch | None = None
    ) -> None:
        """Resume from a saved position; iterators made before become stale.

        Args:
            state: of `state_dict`, from any number of ranks and any batch size. With ``dali_rng``
                from the same rank of as many, with the same batch size. Without, DALI's own
                checkpoint in it is left aside.
            on_mismatch: "error" refuses other data in the middle of an epoch, "restart_epoch"
                starts the epoch anew with a warning; default: as given at construction.

        Raises:
            DataStateError: it does not fit. The loader is as it was.
        """
        checkpoint, feed = None, None
        if self._dali_rng:
            checkpoint = dali_of(state, self._dali_state(None), _WHAT)
        if checkpoint is not None:
            try:
                feed = self._new_feed(checkpoint)
            except (RuntimeError, ValueError) as error:
                raise DataStateError(
                    _WHAT, f"DALI does not take its checkpoint: {error}"
                ) from error
        self._cursor.load_state_dict(state, on_mismatch=on_mismatch)
        self._checkpoint, self._feed = checkpoint, feed
        if feed is not None:
            feed.begin(self._cursor.position)


class _Feed:
    """One pipeline with its iterator, which hands out what comes next and never ends."""

    def __init__(self, pipeline: Any, source: DALISource, output_map: list[str]) -> None:
        self._source = source
        plugin = import_plugin(_WHAT)
        with warnings.catch_warnings():
            # A pipeline need not use all inputs; what it leaves costs next to nothing.
            warnings.filterwarnings("ignore", "The external source node")
            # It must not run before `begin`.
            self._batches = plugin.DALIGenericIterator(
                [pipeline], output_map, auto_reset=False, prepare_first_batch=False
            )
        if readers := pipeline.reader_meta():
            raise ValueError(
                f"{_WHAT}: the pipeline has readers of its own ({', '.join(sorted(readers))}), "
                "which read in an order of theirs. Begin it with source.inputs() and "
                "fn.io.file.read, or use ResumableDALIReader"
            )
        check_fed(pipeline, source, what=_WHAT)
        self.random = random_operators(pipeline)

    def begin(self, at: Position) -> None:
        self._source.begin(at)

    def next(self, samples: int) -> dict[str, Any]:
        """Return the next batch, which must be of so many samples."""
        try:
            batch: dict[str, Any] = next(self._batches)[0]
        except StopIteration as error:  # would end the epoch silently
            raise RuntimeError(f"{_WHAT}: the pipeline has ended") from error
        for name, value in batch.items():
            if len(value) != samples:
                raise RuntimeError(
                    f"{_WHAT}: {name!r} has {len(value)} samples, the pipeline was given {samples}"
                )
        return batch

    def checkpoint(self) -> bytes:
        """Return DALI's state after the last batch."""
        found: bytes = self._batches.checkpoints()[0]
        return found


def _checked_paths(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise TypeError(f"paths must be a list of paths, got {paths!r}")
    return [os.fspath(path) for path in paths]


def _checked_labels(labels: Sequence[Any] | NDArray[Any] | None, length: int) -> NDArray[Any]:
    import numpy as np

    found = np.arange(length) if labels is None else np.asarray(labels)
    if found.dtype.name not in LABEL_TYPES:
        raise TypeError(f"labels must be numbers, one of {sorted(LABEL_TYPES)}; got {found.dtype}")
    if found.ndim == 0 or len(found) != length:
        raise ValueError(f"there are {length} paths, but the labels have shape {found.shape}")
    return found
