"""What the footers of Parquet files show is judged when a source is made."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dcp_checkfreq.data import ParquetSource, ResumableParquetLoader


def written(folder, *tables):
    for number, table in enumerate(tables):
        pq.write_table(table, folder / f"{number}.parquet")
    return folder


def typed(kind, values=(1, 2), name="x"):
    return pa.table({"id": pa.array(range(len(values))), name: pa.array(values, kind)})


def rows_of(source):
    loader = ResumableParquetLoader(source, 2, shuffle=False, collate_fn=pa.Table.to_pylist)
    return [row for batch in loader for row in batch]


@pytest.mark.parametrize(
    ("first", "other", "said"),
    [
        (typed(pa.int32()), typed(pa.int64()), "'x' is int64, not int32"),
        (typed(pa.int64()), typed(pa.uint64()), "'x' is uint64, not int64"),
        (typed(pa.uint8()), typed(pa.int8()), "'x' is int8, not uint8"),
        (typed(pa.float32()), typed(pa.float64()), "'x' is double, not float"),
        (typed(pa.int64()), typed(pa.float64()), "'x' is double, not int64"),
        (typed(pa.int64()), typed(pa.string(), ["1", "2"]), "'x' is string, not int64"),
        (typed(pa.list_(pa.int32()), [[1], [2]]), typed(pa.list_(pa.int64()), [[1], [2]]), "list<"),
        (typed(pa.timestamp("ms")), typed(pa.timestamp("us")), r"timestamp\[us\]"),
        (typed(pa.int64()), typed(pa.int64()).drop_columns("x"), "'x' is missing"),
        (typed(pa.int64()).drop_columns("x"), typed(pa.int64()), "'x' is only here"),
        (typed(pa.int64(), name="X"), typed(pa.int64()), "'X' is missing; 'x' is only here"),
    ],
)
def test_files_of_other_columns_are_refused_with_file_column_and_types(
    tmp_path, first, other, said
):
    folder = written(tmp_path, first, first, other)
    with pytest.raises(ValueError, match=rf"2\.parquet has other columns than .*0\.parq.*{said}"):
        ParquetSource(folder)
    source = ParquetSource(folder, columns=["id"])  # what is read is alike
    assert [row["id"] for row in rows_of(source)] == [0, 1] * 3


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (typed(pa.int64()), typed(pa.int8())),
        (typed(pa.int64()), typed(pa.uint32())),
        (typed(pa.float64()), typed(pa.float32())),
        (typed(pa.string(), ["1", "2"]), typed(pa.large_string(), ["1", "2"])),
        (typed(pa.int64()), typed(pa.null(), [None, None])),
        (typed(pa.int64()), typed(pa.int64()).select(["x", "id"])),
        (typed(pa.int64()), typed(pa.int64()).replace_schema_metadata({"pandas": "{}"})),
    ],
)
def test_what_is_read_as_it_is_is_fine(tmp_path, first, other):
    source = ParquetSource(written(tmp_path, first, other))
    assert rows_of(source) == first.to_pylist() + other.select(["id", "x"]).to_pylist()


def test_files_without_rows_are_told_and_their_columns_do_not_count(tmp_path, caplog):
    empty = typed(pa.null(), [])
    folder = written(tmp_path, empty, typed(pa.string(), ["a", "b"]), empty)
    source = ParquetSource(folder)
    (record,) = caplog.records
    assert "2 of 3 files have no rows" in record.message
    assert "0.parquet" in record.message
    assert [row["x"] for row in rows_of(source)] == ["a", "b"]


def test_row_groups_without_rows_are_passed_over(tmp_path, caplog):
    table = typed(pa.int64())
    with pq.ParquetWriter(tmp_path / "0.parquet", table.schema) as writer:
        for part in (table, table.slice(0, 0), table):
            writer.write_table(part)
    assert len(ParquetSource(tmp_path)) == 4
    assert not caplog.records


def test_columns_of_folders_are_in_no_file(tmp_path):
    for year in (2024, 2025):
        (tmp_path / f"year={year}").mkdir()
        written(tmp_path / f"year={year}", typed(pa.int64()))
    assert [row["year"] for row in rows_of(ParquetSource(tmp_path))] == [2024] * 2 + [2025] * 2


@pytest.mark.parametrize("keep", [0, 3, 100, -5])
def test_a_file_that_is_cut_short_is_named(tmp_path, keep):
    folder = written(tmp_path, typed(pa.int64()), typed(pa.int64()))
    data = (folder / "1.parquet").read_bytes()
    (folder / "1.parquet").write_bytes(data[:keep])
    with pytest.raises(ValueError, match=r"1\.parquet"):
        ParquetSource(folder)


def test_what_is_no_parquet_is_named(tmp_path):
    folder = written(tmp_path, typed(pa.int64()))
    (folder / "notes.txt").write_text("x" * 100)
    with pytest.raises(ValueError, match=r"notes\.txt"):
        ParquetSource(folder)
