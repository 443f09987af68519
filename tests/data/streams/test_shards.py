"""Streams of shards: each sample counts exactly once, nothing is replayed to go on."""

import gc
import json
import multiprocessing
import random
from collections import Counter

import fsspec
import numpy as np
import pytest
import torch
from stream_tools import LAYOUTS, Job, as_list, flat, write_shards

from dcp_checkfreq import Checkpointer
from dcp_checkfreq.data import DataStateError, sample_rng
from dcp_checkfreq.data.loaders.shards import OpenShard, ResumableStreamLoader
from dcp_checkfreq.data.sources.shard_readers import FunctionReader, JsonLinesReader
from dcp_checkfreq.data.sources.shard_source import ShardSource

SIZES = [20, 7, 33, 1, 0, 40, 25, 50]
COUNT = 176


def source_of(folder, layout="jsonl", sizes=SIZES, **options):
    options = {"lanes": 4, "window": 8, **options}
    return ShardSource(write_shards(folder, sizes, layout), LAYOUTS[layout][2], **options)


@pytest.fixture
def source(tmp_path):
    return source_of(tmp_path, "function")


def loader_of(source, batch_size=10, **options):
    options.setdefault("collate_fn", as_list)
    return ResumableStreamLoader(source, batch_size, **options)


def take(loader, batches=None):
    found = []
    for number, batch in enumerate(loader, start=1):
        found += batch
        if number == batches:
            break
    return found


def edited(state, **fields):
    return {"state": json.dumps(json.loads(state["state"]) | fields)}


def once(found, count=COUNT):
    return Counter(found) == Counter(range(count))


# --- exactly once ---


@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_in_any_elastic_history_every_sample_counts_once(tmp_path, layout):
    rng = random.Random(layout)
    number = LAYOUTS[layout][3]
    for case in range(20):
        folder = tmp_path / str(case)
        folder.mkdir()
        sizes = [*(rng.randint(0, 40) for _ in range(rng.randint(1, 8))), 3]
        lanes, window = rng.randint(1, 9), rng.choice([1, 3, 16, 100])
        source = source_of(folder, layout, sizes, lanes=lanes, window=window)
        state, found = None, [[], []]
        while state is None or (epoch := json.loads(state["state"])["epoch"]) < 2:
            epoch = 0 if state is None else epoch
            job = Job(source, rng.randint(1, 6), rng.randint(1, 9), state, seed=case)
            steps, state = job.run(rng.choice([1, 2, 3, 8, None]))
            found[epoch] += map(number, flat(steps))
        assert [once(ids, sum(sizes)) for ids in found] == [True, True]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("layout", ["tar", "function"])
def test_on_other_ranks_batches_and_workers_samples_and_numbers_are_the_same(
    tmp_path, layout, workers
):
    source = source_of(tmp_path, layout)
    options = {"seed": 3, "transform": draws}
    whole, _ = Job(source, 1, 12, **options).run()
    one, state = Job(source, 4, 3, **options).run(3)
    two, state = Job(source, 2, 6, state, num_workers=workers, **options).run(4)
    three, state = Job(source, 3, 5, state, **options).run(2)
    rest, state = Job(source, 1, 12, state, num_workers=workers, **options).run()
    assert sorted(flat(one + two + three + rest)) == sorted(flat(whole))
    assert [set(step) for step in one + two] == [set(step) for step in whole[:7]]
    assert json.loads(state["state"])["epoch"] == 1


def draws(sample):
    return str(sample), random.random(), torch.rand(()).item(), sample_rng().random()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ahead", [0, 3])
def test_what_was_read_ahead_is_not_counted(source, workers, ahead):
    loader = loader_of(source, num_workers=workers, batches_ahead=ahead)
    first = take(loader, 3)
    assert (loader.epoch, loader.samples) == (0, 30)
    again = loader_of(source)
    again.load_state_dict(loader.state_dict())
    assert again.steps_left == 15
    assert once(first + take(again))


@pytest.mark.slow
def test_workers_may_be_spawned(tmp_path):
    source = source_of(tmp_path, "jsonl")
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    assert once(sample["id"] for sample in take(loader_of(source, 60, **options)))


