"""What frameworks ask a loader: how long is an epoch, how much of it is left, in how many samples.

One table for all loaders that count samples.
"""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loader_tools import Ids, as_lists
from torch.utils.data import DataLoader

from dcp_checkfreq.data import (
    DataStateError,
    JsonLinesReader,
    ParquetSource,
    ResumableBatchSampler,
    ResumableLoader,
    ResumableParquetLoader,
    ResumableStreamLoader,
    ShardSource,
)

ITEMS = 48


@pytest.fixture(params=["map", "workers", "sampler", "parquet", "stream"])
def make(request, tmp_path):
    """A function of (batch_size, options) to a loader of 48 ids."""
    if request.param == "parquet":
        pq.write_table(pa.table({"id": list(range(ITEMS))}), tmp_path / "0.parquet")
    if request.param == "stream":
        lines = "".join(json.dumps(i) + "\n" for i in range(ITEMS))
        (tmp_path / "0.jsonl").write_text(lines)

    def made(*batch, **options):
        if request.param == "sampler":
            return ResumableBatchSampler(ITEMS, *batch, **options)
        if request.param == "parquet":
            source = ParquetSource(tmp_path, lanes=1)
            return ResumableParquetLoader(source, *batch, collate_fn=ids_of, **options)
        if request.param == "stream":
            source = ShardSource(f"{tmp_path}/*.jsonl", JsonLinesReader(), lanes=1)
            return ResumableStreamLoader(source, *batch, collate_fn=as_lists, **options)
        workers = {"num_workers": 1} if request.param == "workers" else {}
        return ResumableLoader(Ids(ITEMS), *batch, collate_fn=as_lists, **workers, **options)

    return made


def ids_of(table):
    return table["id"].to_pylist()


class Trained:
    """Batches of a loader, as a training loop takes them; reports them to a sampler."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for batch in self.loader:
            if isinstance(self.loader, ResumableBatchSampler):
                self.loader.advance()
            yield batch


def lightning_like(loader, epochs, stop_after=None):
    """Ask for the length once, as Lightning does, and never take more batches than that."""
    limit, seen = len(loader), []
    for epoch in range(loader.epoch, epochs):
        for number, batch in enumerate(Trained(loader)):
            seen.append((epoch, batch))
            if len(seen) == stop_after:
                return seen
            if number + 1 == limit:
                break
    return seen


def test_after_a_resume_in_mid_epoch_the_later_epochs_are_whole(make):
    whole = lightning_like(make(4, seed=1), 3)
    assert len(whole) == 3 * 12
    first = make(4, seed=1)
    found = lightning_like(first, 3, stop_after=17)
    second = make(4, seed=1)
    second.load_state_dict(first.state_dict())
    assert (len(second), second.steps_left) == (12, 7)
    assert found + lightning_like(second, 3) == whole


def test_a_bar_that_begins_where_the_epoch_stands_ends_full(make):
    loader = make(4)
    for _, _ in zip(range(5), Trained(loader), strict=False):
        pass
    at, total = len(loader) - loader.steps_left, len(loader)  # tqdm(initial=at, total=total)
    assert (at, total) == (5, 12)
    assert at + sum(1 for _ in Trained(loader)) == total


@pytest.mark.slow
def test_a_global_batch_is_the_same_on_any_number_of_ranks(make, caplog):
    state, found, sizes = make(global_batch=12).state_dict(), [], set()
    for world in (1, 3, 2, 4):
        loaders = [make(global_batch=12, rank=r, world_size=world) for r in range(world)]
        for loader in loaders:
            loader.load_state_dict(state)
            assert len(loader) == 4
        step = [next(iter(Trained(loader))) for loader in loaders]
        found += [item for batch in step for item in batch]
        sizes.add(sum(map(len, step)))
        state = loaders[0].state_dict()
    assert sizes == {12}
    assert sorted(found) == list(range(ITEMS))
    assert "a step took" not in caplog.text


def test_a_batch_per_rank_that_was_kept_on_other_ranks_is_a_warning_with_both_figures(make, caplog):
    make(4, rank=0, world_size=1).load_state_dict(make(4, rank=0, world_size=3).state_dict())
    (record,) = [r for r in caplog.records if "a step took" in r.message]
    assert record.levelname == "WARNING"
    assert "12 samples, now it takes 4, and an epoch had 4 steps, now 12" in record.message


@pytest.mark.parametrize("told", [((), {}), ((4,), {"global_batch": 8}), ((), {"global_batch": 9})])
def test_what_cannot_be_shared_is_refused_when_made(make, told):
    batch, options = told
    with pytest.raises(ValueError, match="global_batch"):
        make(*batch, rank=0, world_size=2, **options)


def test_an_accelerate_like_skip_finds_its_batches_and_the_next_epoch_whole():
    """`skip_first_batches` wraps the batch sampler: for one of ours it takes its length."""

    class Skip:
        def __init__(self, sampler, skip):
            self.sampler, self.skip = sampler, skip

        def __iter__(self):
            return (batch for number, batch in enumerate(self.sampler) if number >= self.skip)

        def __len__(self):
            return len(self.sampler) - self.skip

    sampler = ResumableBatchSampler(ITEMS, 4, seed=1)
    wanted = list(sampler)
    again = ResumableBatchSampler(ITEMS, 4, seed=1)
    loader = DataLoader(Ids(ITEMS), batch_sampler=Skip(again, 3), collate_fn=as_lists)
    assert list(loader) == wanted[3:]
    assert len(loader) == 9


def test_a_data_set_of_another_length_in_mid_epoch_is_refused_with_both():
    loader = ResumableLoader(Ids(ITEMS), 4)
    next(iter(loader))
    with pytest.raises(DataStateError, match="number of items was 48, now it is 50"):
        ResumableLoader(Ids(50), 4).load_state_dict(loader.state_dict())
