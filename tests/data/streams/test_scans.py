"""What a scan of shards can see, it judges: refused with file and member, told, or passed over."""

import gzip
import io
import json
import tarfile

import numpy as np
import pytest
from stream_tools import jsonl_bytes, npy_bytes, tar_bytes

from dcp_checkfreq.data import (
    JsonLinesReader,
    NpyReader,
    ResumableStreamLoader,
    ShardSource,
    TarReader,
)
from dcp_checkfreq.data.sources.shard_readers import MARK_EVERY


def packed(*members, format=tarfile.PAX_FORMAT):
    """A tar of (name, data), (name, link kind, target) or (name, kind)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as tar:
        for name, *rest in members:
            info = tarfile.TarInfo(name)
            data = b""
            if len(rest) == 2:
                info.type, info.linkname = rest
            elif isinstance(rest[0], str):
                data = rest[0].encode()
                info.size = len(data)
            else:
                info.type = rest[0]
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def source_of(tmp_path, data, name="a.tar", reader=None, **options):
    (tmp_path / name).write_bytes(data)
    return ShardSource(str(tmp_path / name), reader or TarReader(), **options)


def samples_of(source, **options):
    loader = ResumableStreamLoader(source, 4, shuffle=False, collate_fn=list, **options)
    return [sample for batch in loader for sample in batch]


PAIR = [("1.jpg", "a"), ("1.cls", "1")]
REFUSED = {
    "a name twice": ([*PAIR, ("1.jpg", "b")], "1.jpg is in it twice"),
    "a name twice, apart": ([*PAIR, ("2.jpg", "b"), ("1.jpg", "b")], "1.jpg is in it twice"),
    "a name twice, written otherwise": ([*PAIR, ("./1.jpg", "b")], "./1.jpg is in it twice"),
    "a link and a file": ([*PAIR, ("1.cls", tarfile.LNKTYPE, "1.jpg")], "1.cls is in it twice"),
    "by kind": ([("1.a", "x"), ("2.a", "x"), ("1.b", "x"), ("2.b", "x")],
                r"1.b lies apart .* \(number 0\)"),
    "apart by a folder": ([("d/1.a", "x"), ("e/1.a", "x"), ("d/1.b", "x")], "d/1.b lies apart"),
    "a link out of it": ([*PAIR, ("2.jpg", tarfile.SYMTYPE, "../9.jpg")], "2.jpg is a link to"),
    "a link to nothing": ([*PAIR, ("2.jpg", tarfile.LNKTYPE, "9.jpg")], "2.jpg is a link to 9.jpg"),
    "a link to a folder": ([("d", tarfile.DIRTYPE), ("1.jpg", tarfile.SYMTYPE, "d")], "no file"),
    "a ring of links": ([("1.a", tarfile.SYMTYPE, "1.b"), ("1.b", tarfile.SYMTYPE, "1.a")], "link"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("where", ["a.tar", "a.tar.gz"])
def test_a_tar_whose_samples_cannot_be_told_apart_is_refused_with_file_and_member(
    tmp_path, name, where
):
    members, said = REFUSED[name]
    data = packed(*members)
    with pytest.raises(ValueError, match=f"shard .*/{where}: .*{said}"):
        source_of(tmp_path, gzip.compress(data) if where.endswith("gz") else data, where)


PASSED_OVER = [
    [("._1.jpg", "mac"), *PAIR, ("._1.cls", "mac")],
    [*PAIR[:1], ("._1.cls", "mac"), *PAIR[1:]],
    [(".DS_Store", "x"), *PAIR, ("__MACOSX/._1.jpg", "x")],
    [("d", tarfile.DIRTYPE), *PAIR, ("d.jpg", tarfile.DIRTYPE)],
    [*PAIR, ("pipe.jpg", tarfile.FIFOTYPE)],
    [("._x", "a"), ("._x", "b"), *PAIR],
]


@pytest.mark.parametrize("members", PASSED_OVER)
def test_what_is_of_no_sample_is_passed_over(tmp_path, members, caplog):
    (sample,) = samples_of(source_of(tmp_path, packed(*members)))
    assert sample == {"__key__": "1", "jpg": b"a", "cls": b"1"}
    assert not caplog.records


@pytest.mark.parametrize("start", [0, 1, MARK_EVERY, MARK_EVERY + 5])
def test_links_in_it_are_read_as_what_they_lead_to_from_any_place(start):
    members = [("shared/x.txt", "one for all")]
    for number in range(MARK_EVERY + 9):
        members += [(f"s/{number:05}.id", str(number)),
                    (f"s/{number:05}.hard", tarfile.LNKTYPE, "shared/x.txt"),
                    (f"s/{number:05}.soft", tarfile.SYMTYPE, "../shared/x.txt"),
                    (f"s/{number:05}.soft2", tarfile.SYMTYPE, f"{number:05}.soft")]  # fmt: skip
    data = packed(*members)
    layout = TarReader().scan(io.BytesIO(data))
    assert layout.samples == MARK_EVERY + 10
    for marks in (layout.marks, ()):
        found = list(TarReader().read(io.BytesIO(data), start + 1, marks))
        assert [int(sample["id"]) for sample in found] == list(range(start, MARK_EVERY + 9))
        texts = {sample[kind] for sample in found for kind in ("hard", "soft", "soft2")}
        assert texts == {b"one for all"}


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar_that_is_cut_at_any_place_is_refused_or_told(tmp_path, format, caplog):
    data = packed(*[(f"{n}.jpg", "x" * 700) for n in range(4)], format=format)
    end = 4 * (512 + 1024)
    for cut in range(512, end + 1024, 256):
        if cut % 1536 and cut < end:
            with pytest.raises(ValueError, match=r"a\.tar: "):
                source_of(tmp_path, data[:cut])
            continue
        caplog.clear()
        if end < cut < end + 512:
            with pytest.raises(ValueError, match="there should be a header"):
                source_of(tmp_path, data[:cut])
            continue
        assert len(source_of(tmp_path, data[:cut])) == min(4, cut // 1536)
        assert ("without the mark of an end" in caplog.text) == (cut <= end)


def test_a_header_that_is_damaged_in_the_middle_is_no_end(tmp_path):
    data = bytearray(packed(*[(f"{n}.jpg", "x") for n in range(4)]))
    data[2 * 1024 + 5] ^= 0xFF
    with pytest.raises(ValueError, match=r"a\.tar: at byte 2048 there should be a header"):
        source_of(tmp_path, data)


def test_archives_one_after_the_other_are_refused(tmp_path):
    data = packed(("1.jpg", "x")) + packed(("2.jpg", "x"))
    with pytest.raises(ValueError, match="more behind its end"):
        source_of(tmp_path, data)


def test_zeros_behind_the_end_are_fine(tmp_path, caplog):
    assert len(source_of(tmp_path, packed(("1.jpg", "x")) + bytes(3 << 20))) == 1
    assert not caplog.records


@pytest.mark.parametrize(
    "data", [b"", b"no tar" * 200, gzip.compress(b"x")], ids=["empty", "text", "gzip"]
)
def test_what_is_no_tar_is_named(tmp_path, data):
    with pytest.raises(ValueError, match=r"shard .*/a\.tar: "):
        source_of(tmp_path, data)


@pytest.mark.parametrize(
    ("name", "make", "reader"),
    [("a.tar.gz", tar_bytes, TarReader()), ("a.jsonl.gz", jsonl_bytes, JsonLinesReader()),
     ("a.npy.gz", npy_bytes, NpyReader())],
)  # fmt: skip
def test_a_compressed_shard_that_is_cut_or_damaged_is_named(tmp_path, name, make, reader):
    data = gzip.compress(make(range(40)))
    for wrong in (data[: len(data) // 2], data[:-6] + b"000000", b"\x1f\x8b" + b"x" * 50):
        with pytest.raises(ValueError, match=f"shard .*/{name}: "):
            source_of(tmp_path, wrong, name, reader)
    assert len(source_of(tmp_path, data, name, reader)) == 40


def test_samples_that_lack_a_file_are_told_once_for_a_shard(tmp_path, caplog):
    members = [
        (f"{n}.{kind}", "x") for n in range(5) for kind in ("jpg", "cls") if (n, kind) != (3, "cls")
    ]
    source = source_of(tmp_path, packed(*members))
    assert len(source) == 5
    (record,) = caplog.records
    assert "a.tar: 4 of 5 samples have cls, jpg, the others have not: 3 has jpg" in record.message


def test_many_odd_shards_are_told_in_a_few_lines(tmp_path, caplog):
    for number in range(20):
        data = packed(("1.jpg", "x"), ("2.png", "x")) if number % 2 else packed()
        (tmp_path / f"{number:02}.tar").write_bytes(data)
    source = ShardSource(f"{tmp_path}/*.tar", TarReader())
    assert len(source) == 20
    assert len(caplog.records) == 5 + 1 + 1
    assert "5 shards more" in caplog.text
    assert "10 of 20 shards are empty" in caplog.text
    assert "18.tar" not in caplog.text


def test_an_index_of_before_is_scanned_anew(tmp_path):
    """It was made by scans that judged nothing: a sample that lies apart counted as two."""
    members, _ = REFUSED["by kind"]
    data = packed(*members)
    index = {"format": 1, "mark_every": MARK_EVERY, "shards": {"a.tar": [len(data), 4, [0]]}}
    (tmp_path / "index").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="lies apart"):
        source_of(tmp_path, data, index=tmp_path / "index")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"i": 1}\n{"i": 2\n{"i": 3}\n', "line 2 is no whole JSON value"),
        ('{"i": 1}\n{"i": 2}\n{"i": "cut he', "line 3 is no whole JSON value"),
        ("[1, 2]\n[1,\n", "line 2"),
        ('{"i": 1}\n\n\nid,name\n', "line 4"),
        ('"x\n', "line 1"),
        ("{\n}\n", "line 1"),
        ('<html>{"i": 1}</html>', "line 1"),
        ("\ufeff\ufeff{}", "line 1"),
    ],
)
def test_a_line_that_is_no_whole_json_is_refused_with_its_number(tmp_path, text, said):
    with pytest.raises(ValueError, match=rf"shard .*/a\.jsonl: {said}"):
        source_of(tmp_path, text.encode(), "a.jsonl", JsonLinesReader())
    with pytest.raises(ValueError, match="line 1"):
        source_of(tmp_path, text.encode("utf-16"), "b.jsonl", JsonLinesReader())


@pytest.mark.parametrize(
    "value", [{}, [], "", 0, -1.5, 1e300, True, False, None, float("nan"), float("-inf"),
              float("inf"), {"a": "}"}, "]", "\u2028"]
)  # fmt: skip
def test_all_values_that_json_has_are_lines(tmp_path, value):
    text = f" {json.dumps(value)}\r\n\n" * 3
    source = source_of(tmp_path, text.encode(), "a.jsonl", JsonLinesReader())
    assert [repr(found) for found in samples_of(source)] == [repr(value)] * 3


def test_what_only_decoding_shows_has_its_line_in_the_text(tmp_path):
    source = source_of(tmp_path, b'{"i": 1}\n{"i": 1,}\n', "a.jsonl", JsonLinesReader())
    with pytest.raises(ValueError, match=r'in the line .*"i": 1,'):
        samples_of(source)


def test_arrays_that_are_cut_or_one_after_the_other_are_refused(tmp_path):
    data = npy_bytes(range(40))
    assert len(source_of(tmp_path, data, "a.npy", NpyReader())) == 40
    with pytest.raises(ValueError, match=r"shard .*/a\.npy: its header says 40 rows.*cut short"):
        source_of(tmp_path, data[:-1], "a.npy", NpyReader())
    file = io.BytesIO(data)
    file.seek(0, 2)
    np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match="several arrays"):
        source_of(tmp_path, file.getvalue(), "a.npy", NpyReader())


def test_an_error_of_a_function_that_reads_has_the_path(tmp_path):
    with pytest.raises(ValueError, match=r"shard .*/a\.txt: invalid literal"):
        source_of(tmp_path, b"1\nx\n", "a.txt", lambda file: map(int, file))


def test_errors_of_storage_stay_what_they_are(tmp_path):
    with pytest.raises(FileNotFoundError):
        ShardSource([str(tmp_path / "none.tar")], TarReader())
    with pytest.raises(ValueError, match="named more than once"):
        ShardSource([str(tmp_path / "a.tar")] * 2, TarReader())
