"""Parquet: each row counts exactly once, read by row groups, wherever the files are."""

import gc
import json
import multiprocessing
import os
import random
import signal
from collections import Counter

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
import torch
from parquet_tools import Job, flat, table_of, write_files

from dcp_checkfreq import Checkpointer
from dcp_checkfreq.data import DataStateError, sample_rng
from dcp_checkfreq.data.loaders.parquet import ParquetSource, ResumableParquetLoader, as_tensors

FILES = [[7, 30, 1], [20, 20, 20, 5], [64], [0, 9]]
ROWS = 176


@pytest.fixture
def folder(tmp_path):
    assert write_files(tmp_path, FILES) == ROWS
    return tmp_path


@pytest.fixture
def source(folder):
    return ParquetSource(folder, lanes=6)


def ids_of(loader, batches=None):
    found = []
    for number, batch in enumerate(loader, start=1):
        found += batch["id"].tolist()
        if number == batches:
            break
    return found


def edited(state, **fields):
    return {"state": json.dumps(json.loads(state["state"]) | fields)}


def once(found, rows=ROWS):
    return Counter(found) == Counter(range(rows))


# --- exactly once ---


@pytest.mark.slow
def test_in_any_elastic_history_every_row_counts_once(tmp_path):
    rng = random.Random(0)
    for case in range(40):
        folder = tmp_path / str(case)
        folder.mkdir()
        rows = write_files(
            folder,
            [[rng.randint(0, 25) for _ in range(rng.randint(1, 5))] for _ in range(4)] + [[3]],
        )
        source, state, found = ParquetSource(folder, lanes=rng.randint(1, 9)), None, [[], []]
        while state is None or (epoch := json.loads(state["state"])["epoch"]) < 2:
            epoch = 0 if state is None else epoch
            job = Job(source, rng.randint(1, 6), rng.randint(1, 9), state, seed=case)
            steps, state = job.run(rng.choice([1, 2, 3, 8, None]))
            found[epoch] += flat(steps)
        assert [once(ids, rows) for ids in found] == [True, True]
        assert found[0] != found[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_on_other_ranks_batches_and_workers_the_rows_and_their_numbers_are_the_same(
    source, workers
):
    options = {"seed": 3, "transform": draws, "collate_fn": list}

    def run(world, batch, state=None, steps=None, workers=0):
        job = Job(source, world, batch, state, num_workers=workers, **options)
        return job.run(steps, ids=list)

    whole, _ = run(1, 12)
    one, state = run(4, 3, steps=3)
    two, state = run(2, 6, state, steps=4, workers=workers)
    three, state = run(3, 5, state, steps=2)
    rest, state = run(1, 12, state, workers=workers)
    found = flat(one + two + three + rest)
    assert once([sample[0] for sample in found])
    assert sorted(found) == sorted(flat(whole))
    assert [set(step) for step in one + two] == [set(step) for step in whole[:7]]
    assert json.loads(state["state"])["epoch"] == 1


def draws(row):
    return row["id"], row["name"], random.random(), torch.rand(()).item(), sample_rng().random()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ahead", [0, 3])
def test_what_was_read_ahead_is_not_counted(source, workers, ahead):
    loader = ResumableParquetLoader(source, 10, num_workers=workers, batches_ahead=ahead)
    first = ids_of(loader, 3)
    assert (loader.epoch, loader.samples) == (0, 30)
    again = ResumableParquetLoader(source, 10)
    again.load_state_dict(loader.state_dict())
    assert again.steps_left == 15
    assert once(first + ids_of(again))


def test_cut_after_any_batch_the_next_one_is_the_one_that_would_have_come(tmp_path):
    """Case 37: within row groups, at their borders, over empty ones and empty files."""
    write_files(tmp_path, [[1000, 1, 0, 7], [0], [], [5]])
    source = ParquetSource(tmp_path, lanes=2)
    whole = ResumableParquetLoader(source, 9, batches_ahead=4)
    batches, states = [], [whole.state_dict()]
    for batch in whole:
        batches.append(batch["id"].tolist())
        states.append(whole.state_dict())
    assert once(flat(batches), 1013)
    for state, batch in zip(states, batches, strict=False):
        again = ResumableParquetLoader(source, 9, batches_ahead=0)
        again.load_state_dict(state)
        assert next(iter(again))["id"].tolist() == batch


@pytest.mark.slow
def test_workers_may_be_spawned(source):
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    loader = ResumableParquetLoader(source, 60, transform=draws, collate_fn=list, **options)
    assert once([sample[0] for sample in flat(loader)])


def test_a_loop_that_is_left_and_begun_again_goes_on(source):
    loader = ResumableParquetLoader(source, 10, num_workers=2)
    found = flat(ids_of(loader, 4) for _ in range(3)) + ids_of(loader)
    assert once(found)
    assert (loader.epoch, loader.samples) == (1, 0)


@pytest.mark.parametrize("last", ["carry", "pad"])
def test_batches_that_run_on_or_are_filled_up_hold_the_right_rows(source, last):
    loader = ResumableParquetLoader(source, 50, last=last, seed=1)
    order = [ids_of(ResumableParquetLoader(source, ROWS, seed=1))]
    other = ResumableParquetLoader(source, ROWS, seed=1)
    other.load_state_dict(edited(other.state_dict(), epoch=1))
    order.append(ids_of(other))
    found = ids_of(loader)
    assert len(found) == 200
    assert found == order[0] + (order[1][:24] if last == "carry" else order[0][:24])
    assert loader.valid == (50 if last == "carry" else 26)
    assert (loader.epoch, loader.samples) == ((1, 24) if last == "carry" else (1, 0))


def test_without_shuffle_the_rows_come_as_they_lie(source):
    assert ids_of(ResumableParquetLoader(source, 16, shuffle=False)) == list(range(ROWS))
    steps, _ = Job(source, 3, 4, shuffle=False).run(2)
    assert [sorted(step) for step in steps] == [list(range(12)), list(range(12, 24))]


def test_the_position_is_in_the_checkpoint(source, tmp_path):
    parts = {"data": ResumableParquetLoader(source, 8, rank=0, world_size=1)}
    found = []
    with Checkpointer(tmp_path / "ckpt", parts, every=4) as ckpt:
        for _, batch in zip(range(6), parts["data"], strict=False):
            found += batch["id"].tolist()
            ckpt.after_step()
    parts = {"data": ResumableParquetLoader(source, 16, rank=0, world_size=1)}
    with Checkpointer(tmp_path / "ckpt", parts, every=100) as ckpt:
        ckpt.restore()
        assert parts["data"].samples == 32
        assert once(found[:32] + ids_of(parts["data"]))


# --- what is read ---


@pytest.mark.slow
def test_only_the_row_groups_that_are_needed_are_read(tmp_path):
    rows = write_files(tmp_path, [[10] * 48] * 2)
    source = ParquetSource(tmp_path, lanes=24)
    for world in (1, 2, 4, 8):
        job = Job(source, world, 6)
        assert once(flat(job.run()[0]), rows)
        stats = [loader.read_stats for loader in job.loaders]
        assert sum(each.pieces for each in stats) == 96  # each once: lanes begin at row groups
        assert {each.amplification for each in stats} == {1.0}


def test_going_on_reads_one_row_group_per_lane_and_nothing_before(tmp_path):
    write_files(tmp_path, [[10] * 48] * 2)
    for world in (1, 3):
        loader = ResumableParquetLoader(
            ParquetSource(tmp_path, lanes=24), 8, rank=0, world_size=world, batches_ahead=0
        )
        loader.load_state_dict(edited(loader.state_dict(), samples=24 * 33))
        next(iter(loader))
        assert loader.read_stats.pieces == 8  # for the 8 rows of the batch, each of another lane


def test_lanes_that_begin_inside_of_a_row_group_cost_one_more_read_each(source):
    loader = ResumableParquetLoader(source, 10)
    assert once(ids_of(loader))
    groups = len(source.row_groups)
    assert groups <= loader.read_stats.pieces <= groups + source.lanes
    assert 1 <= loader.read_stats.amplification < 2.5


def test_ranks_that_do_not_divide_the_lanes_are_exact_and_warned(source, caplog):
    job = Job(source, 4, 3)
    assert once(flat(job.run()[0]))
    assert caplog.text.count("6 lanes do not divide among 4 ranks") == 1
    assert Job(source, 3, 3)
    assert caplog.text.count("do not divide") == 1


def test_completed_row_groups_are_those_whose_rows_were_all_handed_out(source):
    loader = ResumableParquetLoader(source, 11, seed=2)
    assert loader.completed_row_groups() == []
    seen, first = set(), {}
    for group in source.row_groups:
        first[group] = sum(g.rows for g in source.row_groups[: source.row_groups.index(group)])
    for batch in loader:
        seen |= set(batch["id"].tolist())
        if loader.epoch == 0:
            assert loader.completed_row_groups() == [
                group for group in source.row_groups
                if seen >= set(range(first[group], first[group] + group.rows))
            ]  # fmt: skip
    assert len(seen) == ROWS
    assert loader.completed_row_groups() == []  # of the next epoch


def test_row_groups_are_held_only_while_a_lane_is_in_them(tmp_path):
    write_files(tmp_path, [[5] * 100])
    loader = ResumableParquetLoader(ParquetSource(tmp_path, lanes=4), 8)
    reader = loader._sampler._feed.args[0]()
    for _, share in loader._cursor.plan():
        reader.read(share)
        assert len(reader._held) <= 4
    reader.close()


# --- sources ---


def test_the_same_files_elsewhere_are_the_same_data(folder):
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/elsewhere/deep", recursive=True)
    local = ParquetSource(folder)
    here = ids_of(ResumableParquetLoader(local, 16))
    names = sorted(path.name for path in folder.iterdir())
    sources = [
        ParquetSource("memory://elsewhere/deep"),
        ParquetSource([f"memory://elsewhere/deep/{name}" for name in names]),
        ParquetSource("/elsewhere/deep", filesystem=memory),
        ParquetSource(str(folder), filesystem=pyarrow.fs.LocalFileSystem()),
        ParquetSource(f"file://{folder}"),
        ParquetSource([folder / name for name in names]),
    ]
    for source in sources:
        assert source.fingerprint == local.fingerprint
        assert ids_of(ResumableParquetLoader(source, 16)) == here
    memory.rm("/elsewhere", recursive=True)


def test_other_names_sizes_or_another_order_are_other_data(folder, tmp_path_factory):
    known = {ParquetSource(folder).fingerprint}
    names = sorted(folder.iterdir())
    known.add(ParquetSource(names[:3]).fingerprint)
    known.add(ParquetSource(names[::-1]).fingerprint)
    other = tmp_path_factory.mktemp("other")
    write_files(other, [[8, 29, 1], *FILES[1:]])
    known.add(ParquetSource(other).fingerprint)
    names[0].rename(folder / "005.parquet")
    known.add(ParquetSource(folder).fingerprint)
    assert len(known) == 5


def test_files_keep_the_order_in_which_they_are_named(folder):
    names = sorted(folder.iterdir())
    source = ParquetSource([names[2], names[0]])
    assert [(group.path, group.rows) for group in source.row_groups] == [
        (str(names[2]), 64), (str(names[0]), 7), (str(names[0]), 30), (str(names[0]), 1)
    ]  # fmt: skip
    assert len(source) == 102


def test_columns_are_chosen_and_folders_become_columns(tmp_path):
    for key in (1, 2):
        (tmp_path / f"part={key}").mkdir()
        pq.write_table(table_of(range(key * 10, key * 10 + 5)), tmp_path / f"part={key}/a.parquet")
    source = ParquetSource(tmp_path, columns=["id", "part"])
    (batch,) = ResumableParquetLoader(source, 10)
    assert list(batch) == ["id", "part"]
    assert {i // 10 for i in batch["id"].tolist()} == {1, 2}
    assert [i // 10 for i in batch["id"].tolist()] == batch["part"].tolist()
    with pytest.raises(ValueError, match=r"no columns \['x'\], only \['id'"):
        ParquetSource(tmp_path, columns=["id", "x"])


def test_sources_that_cannot_be_are_refused(folder, tmp_path):
    name = folder / "000.parquet"
    with pytest.raises(ValueError, match="more than once"):
        ParquetSource([name, name])
    with pytest.raises(ValueError, match="no paths"):
        ParquetSource([])
    with pytest.raises(ValueError, match="lanes must be at least 1"):
        ParquetSource(folder, lanes=0)
    with pytest.raises(ValueError, match="another file system"):
        ParquetSource([str(name), "memory://x.parquet"])
    with pytest.raises(FileNotFoundError):
        ParquetSource(folder / "nothing.parquet")
    pq.write_table(table_of([]), tmp_path / "empty")
    with pytest.raises(ValueError, match="no rows"):
        ParquetSource(tmp_path / "empty")
    (tmp_path / "broken").write_bytes(b"PAR1 nonsense")
    with pytest.raises(pa.ArrowInvalid):
        ParquetSource(tmp_path / "broken")


# --- batches ---


def test_a_batch_is_tensors_and_lists_in_the_order_of_the_positions(source):
    batch = next(iter(ResumableParquetLoader(source, 9, seed=1)))
    assert list(batch) == ["id", "half", "even", "name"]
    assert [batch[name].dtype for name in ("id", "half", "even")] == [
        torch.int64, torch.float32, torch.bool
    ]  # fmt: skip
    ids = batch["id"].tolist()
    assert batch["half"].tolist() == [i / 2 for i in ids]
    assert batch["even"].tolist() == [i % 2 == 0 for i in ids]
    assert batch["name"] == [f"row {i}" for i in ids]
    assert ids == ids_of(ResumableParquetLoader(source, ROWS, seed=1))[:9]
    batch["id"][0] = 5  # writable


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_gets_the_rows_as_a_table(source, workers):
    loader = ResumableParquetLoader(source, 9, collate_fn=lambda t: t, num_workers=workers)
    table = next(iter(loader))
    assert isinstance(table, pa.Table)
    assert table.num_rows == 9
    assert table.nbytes < 1000  # not the row groups that the rows came from


def test_lists_of_one_size_are_rows_of_a_tensor():
    pairs = pa.array([[i, i + 1] for i in range(6)], pa.list_(pa.int32(), 2))
    table = pa.concat_tables([pa.table({"x": pairs[:2]}), pa.table({"x": pairs[3:]})])
    batch = as_tensors(table)["x"]
    assert batch.dtype == torch.int32
    assert batch.tolist() == [[0, 1], [1, 2], [3, 4], [4, 5], [5, 6]]
    assert as_tensors(pa.table({"x": [[1, 2], [3]]})) == {"x": [[1, 2], [3]]}


def test_numbers_with_nulls_are_told_by_name():
    table = pa.table({"x": pa.array([1, None, None])})
    with pytest.raises(ValueError, match="column 'x' has 2 nulls"):
        as_tensors(table)
    pairs = pa.array([[1.5, 2], None], pa.list_(pa.float32(), 2))
    with pytest.raises(ValueError, match="column 'y' has 1 nulls"):
        as_tensors(pa.table({"y": pairs}))
    assert as_tensors(pa.table({"x": pa.array(["a", None])})) == {"x": ["a", None]}


def test_the_random_state_of_the_training_is_not_touched(source):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    wanted = [random.random(), np.random.rand(), torch.rand(()).item()]
    for options in ({}, {"transform": draws}, {"collate_fn": lambda t: torch.rand(3)},
                    {"transform": draws, "num_workers": 2}):  # fmt: skip
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        for _ in ResumableParquetLoader(source, 20, **options):
            pass
        assert [random.random(), np.random.rand(), torch.rand(()).item()] == wanted


def test_a_loader_that_is_let_go_ends_its_workers_and_threads_at_once(source, new_threads):
    gc.collect()  # what failed in other tests may be held by its error
    gc.disable()
    try:
        loader = ResumableParquetLoader(source, 10, num_workers=2)
        live = iter(loader)
        next(live)
        assert len(multiprocessing.active_children()) == 2
        assert new_threads("checkfreq-data")
        del live, loader
        assert multiprocessing.active_children() == []
        assert new_threads("checkfreq-data") == []
    finally:
        gc.enable()


# --- bad input ---


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"length": 177}, "items was 177, now it is 176"),
        ({"order": "lanes48-1"}, "'lanes48-1', now it is 'lanes6-1'"),
        ({"dataset": "x"}, "dataset_id was 'x', now it is '"),
        ({"seed": 4}, "the seed was 4, now it is 0"),
        ({"samples": 176}, "176 samples of 176"),
        ({"samples": -1}, "-1"),
        ({"format": 9}, "format 9, this version reads up to 1"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_with_both_values(source, fields, said):
    loader = ResumableParquetLoader(source, 10)
    live = iter(loader)
    first = next(live)["id"].tolist()
    before = loader.state_dict()
    with pytest.raises(DataStateError, match=f"ResumableParquetLoader: .*{said}"):
        loader.load_state_dict(edited(before, **fields))
    assert loader.state_dict() == before
    assert once(first + flat(batch["id"].tolist() for batch in live))


def test_a_file_that_was_replaced_is_noticed(tmp_path):
    write_files(tmp_path, [[64]])
    source = ParquetSource(tmp_path)
    write_files(tmp_path, [[60]])
    with pytest.raises(OSError, match="smaller"):
        ids_of(ResumableParquetLoader(source, 10))
    # a file system that serves another version, whole
    source._fragments = ParquetSource(tmp_path)._fragments
    loader = ResumableParquetLoader(source, 10)
    with pytest.raises(DataStateError, match=r"000\.parquet had 64 rows, now it has 60"):
        ids_of(loader)
    assert loader.samples == 0


def test_an_unreadable_file_fails_and_once_it_is_back_nothing_is_lost(folder, source):
    loader = ResumableParquetLoader(source, 10, batches_ahead=2, num_workers=1)
    found = ids_of(loader, 2)
    content = {path: path.read_bytes() for path in folder.iterdir()}
    for path in content:
        path.unlink()
    with pytest.raises(OSError, match=r"\.parquet"):
        found.extend(i for batch in loader for i in batch["id"].tolist())
    for path, data in content.items():
        path.write_bytes(data)
    assert loader.samples == len(found)
    assert once(found + ids_of(loader))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_that_fails_raises_and_the_epoch_can_be_gone_on_with(source, workers, tmp_path):
    flag = tmp_path / "flag"

    def transform(row):
        if row["id"] == 100 and not flag.exists():
            raise ZeroDivisionError("at 100")
        return row["id"]

    loader = ResumableParquetLoader(
        source, 10, transform=transform, collate_fn=list, num_workers=workers
    )
    found, live = [], iter(loader)
    with pytest.raises(ZeroDivisionError, match="at 100"):
        found.extend(i for batch in live for i in batch)
    with pytest.raises(RuntimeError, match="stale"):  # and no silent end of the epoch
        next(live)
    flag.touch()
    assert once(found + flat(loader))


def test_a_worker_that_dies_between_epochs_is_replaced(source):
    loader = ResumableParquetLoader(
        source, 10, transform=lambda row: os.getpid(), collate_fn=list, num_workers=2
    )
    pids = set(flat(loader))
    os.kill(pids.pop(), signal.SIGKILL)
    found = []
    for _ in range(3):
        try:
            found = flat(loader)
            break
        except (RuntimeError, ConnectionResetError):
            assert (loader.epoch, loader.samples) == (1, 0)
    assert len(found) == ROWS
    assert pids.isdisjoint(found)


def test_an_iterator_from_before_a_load_is_stale(source):
    loader = ResumableParquetLoader(source, 10)
    live = iter(loader)
    next(live)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="stale"):
        next(live)


def test_options_that_would_change_the_order_are_refused(source):
    for name in ("sampler", "drop_last", "in_order", "generator"):
        with pytest.raises(TypeError, match=f"takes no {name}"):
            ResumableParquetLoader(source, 10, **{name: None})
    with pytest.raises(ValueError, match="batches_ahead"):
        ResumableParquetLoader(source, 10, batches_ahead=-1)
