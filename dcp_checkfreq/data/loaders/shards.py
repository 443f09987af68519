"""`ResumableStreamLoader`: samples of shard files, exactly once, from any point of an epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import IO, Any

from torch.utils.data import default_collate

from dcp_checkfreq.data.loaders.base import Keys
from dcp_checkfreq.data.loaders.read_ahead import Counts, Maker, PieceReader, Raw, ReadingLoader
from dcp_checkfreq.data.order.interleave import LaneOrder, LaneRule, Run
from dcp_checkfreq.data.order.options import LoaderOptions
from dcp_checkfreq.data.order.position import Last, Share
from dcp_checkfreq.data.order.saved_position import OnMismatch
from dcp_checkfreq.data.random.per_sample import AugmentRng, SampleSeeds
from dcp_checkfreq.data.sources.shard_source import Shard, ShardSource
from dcp_checkfreq.errors import DataStateError


@dataclass(frozen=True, slots=True)
class OpenShard:
    """A shard of which some samples were handed out, over all ranks, and some were not."""

    path: str
    samples: int
    handed_out: int


class ResumableStreamLoader(ReadingLoader):
    """Batches of samples from shard files; knows exactly which were trained.

    Every sample comes exactly once per epoch, also if the job is cut at any batch and resumes with
    another number of ranks or workers or another batch size. To resume, nothing is replayed: shards
    that are done are not opened, and in those that are open the reader goes to its place. Register
    it with `Checkpointer`, or save `state_dict()` after the optimizer's step and before the next
    batch is taken.

    ::

        source = ShardSource("s3://bucket/train-*.tar", TarReader(), index="s3://bucket/index.json")
        loader = ResumableStreamLoader(source, 64, transform=decode, num_workers=4, seed=1)

    Args:
        source: what to read.
        batch_size: samples per rank and step.
        global_batch: samples of all ranks in a step, instead: the same on any number of ranks that
            divides it.
        seed: of the order and of the samples' random numbers, in ``[0, 2**64)``.
        shuffle: False keeps the order of shards and samples; then every rank reads all shards.
        last: what becomes of the last samples of an epoch; see `Deal`.
        rank: data-parallel rank; default: of the default process group.
        world_size: data-parallel ranks; pass both or neither.
        transform: of what the reader makes of a sample. Its random numbers are a function of
            (seed, epoch, number of the sample).
        collate_fn: samples to batch; default: `default_collate`.
        num_workers: processes that decode, transform and collate. Files are read in the training
            process, once.
        batches_ahead: read before they are asked for, besides what workers hold.
        augment_rng: what is seeded before ``transform`` and ``collate_fn``; see `ResumableLoader`.
        dataset_id: what the data is, in your words, besides `ShardSource.fingerprint`.
        on_mismatch: what `load_state_dict` does by default if the data is another.
        dataloader_kwargs: pin_memory, prefetch_factor, timeout, worker_init_fn,
            multiprocessing_context: go to `DataLoader`.

    Raises:
        TypeError: another option of `DataLoader`.
        ValueError: numbers that cannot be.
    """

    def __init__(
        self,
        source: ShardSource,
        batch_size: int | None = None,
        *,
        global_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        last: Last = "partial",
        rank: int | None = None,
        world_size: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        batches_ahead: int = 4,
        augment_rng: AugmentRng = "global",
        dataset_id: str = "",
        on_mismatch: OnMismatch = "error",
        **dataloader_kwargs: Any,
    ) -> None:
        self.source = source
        options = LoaderOptions(
            batch_size=batch_size, global_batch=global_batch, seed=seed, shuffle=shuffle, last=last,
            rank=rank, world_size=world_size, num_workers=num_workers, batches_ahead=batches_ahead,
            augment_rng=augment_rng, dataset_id=f"{source.fingerprint}/{dataset_id}",
            on_mismatch=on_mismatch,
        )  # fmt: skip
        is_ours = transform is None and collate_fn is None  # nothing that could draw numbers
        maker = Maker(
            partial(map, source.reader.decode),
            transform,
            collate_fn or default_collate,
            SampleSeeds(seed, "none" if is_ours else augment_rng),
        )
        rule = LaneRule(source.sizes, source.lanes, source.window, seed, shuffle)
        super().__init__(options, rule, maker, partial(_Shards, source), dataloader_kwargs)

    def completed_shards(self) -> list[str]:
        """Return the shards whose samples were all handed out in this epoch, over all ranks."""
        return [shard.path for shard, done in self._shards() if done == shard.layout.samples]

    def open_shards(self) -> list[OpenShard]:
        """Return the shards of which this epoch has handed out some samples, but not all."""
        return [
            OpenShard(shard.path, shard.layout.samples, done)
            for shard, done in self._shards()
            if 0 < done < shard.layout.samples
        ]

    def _shards(self) -> Iterator[tuple[Shard, int]]:
        return zip(self.source.shards, self._handed_out(), strict=True)


class _Shards(PieceReader):
    """Reads batches: one shard is open per lane that this rank meets."""

    def __init__(self, source: ShardSource, rule: LaneRule, counts: Counts) -> None:
        super().__init__(rule, counts, "checkfreq-shards")
        self._source = source
        self._lanes: dict[int, _Lane] = {}

    def close(self) -> None:
        super().close()
        for lane in self._lanes.values():
            lane.close()

    def read(self, share: Share) -> Raw:
        keys: Keys = []
        samples: list[Any] = []
        for epoch, positions in share.runs:
            order = self._orders.of(epoch)
            numbers, found = [0] * len(positions), [None] * len(positions)
            by_lane: dict[int, list[Run]] = {}
            for run in order.runs(positions):
                by_lane.setdefault(run.lane, []).append(run)
            for number in by_lane.keys() - self._lanes.keys():
                self._lanes[number] = _Lane(self._source, self._counts)
            self._enter(epoch, order, by_lane)
            for number, runs in by_lane.items():
                lane = self._lanes[number]
                for run in runs:
                    for place, slot in zip(run.places, run.slots, strict=True):
                        item, found[slot] = lane.take(epoch, order, run.piece, place)
                        numbers[slot] = self._first_items[run.piece] + item
            keys.append((epoch, numbers))
            samples += found
        self._counts.add(used=len(samples))
        return Raw(keys, samples)

    def _enter(self, epoch: int, order: LaneOrder, by_lane: dict[int, list[Run]]) -> None:
        """Read the window that each lane needs first, several at once: at a start all do."""
        first = [(self._lanes[number], runs[0]) for number, runs in by_lane.items()]
        needed = [
            (lane, run.piece, run.places[0])
            for lane, run in first
            if not lane.is_in(epoch, order, run.piece, run.places[0])
        ]
        # `map` keeps no future: its error would hold the frames that hold it, workers and all.
        deque(self._pool.map(lambda call: call[0].enter(epoch, order, *call[1:]), needed), maxlen=0)


class _Lane:
    """Where one lane is: a shard, open, and a window of its samples."""

    def __init__(self, source: ShardSource, counts: Counts) -> None:
        self._source = source
        self._counts = counts
        self._file: IO[bytes] | None = None
        self._samples: Iterator[Any] = iter(())
        self._next = 0  # number of the sample that comes next
        self._shard: tuple[int, int] | None = None  # (epoch, shard) that is open
        self._window = range(0)
        self._order: list[int] = []
        self._held: list[Any] = []

    def close(self) -> None:
        if self._file is not None:
            self._samples = iter(())
            self._file.close()
            self._file = None

    def is_in(self, epoch: int, order: LaneOrder, shard: int, place: int) -> bool:
        """Tell whether the window of this place has been read."""
        return (epoch, shard) == self._shard and order.window(shard, place) == self._window

    def take(self, epoch: int, order: LaneOrder, shard: int, place: int) -> tuple[int, Any]:
        """Return the number in the shard, and the sample, that comes at a place."""
        if not self.is_in(epoch, order, shard, place):
            self.enter(epoch, order, shard, place)
        item = self._order[place - self._window.start]
        return self._window.start + item, self._held[item]

    def enter(self, epoch: int, order: LaneOrder, shard: int, place: int) -> None:
        """Read the window of a place."""
        window = order.window(shard, place)
        if (epoch, shard) != self._shard or window.start < self._next or self._file is None:
            self._open(epoch, shard, window.start)
        elif window.start > self._next:  # a few samples of other ranks
            deque(islice(self._samples, window.start - self._next), maxlen=0)
        path, layout = self._source.shards[shard].path, self._source.shards[shard].layout
        held = list(islice(self._samples, len(window)))
        self._counts.add(items=len(held))
        self._next = window.start + len(held)
        if len(held) < len(window):
            raise _miscounted(path, layout.samples, f"only {self._next}")
        if self._next == layout.samples:
            if next(self._samples, _END) is not _END:
                raise _miscounted(path, layout.samples, "more")
            self.close()
        self._window, self._held = window, held
        self._order = order.within(shard, window).at(range(len(window)))

    def _open(self, epoch: int, shard: int, start: int) -> None:
        self.close()
        self._shard, self._window = None, range(0)
        path, layout = self._source.shards[shard].path, self._source.shards[shard].layout
        self._file = self._source.open(path)
        self._samples = iter(self._source.reader.read(self._file, start, layout.marks))
        self._shard, self._next = (epoch, shard), start
        self._counts.add(pieces=1)


_END = object()


def _miscounted(path: str, counted: int, found: str) -> DataStateError:
    return DataStateError(
        "ShardSource",
        f"{path} was said to have {counted} samples, now it has {found}. Scan it again (remove it "
        "from the index), and start the epoch anew",
    )