def test_a_loop_that_is_left_and_begun_again_goes_on(source):
    loader = loader_of(source, num_workers=2)
    found = [i for _ in range(3) for i in take(loader, 4)] + take(loader)
    assert once(found)
    assert (loader.epoch, loader.samples) == (1, 0)


@pytest.mark.parametrize("last", ["carry", "pad"])
def test_batches_that_run_on_or_are_filled_up_hold_the_right_samples(source, last):
    first = take(loader_of(source, COUNT, seed=1))
    other = loader_of(source, COUNT, seed=1)
    other.load_state_dict(edited(other.state_dict(), epoch=1))
    second = take(other)
    loader = loader_of(source, 50, last=last, seed=1)
    assert take(loader) == first + (second if last == "carry" else first)[:24]
    assert (loader.epoch, loader.samples) == ((1, 24) if last == "carry" else (1, 0))
    if last == "carry":
        assert take(loader)[: COUNT - 24] == second[24:]


def test_without_shuffle_the_samples_come_as_they_lie(source):
    assert take(loader_of(source, 16, shuffle=False)) == list(range(COUNT))
    steps, _ = Job(source, 3, 4, shuffle=False).run(2)
    assert [sorted(step) for step in steps] == [list(range(12)), list(range(12, 24))]


def test_shards_and_neighbours_are_shuffled_anew_each_epoch(tmp_path):
    source = source_of(tmp_path, "function", [100] * 20, lanes=4, window=10)
    loader = loader_of(source, 100, seed=1)
    first, second = take(loader), take(loader)
    assert once(first, 2000)
    assert first != second
    assert {i // 100 for i in first[:40]} != {i // 100 for i in second[:40]}
    assert len({i // 100 for i in first[:40]}) == 4  # a shard per lane
    lane = first[:40:4]
    assert sorted(lane) != lane
    assert len({i // 10 for i in lane}) == 1  # a window of neighbours


def test_the_position_is_in_the_checkpoint(source, tmp_path):
    parts = {"data": loader_of(source, 8, rank=0, world_size=1)}
    found = []
    with Checkpointer(tmp_path / "ckpt", parts, every=4) as ckpt:
        for _, batch in zip(range(6), parts["data"], strict=False):
            found += batch
            ckpt.after_step()
    parts = {"data": loader_of(source, 16, rank=0, world_size=1)}
    with Checkpointer(tmp_path / "ckpt", parts, every=100) as ckpt:
        ckpt.restore()
        assert parts["data"].samples == 32
        assert once(found[:32] + take(parts["data"]))


# --- what is read ---


class Recorded(FunctionReader):
    """Notes from which sample on each shard is read."""

    def __init__(self):
        super().__init__(lambda file: (int(line) for line in file))
        self.calls = []

    def read(self, file, start, marks):
        first = int(file.readline())
        file.seek(0)
        self.calls.append((first, start))
        return super().read(file, start, marks)


@pytest.mark.parametrize("world", [1, 3])
def test_to_go_on_only_the_open_shards_are_opened_at_their_place(tmp_path, world):
    sizes = [100] * 24
    paths = write_shards(tmp_path, sizes, "function")
    source = ShardSource(paths, Recorded(), lanes=6, window=10)  # a lane is 4 shards
    state = edited(loader_of(source).state_dict(), samples=6 * 237)
    for rank in range(world):
        loader = loader_of(source, 6 // world, rank=rank, world_size=world, batches_ahead=0)
        loader.load_state_dict(state)
        source.reader.calls.clear()
        batch = next(iter(loader))
        assert len(batch) == 6 // world
        assert [start for _, start in source.reader.calls] == [30] * (6 // world)
        assert loader.read_stats.pieces == 6 // world
        assert loader.read_stats.items == 10 * (6 // world)
        names = [shard.path for shard in source.shards]
        opened = {names[first // 100] for first, _ in source.reader.calls}
        assert not opened & set(loader.completed_shards())
        assert opened <= {shard.path for shard in loader.open_shards()}


def test_each_shard_is_opened_once_by_one_rank(tmp_path):
    source = source_of(tmp_path, "function", [30] * 24, lanes=12)
    for world in (1, 2, 4):
        job = Job(source, world, 6)
        assert once(flat(job.run()[0]), 720)
        stats = [loader.read_stats for loader in job.loaders]
        assert sum(each.pieces for each in stats) == 24  # lanes begin where shards do
        assert {each.amplification for each in stats} == {1.0}


def test_ranks_that_do_not_divide_the_lanes_are_exact_and_warned(source, caplog):
    job = Job(source, 5, 3)
    assert once(flat(job.run()[0]))
    assert caplog.text.count("4 lanes do not divide among 5 ranks") == 1


def test_completed_and_open_shards_are_what_was_handed_out(source):
    loader = loader_of(source, 11, seed=2)
    assert (loader.completed_shards(), loader.open_shards()) == ([], [])
    bounds = np.cumsum([0, *source.sizes])
    seen = Counter()
    for batch in loader:
        seen.update(int(np.searchsorted(bounds, i, side="right")) - 1 for i in batch)
        if loader.epoch == 0:
            shards = enumerate(source.shards)
            done = [(s.path, s.layout.samples, seen[number]) for number, s in shards]
            assert loader.completed_shards() == [path for path, n, had in done if n == had]
            assert loader.open_shards() == [OpenShard(*d) for d in done if 0 < d[2] < d[1]]
    assert loader.completed_shards() == []  # of the next epoch


def test_a_loader_that_is_let_go_ends_its_workers_and_threads_and_closes_its_files(
    source, new_threads
):
    gc.collect()  # what failed in other tests may be held by its error
    gc.disable()
    try:
        loader = loader_of(source, num_workers=2)
        live = iter(loader)
        next(live)
        assert len(multiprocessing.active_children()) == 2
        del live, loader
        assert multiprocessing.active_children() == []
        assert new_threads("checkfreq-data") == []
    finally:
        gc.enable()  # an open file would be a ResourceWarning, which is an error here


# --- sources ---


def test_shards_of_another_file_system_are_the_same_data(tmp_path):
    local = source_of(tmp_path)
    memory = fsspec.filesystem("memory")
    for path in tmp_path.iterdir():
        memory.pipe_file(f"/deep/{path.name}", path.read_bytes())
    here = take(loader_of(local))
    names = sorted(path.name for path in tmp_path.iterdir())
    for paths, options in (
        ("memory://deep/shard-*.jsonl", {}),
        ([f"memory://deep/{name}" for name in names], {}),
        ([f"/deep/{name}" for name in names], {"filesystem": memory}),
        (f"{tmp_path}/*.jsonl", {}),
        ([tmp_path / name for name in names], {"samples": SIZES}),
    ):
        source = ShardSource(paths, JsonLinesReader(), lanes=4, window=8, **options)
        assert source.fingerprint == local.fingerprint
        assert take(loader_of(source)) == here
    memory.rm("/deep", recursive=True)


class Scans(JsonLinesReader):
    count = 0

    def scan(self, file):
        self.count += 1
        return super().scan(file)


@pytest.mark.parametrize("where", ["local", "memory"])
def test_with_an_index_a_shard_is_scanned_once_and_again_if_its_size_changes(tmp_path, where):
    paths = write_shards(tmp_path, SIZES)
    index = str(tmp_path / "index.json") if where == "local" else "memory://of/index.json"
    first, second, third = Scans(), Scans(), Scans()
    made = ShardSource(paths, first, index=index)
    again = ShardSource(paths, second, index=index)
    assert (first.count, second.count) == (len(SIZES), 0)
    assert (again.shards, again.fingerprint) == (made.shards, made.fingerprint)
    paths[2].write_bytes(paths[2].read_bytes() + b'{"id": 900}\n')
    assert sum(ShardSource(paths, third, index=index).sizes) == COUNT + 1
    assert third.count == 1
    left = sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".jsonl")
    assert left == (["index.json"] if where == "local" else [])
    if where == "memory":
        fsspec.filesystem("memory").rm("/of", recursive=True)


@pytest.mark.parametrize(
    "text", ["", "nonsense", "[]", '{"format":9,"mark_every":256,"shards":{}}',
             '{"format":2,"mark_every":256,"shards":{"shard-000.jsonl":[1,-5,[]]}}'])  # fmt: skip
def test_an_index_that_is_none_is_made_anew(tmp_path, text, caplog):
    index = tmp_path / "index"
    index.write_text(text)
    assert len(source_of(tmp_path, index=index)) == COUNT
    assert "is no index of shards" in caplog.text
    assert json.loads(index.read_text())["shards"]["shard-000.jsonl"][1] == 20


def test_an_index_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    assert len(source_of(tmp_path, index=tmp_path / "not" / "there")) == COUNT
    assert "was not written" in caplog.text


def test_sources_that_cannot_be_are_refused(tmp_path):
    paths = write_shards(tmp_path, [3, 0])
    reader = JsonLinesReader()
    for options in ({"lanes": 0}, {"window": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            ShardSource(paths, reader, **options)
    with pytest.raises(ValueError, match="no samples in 1 shards"):
        ShardSource(paths[1:], reader)
    with pytest.raises(ValueError, match="2 shards, and 1 numbers"):
        ShardSource(paths, reader, samples=[3])
    with pytest.raises(ValueError, match="got -1"):
        ShardSource(paths, reader, samples=[3, -1])
    with pytest.raises(FileNotFoundError, match="no shard matches"):
        ShardSource(f"{tmp_path}/*.tar", reader)
    with pytest.raises(FileNotFoundError):
        ShardSource([tmp_path / "nothing"], reader)
    with pytest.raises(TypeError, match="reader must be"):
        ShardSource(paths, JsonLinesReader)


# --- bad input ---


@pytest.mark.parametrize(("told", "said"), [(19, "19 samples, now it has more"),
                                            (21, "21 samples, now it has only 20")])  # fmt: skip
@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_with_another_number_of_samples_is_told_with_both(tmp_path, told, said, workers):
    source = source_of(tmp_path, samples=[told, *SIZES[1:]])
    loader = loader_of(source, num_workers=workers)
    with pytest.raises(DataStateError, match=f"shard-000.jsonl was said to have {said}"):
        take(loader)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"length": 177}, "items was 177, now it is 176"),
        ({"order": "lanes48w8-1"}, "'lanes48w8-1', now it is 'lanes4w8-1'"),
        ({"dataset": "x"}, "dataset_id was 'x', now it is '"),
        ({"seed": 4}, "the seed was 4, now it is 0"),
        ({"samples": 176}, "176 samples of 176"),
        ({"format": 9}, "format 9, this version reads up to 1"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_with_both_values(source, fields, said):
    loader = loader_of(source)
    live = iter(loader)
    first = next(live)
    before = loader.state_dict()
    with pytest.raises(DataStateError, match=f"ResumableStreamLoader: .*{said}"):
        loader.load_state_dict(edited(before, **fields))
    assert loader.state_dict() == before
    assert once(first + flat(live))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_that_is_gone_fails_and_once_it_is_back_nothing_is_lost(source, workers):
    path = source.shards[3].path
    loader = loader_of(source, batches_ahead=2, num_workers=workers)
    with open(path, "rb") as file:
        content = file.read()
    fsspec.filesystem("file").rm(path)
    found = []
    with pytest.raises(FileNotFoundError):
        found.extend(i for batch in loader for i in batch)
    with open(path, "wb") as file:
        file.write(content)
    assert loader.samples == len(found)
    assert once(found + take(loader))


def test_an_iterator_from_before_a_load_is_stale(source):
    loader = loader_of(source)
    live = iter(loader)
    next(live)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="stale"):
        next(live)


def test_options_that_would_change_the_order_are_refused(source):
    for name in ("sampler", "drop_last", "in_order", "generator"):
        with pytest.raises(TypeError, match=f"takes no {name}"):
            loader_of(source, 10, **{name: None})
