"""Parquet in a bucket of a real S3 server (SeaweedFS): the rows of local files, as little read."""

from __future__ import annotations

import json
import random
import uuid

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from servers import BUCKET, KEY, SECRET, Break

from dcp_checkfreq.data import DataStateError, ParquetSource, ResumableParquetLoader

s3fs = pytest.importorskip("s3fs", reason="not installed: pip install -e '.[s3]'")

pytestmark = pytest.mark.slow

FILES, GROUPS, GROUP_ROWS, WORDS = 3, 8, 50, 500
ROWS = FILES * GROUPS * GROUP_ROWS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Local files, rows numbered throughout; about 200 kB per row group."""
    path, rows, words = tmp_path_factory.mktemp("rows"), 0, random.Random(1)
    for file in range(FILES):
        ids = range(rows, rows := rows + GROUPS * GROUP_ROWS)
        column = [[words.getrandbits(62) for _ in range(WORDS)] for _ in ids]
        table = pa.table({"id": ids, "words": pa.array(column, pa.list_(pa.int64(), WORDS))})
        pq.write_table(table, path / f"part-{file}.parquet", row_group_size=GROUP_ROWS,
                       compression="none", use_dictionary=False)  # fmt: skip
    return path


@pytest.fixture(scope="module")
def url(weed, folder):
    """The same files in the bucket."""
    url = f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}/train"
    s3fs.S3FileSystem(**weed.options).put(f"{folder}/", url, recursive=True)
    return url


def ids_of(batches, count=None):
    found = []
    for _, batch in zip(range(count or 1 << 30), batches, strict=False):
        found += batch["id"].tolist()
    return found


def run_steps(loaders, steps):
    """Run all ranks of a launch side by side; return what was trained."""
    found = []
    for _, *batches in zip(range(steps), *loaders, strict=False):
        for loader, batch in zip(loaders, batches, strict=True):
            found += batch["id"].tolist()[: loader.valid]
    return found


def ranks_of(source, world, batch_size, state=None, **options):
    loaders = [ResumableParquetLoader(source, batch_size, seed=1, rank=rank, world_size=world,
                                      **options) for rank in range(world)]  # fmt: skip
    for loader in loaders if state else ():
        loader.load_state_dict(state)
    return loaders


def row_id(row):
    return {"id": row["id"]}


def test_a_url_with_options_gives_the_rows_that_local_files_give(folder, url, weed):
    here = ParquetSource(folder)
    names = sorted(path.name for path in folder.iterdir())
    server = s3fs.S3FileSystem(**weed.options)
    for there in (
        ParquetSource(url, storage_options=weed.options),
        ParquetSource([f"{url}/{name}" for name in names], storage_options=weed.options),
        ParquetSource(url.removeprefix("s3://"), filesystem=server),
        ParquetSource(
            url.removeprefix("s3://"),
            filesystem=pyarrow.fs.S3FileSystem(
                access_key=KEY, secret_key=SECRET, endpoint_override=weed.endpoint, region="x"
            ),
        ),
    ):
        assert there.fingerprint == here.fingerprint
        assert SECRET not in repr(vars(there))
        wanted = ids_of(ResumableParquetLoader(here, 60, seed=3))
        assert ids_of(ResumableParquetLoader(there, 60, seed=3)) == wanted


def test_the_environment_names_the_server(url, weed, monkeypatch):
    for name, value in (("ENDPOINT_URL", weed.endpoint), ("ACCESS_KEY_ID", KEY),
                        ("SECRET_ACCESS_KEY", SECRET)):  # fmt: skip
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    assert len(ParquetSource(url)) == ROWS


def test_each_row_comes_once_over_launches_that_begin_locally_and_go_on_from_the_bucket(
    folder, url, weed
):
    source = ParquetSource(folder, lanes=12)
    first = ranks_of(source, 4, 10)
    found = run_steps(first, 7)
    source = ParquetSource(url, storage_options=weed.options, lanes=12)
    second = ranks_of(source, 2, 25, first[0].state_dict(), transform=row_id, num_workers=1)
    found += run_steps(second, 9)
    third = ranks_of(source, 3, 20, second[0].state_dict())
    found += run_steps(third, 1000)
    assert sorted(found) == list(range(ROWS))
    assert third[0].state_dict() == third[2].state_dict()


def test_going_on_moves_the_row_groups_of_the_lanes_and_no_more(url, proxy):
    source = ParquetSource(url, storage_options=proxy.options, lanes=6)
    loader = ResumableParquetLoader(source, 6, batches_ahead=0)
    late = json.loads(loader.state_dict()["state"]) | {"samples": ROWS * 3 // 4}
    loader.load_state_dict({"state": json.dumps(late)})
    footers_bytes = proxy.received_bytes
    assert len(next(iter(loader))["id"]) == 6
    group_bytes = GROUP_ROWS * (WORDS + 1) * 8
    assert loader.read_stats.pieces == 6
    assert 6 * group_bytes <= proxy.received_bytes - footers_bytes <= 1.1 * 6 * group_bytes
    assert footers_bytes < (FILES + 2) * (64 << 10)  # one more for the schema


def test_columns_that_are_not_asked_for_are_not_moved(url, proxy):
    source = ParquetSource(url, storage_options=proxy.options, columns=["id"])
    footers_bytes = proxy.received_bytes
    assert sorted(ids_of(ResumableParquetLoader(source, 100))) == list(range(ROWS))
    all_bytes = ROWS * (WORDS + 1) * 8
    assert proxy.received_bytes - footers_bytes < 0.05 * all_bytes


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bucket_that_fails_in_the_middle_costs_no_row(url, proxy, workers):
    source = ParquetSource(url, storage_options=proxy.options, lanes=4)
    loader = ResumableParquetLoader(source, 20, transform=row_id, num_workers=workers)
    found = ids_of(loader, 3)
    proxy.rule = lambda request: Break(status=403, code="AccessDenied")
    with pytest.raises(PermissionError):
        found.extend(row for batch in loader for row in batch["id"].tolist())
    assert loader.samples == len(found) < ROWS
    proxy.reset()
    found += ids_of(loader)
    assert sorted(found) == list(range(ROWS))


def test_a_connection_that_breaks_is_tried_again(url, proxy):
    source = ParquetSource(url, storage_options=proxy.options)
    broken = iter([Break(cut_answer_after=1000), Break(status=503, code="SlowDown")])
    proxy.rule = lambda request: next(broken, None) if request.method == "GET" else None
    assert sorted(ids_of(ResumableParquetLoader(source, 100))) == list(range(ROWS))
    assert len(proxy.broken) == 2


def test_files_that_came_since_are_seen_and_a_state_from_before_is_refused(folder, url, weed):
    ours = url.replace("/train", "/grows")
    server = s3fs.S3FileSystem(**weed.options)
    names = sorted(path.name for path in folder.iterdir())
    for name in names[:2]:
        server.put(folder / name, f"{ours}/{name}")
    loader = ResumableParquetLoader(ParquetSource(ours, storage_options=weed.options), 60)
    assert len(ids_of(loader, 2)) == 120
    # by another client, of which this process's listings know nothing
    other = s3fs.S3FileSystem(**weed.options, skip_instance_cache=True)
    other.put(folder / names[2], f"{ours}/{names[2]}")
    grown = ParquetSource(ours, storage_options=weed.options)
    assert len(grown) == ROWS
    with pytest.raises(DataStateError, match="was 800, now it is 1200"):
        ResumableParquetLoader(grown, 60).load_state_dict(loader.state_dict())


def test_what_is_not_there_is_told_at_once(url, weed):
    with pytest.raises(FileNotFoundError):
        ParquetSource(f"{url}-no", storage_options=weed.options)
    with pytest.raises(ValueError, match="storage_options"):
        ParquetSource(url, filesystem=pyarrow.fs.LocalFileSystem(), storage_options={"anon": True})
