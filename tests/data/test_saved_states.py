"""States as earlier versions saved them, byte for byte: they load, and the same ones are saved."""

import random
import sys
from pathlib import Path

import pytest
import torch
from loader_tools import Ids
from torch.utils.data import DataLoader, IterableDataset

from dcp_checkfreq.data import (
    JsonLinesReader,
    ParquetSource,
    ResumableBatchSampler,
    ResumableIterator,
    ResumableLoader,
    ResumableParquetLoader,
    ResumableStreamLoader,
    ShardSource,
)

HERE = Path(__file__).parent
sys.path += [str(HERE / "parquet"), str(HERE / "streams")]
from parquet_tools import write_files  # noqa: E402  it lies in a folder of its own
from stream_tools import write_shards  # noqa: E402

RANK = {"seed": 7, "rank": 1, "world_size": 2}


class Stream(IterableDataset):
    """Items in an order of the process's random states and of a generator of its own."""

    def __init__(self):
        self.rng = random.Random(3)

    def __iter__(self):
        items = [(index, self.rng.random()) for index in torch.randperm(20).tolist()]
        return (index for index, _ in sorted(items, key=lambda item: item[1] + item[0] % 3))


def map_style(folder):
    return ResumableLoader(Ids(50), 4, **RANK, dataset_id="numbers")


def map_style_carry(folder):
    return ResumableLoader(Ids(50), global_batch=12, last="carry", shuffle=False, **RANK)


def parquet(folder):
    write_files(folder, [[7, 9], [13], [8, 13]])
    return ResumableParquetLoader(
        ParquetSource(folder, columns=["id"], lanes=4), 4, last="pad", dataset_id="rows", **RANK
    )


def parquet_in_order(folder):
    write_files(folder, [[7, 9], [13], [8, 13]])
    return ResumableParquetLoader(ParquetSource(folder), 4, shuffle=False, **RANK)


def stream(folder):
    paths = write_shards(folder, [17, 20, 13])
    return ResumableStreamLoader(
        ShardSource(paths, JsonLinesReader(), lanes=2, window=8), 4, last="drop", **RANK
    )


def stream_in_order(folder):
    paths = write_shards(folder, [17, 20, 13])
    return ResumableStreamLoader(ShardSource(paths, JsonLinesReader()), 4, shuffle=False, **RANK)


def iterator(folder):
    return ResumableIterator(DataLoader(Stream(), batch_size=4), seed=7)


def iterator_own_order(folder):
    loader = DataLoader(Ids(50), 4, shuffle=True, generator=torch.Generator().manual_seed(5))
    return ResumableIterator(loader, seed=7, dataset_id="numbers " * 9)


def batch_sampler(folder):
    return ResumableBatchSampler(50, 4, **RANK)


def items_of(batch):
    """Return the numbers of the samples, of whatever loader."""
    return [int(item) for item in (batch["id"] if isinstance(batch, dict) else batch)]


def take(loader, count=None):
    """Return the items of some batches, or of the rest of the epoch."""
    found = []
    for batch in loader:
        found.append(items_of(batch))
        if isinstance(loader, ResumableBatchSampler):
            loader.advance()
        if len(found) == count:
            break
    return found


LOADERS = (
    map_style, map_style_carry, batch_sampler, parquet, parquet_in_order, stream, stream_in_order,
    iterator, iterator_own_order,
)  # fmt: skip

# After four batches, by f96207b: the state, and the batches that come then.
SAVED = {
    "map_style": (
        '{"format":1,"epoch":0,"samples":32,"length":50,"seed":7,"order":"shuffled-1",'
        '"last":"partial","dataset":"numbers","global_batch":8}',
        [[25, 17, 33, 41], [15, 13, 38, 31], [39]],
    ),
    "map_style_carry": (
        '{"format":1,"epoch":0,"samples":48,"length":50,"seed":7,"order":"sequential",'
        '"last":"carry","dataset":"","global_batch":12}',
        [[49, 1, 3, 5, 7, 9]],
    ),
    "batch_sampler": (
        '{"format":1,"epoch":0,"samples":32,"length":50,"seed":7,"order":"shuffled-1",'
        '"last":"partial","dataset":"","global_batch":8}',
        [[25, 17, 33, 41], [15, 13, 38, 31], [39]],
    ),
    "parquet": (
        '{"format":1,"epoch":0,"samples":32,"length":50,"seed":7,"order":"lanes4-1",'
        '"last":"pad","dataset":"6e3494a9e1a99acf72923d8f5762abdb","global_batch":8}',
        [[49, 4, 32, 5], [31, 2, 35, 1], [30, 41, 17, 48]],
    ),
    "parquet_in_order": (
        '{"format":1,"epoch":0,"samples":32,"length":50,"seed":7,"order":"sequential",'
        '"last":"partial","dataset":"8b2349ea24f7875716c09ff74979653f","global_batch":8}',
        [[33, 35, 37, 39], [41, 43, 45, 47], [49]],
    ),
    "stream": (
        '{"format":1,"epoch":0,"samples":32,"length":50,"seed":7,"order":"lanes2w8-1",'
        '"last":"drop","dataset":"9734ee940583f0b4734e4f088c6ed4a9","global_batch":8}',
        [[9, 8, 11, 12], [10, 15, 14, 13]],
    ),
    "stream_in_order": (
        '{"format":1,"epoch":0,"samples":32,"length":50,"seed":7,"order":"sequential",'
        '"last":"partial","dataset":"9734ee940583f0b4734e4f088c6ed4a9","global_batch":8}',
        [[33, 35, 37, 39], [41, 43, 45, 47], [49]],
    ),
    "iterator": (
        '{"format":1,"epoch":0,"batches":4,"seed":7,"world_size":1,"dataset":"",'
        '"made":{"loader":"DataLoader","batch_size":4,"drop_last":false,"sampler":"",'
        '"collate":"default_collate","workers":0},"here":{},'
        '"roots":{"dataset.rng":10571998776743548856},'
        '"trail":"1:86b391973462addb409246683e9c0f51"}',
        [[17, 5, 11, 8]],
    ),
    "iterator_own_order": (
        '{"format":1,"epoch":0,"batches":4,"seed":7,"world_size":1,'
        '"dataset":"4266d60d4b2a2ce32e2f7814bd2449ba","made":{"loader":"DataLoader",'
        '"batch_size":4,"drop_last":false,"sampler":"RandomSampler",'
        '"collate":"default_collate","workers":0},"here":{"items":50,"batches":13,'
        '"order":[{"replacement":false,"num_samples":50,"length":50}]},"roots":{"generator":5},'
        '"trail":"1:550580c6179e5243bc61ebf85b6ec08b"}',
        [
            [27, 32, 18, 23],
            [25, 6, 24, 17],
            [44, 30, 38, 29],
            [39, 11, 21, 48],
            [2, 4, 10, 47],
            [33, 12, 31, 0],
            [41, 45, 7, 15],
            [49, 43, 16, 28],
            [37, 26],
        ],
    ),
}


@pytest.mark.parametrize("make", LOADERS, ids=lambda make: make.__name__)
def test_a_state_of_an_earlier_version_loads_and_is_what_is_saved_today(make, tmp_path):
    state, rest = SAVED[make.__name__]
    resumed = make(folder_in(tmp_path, "resumed"))
    resumed.load_state_dict({"state": state})
    assert take(resumed) == rest
    whole = make(folder_in(tmp_path, "whole"))
    take(whole, 4)
    assert whole.state_dict() == {"state": state}


def folder_in(parent, name):
    folder = parent / name
    folder.mkdir()
    return folder
