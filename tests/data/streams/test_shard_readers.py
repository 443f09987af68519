"""Readers count right, and begin at any sample without making those before it."""

import gzip
import io
import itertools
import tarfile

import numpy as np
import pytest
from stream_tools import LAYOUTS, jsonl_bytes, npy_bytes, tar_bytes

from dcp_checkfreq.data.sources.shard_readers import MARK_EVERY, JsonLinesReader, NpyReader
from dcp_checkfreq.data.sources.shard_source import ShardSource
from dcp_checkfreq.data.sources.tar_reader import TarReader

COUNT = 2 * MARK_EVERY + 70


class Watched(io.BytesIO):
    """Counts the bytes that are read."""

    taken = 0

    def read(self, size=-1):
        data = super().read(size)
        self.taken += len(data)
        return data

    def __next__(self):
        line = super().__next__()
        self.taken += len(line)
        return line


@pytest.mark.parametrize("name", ["jsonl", "npy", "tar"])
@pytest.mark.parametrize(
    "start", [0, 1, MARK_EVERY - 1, MARK_EVERY, MARK_EVERY + 1, COUNT - 1, COUNT]
)
@pytest.mark.parametrize("with_marks", [True, False])
def test_a_reader_begins_at_any_sample(name, start, with_marks):
    _, to_bytes, reader, number = LAYOUTS[name]
    data = to_bytes(range(COUNT))
    layout = reader.scan(io.BytesIO(data))
    assert layout.samples == COUNT
    marks = layout.marks if with_marks else ()
    found = [number(reader.decode(s)) for s in reader.read(io.BytesIO(data), start, marks)]
    assert found == list(range(start, COUNT))


@pytest.mark.parametrize("name", ["jsonl", "npy", "tar"])
def test_with_marks_the_samples_before_are_not_read(name):
    _, to_bytes, reader, number = LAYOUTS[name]
    data = to_bytes(range(COUNT))
    file = Watched(data)
    start = 2 * MARK_EVERY + 3
    marks = reader.scan(io.BytesIO(data)).marks
    first = next(iter(reader.read(file, start, marks)))
    assert number(reader.decode(first)) == start
    assert file.taken < len(data) / 6


def test_scanning_a_tar_reads_no_contents():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number in range(5):
            member = tarfile.TarInfo(f"{number}.bin")
            member.size = 1 << 20
            tar.addfile(member, io.BytesIO(bytes(1 << 20)))
    watched = Watched(file.getvalue())
    assert TarReader().scan(watched).samples == 5
    assert watched.taken < 20_000


def test_a_tar_is_read_as_webdataset_has_it():
    file = io.BytesIO()
    long = "x" * 150  # needs headers of its own
    names = ["a/b.v1/001.jpg", "a/b.v1/001.seg.png", f"a/{long}.jpg", "a", "b/001.jpg", "b/001.cls"]
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            if name == "a":
                member.type = tarfile.DIRTYPE
            member.size = 0 if name == "a" else len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    samples = list(TarReader().read(io.BytesIO(file.getvalue()), 0, ()))
    assert samples == [
        {"__key__": "a/b.v1/001", "jpg": b"a/b.v1/001.jpg", "seg.png": b"a/b.v1/001.seg.png"},
        {"__key__": f"a/{long}", "jpg": names[2].encode()},
        {"__key__": "b/001", "jpg": b"b/001.jpg", "cls": b"b/001.cls"},
    ]
    assert TarReader().scan(io.BytesIO(file.getvalue())).samples == 3


def test_marks_of_a_tar_lie_before_long_names():
    data = tar_bytes(range(MARK_EVERY + 3), folder="y" * 120 + "/")
    layout = TarReader().scan(io.BytesIO(data))
    (sample, *_) = TarReader().read(io.BytesIO(data), MARK_EVERY, layout.marks)
    assert sample["__key__"] == "y" * 120 + f"/{MARK_EVERY:06}"


@pytest.mark.parametrize("cut", [1500, 700, 20])
def test_a_tar_that_is_cut_short_inside_of_a_file_is_an_error(cut):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number in range(3):
            member = tarfile.TarInfo(f"{number}.bin")
            member.size = 1400
            tar.addfile(member, io.BytesIO(b"1" * 1400))
    data = file.getvalue()[: 3 * 2048 - cut + (2048 - 512 - 1536)]
    with pytest.raises(tarfile.ReadError):
        TarReader().scan(io.BytesIO(data))


def test_lines_that_are_empty_are_no_samples():
    data = b'\n{"id": 1}\n  \n[2]\n\n3'
    reader = JsonLinesReader()
    assert reader.scan(io.BytesIO(data)).samples == 3
    assert list(map(reader.decode, reader.read(io.BytesIO(data), 0, ()))) == [{"id": 1}, [2], 3]


@pytest.mark.parametrize("shape", [(0, 3), (1,), (600,), (300, 2, 2)])
def test_rows_of_arrays_of_any_shape(shape):
    array = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    file = io.BytesIO()
    np.save(file, array)
    reader = NpyReader()
    assert reader.scan(io.BytesIO(file.getvalue())).samples == shape[0]
    for start in (0, shape[0] // 2):
        rows = list(reader.read(io.BytesIO(file.getvalue()), start, ()))
        assert np.array_equal(np.array(rows).reshape(-1, *shape[1:]), array[start:])
        assert all(row.flags.writeable for row in rows if row.ndim)


@pytest.mark.parametrize(
    "array",
    [np.array(3), np.array([[1, 2], [3, 4]], order="F"), np.array([{}, {}], dtype=object)],
)
def test_arrays_without_plain_rows_are_refused(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    with pytest.raises(ValueError, match="rows in C order"):
        NpyReader().scan(io.BytesIO(file.getvalue()))


def test_an_array_that_is_cut_short_is_an_error():
    data = npy_bytes(range(100))[:-50]
    with pytest.raises(EOFError, match="800 bytes were expected"):
        list(NpyReader().read(io.BytesIO(data), 0, ()))


@pytest.mark.parametrize(("suffix", "to_bytes", "reader"), [
    ("jsonl.gz", jsonl_bytes, JsonLinesReader()), ("tar.gz", tar_bytes, TarReader()),
    ("tgz", tar_bytes, TarReader()), ("npy.gz", npy_bytes, NpyReader()),
])  # fmt: skip
def test_compressed_shards_are_read_from_any_sample(tmp_path, suffix, to_bytes, reader):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(to_bytes(range(COUNT))))
    source = ShardSource([path], reader)
    assert source.sizes == [COUNT]
    with source.open(str(path)) as file:
        marks = source.shards[0].layout.marks
        samples = list(itertools.islice(reader.read(file, MARK_EVERY + 5, marks), 2))
    whole = list(reader.read(io.BytesIO(to_bytes(range(COUNT))), 0, ()))
    assert str(samples) == str(whole[MARK_EVERY + 5 : MARK_EVERY + 7])
