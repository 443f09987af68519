"""The record in ``.metadata``: decoded as it was encoded, refused if it contradicts itself."""

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.format.index import (
    FORMAT_VERSION,
    Columns,
    Lineage,
    Record,
    RecordError,
    RecordTooNew,
    decode,
    digest_starts,
    encode,
)

U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(max_size=12)


@st.composite
def records(draw):
    items = draw(
        st.lists(st.tuples(U64, st.integers(0, 300), st.integers(1, 100)), max_size=8)
    )  # offset, payload, block
    blocks = sum(-(-size // block) for _, size, block in items)
    lineage = st.builds(
        Lineage,
        run_id=TEXT,
        parent_step=st.none() | U64,
        abandons=st.dictionaries(TEXT, U64, max_size=3),
        abandons_folders=st.dictionaries(TEXT, TEXT, max_size=3),
    )
    return Record(
        attempt=draw(TEXT),
        world_size=draw(U64),
        files=draw(st.dictionaries(TEXT, U64, max_size=4)),
        columns=Columns(
            payload_offset=[item[0] for item in items],
            payload_bytes=[item[1] for item in items],
            block_bytes=[item[2] for item in items],
            digests=draw(st.lists(U64, min_size=blocks, max_size=blocks)),
        ),
        step=draw(st.none() | U64),
        lineage=draw(st.none() | lineage),
        written_by=draw(TEXT),
    )


def as_lists(record):
    columns = record.columns
    return (
        record.attempt,
        record.world_size,
        dict(record.files),
        record.step,
        record.lineage,
        record.written_by,
        record.digest_algorithm,
        list(columns.payload_offset),
        list(columns.payload_bytes),
        list(columns.block_bytes),
        list(columns.digests),
    )


def plain_record():
    return Record(
        attempt="0123456789ab",
        world_size=2,
        files={"a": 100, "b": 50},
        columns=Columns(
            payload_offset=[0, 64, 10],
            payload_bytes=[40, 33, 0],
            block_bytes=[16, 16, 16],
            digests=[1, 2, 3, 4, 5, 6],
        ),
        step=7,
        lineage=Lineage(run_id="run", parent_step=3, abandons={"other": 4}),
        written_by="a test",
    )


@given(record=records())
def test_a_record_is_decoded_as_it_was_encoded(record):
    assert as_lists(decode(encode(record))) == as_lists(record)


@given(record=records())
def test_equal_records_make_equal_bytes(record):
    again = decode(encode(record))
    assert pickle.dumps(encode(record)) == pickle.dumps(encode(again))


def test_it_is_made_of_plain_builtins_that_any_unpickler_takes():
    def plain(value):
        if type(value) is dict:
            return all(type(key) is str and plain(inner) for key, inner in value.items())
        return type(value) in (str, int, bytes, type(None))

    assert plain(encode(plain_record()))


def test_unknown_extra_keys_are_ignored():
    encoded = encode(plain_record()) | {"colour": object(), "columns2": b"x"}
    assert as_lists(decode(encoded)) == as_lists(plain_record())


def test_a_record_that_left_no_folder_behind_is_what_it_was_before_there_was_such_a_key():
    assert "abandons_folders" not in encode(plain_record())
    left = {"step_7": "ab" * 16}
    lineage = replace(plain_record().lineage, abandons_folders=left)
    encoded = encode(replace(plain_record(), lineage=lineage))
    assert encoded.pop("abandons_folders") == left
    assert encoded == encode(plain_record()), "readers that ignore the key read the rest"


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 10**6])
def test_a_newer_version_is_told_from_damage_and_named(version):
    encoded = {"format": version, "written_by": "dcp_checkfreq 9"}  # all else may have changed
    with pytest.raises(RecordTooNew, match="dcp_checkfreq 9"):
        decode(encoded)


@pytest.mark.parametrize("version", [0, -1, None, "1", 1.0, b"1", []])
def test_no_version_is_no_record(version):
    with pytest.raises(RecordError) as raised:
        decode(encode(plain_record()) | {"format": version})
    assert not isinstance(raised.value, RecordTooNew)


@pytest.mark.parametrize("data", [None, 1, "x", b"", [], ["format"], object()])
def test_what_is_no_dict_is_no_record(data):
    with pytest.raises(RecordError):
        decode(data)


@pytest.mark.parametrize("key", sorted(encode(plain_record())))
def test_a_missing_key_is_damage(key):
    encoded = encode(plain_record())
    del encoded[key]
    with pytest.raises(RecordError):
        decode(encoded)


@pytest.mark.parametrize("key", sorted(encode(plain_record())))
@pytest.mark.parametrize("value", [[], 1.5, object(), "text", b"odd", {1: 1}, -1, True])
def test_a_value_of_another_type_is_damage(key, value):
    if value == "text" and key in ("attempt", "written_by", "run_id", "digest"):
        return  # these are texts
    with pytest.raises(RecordError):
        decode(encode(plain_record()) | {key: value})


@pytest.mark.parametrize(
    "change",
    [
        {"payload_offset": bytes(8)},  # columns of different lengths
        {"payload_bytes": bytes(8 * 2)},
        {"block_bytes": bytes(4 * 3)},  # blocks of no bytes
        {"digests": bytes(8 * 5)},  # one digest short
        {"digests": bytes(8 * 7)},
        {"digests": bytes(8 * 6 + 1)},  # not whole numbers
        {"files": {"a": -1}},
        {"files": {"a": "1"}},
        {"files": {"a": True}},
        {"files": {1: 1}},
        {"files": {b"a": 1}},
        {"abandons": {"other": -1}},
        {"abandons": {"other": None}},
        {"abandons_folders": {"step_7": 1}},
        {"abandons_folders": {7: "x"}},
        {"abandons_folders": ["step_7"]},
        {"abandons_folders": None},
        {"world_size": "2"},
        {"world_size": None},
        {"step": -1},
        {"step": "7"},
        {"parent_step": 1.0},
        {"run_id": 5},
    ],
    ids=repr,
)
def test_a_contradiction_is_damage(change):
    with pytest.raises(RecordError):
        decode(encode(plain_record()) | change)


@given(record=records())
def test_each_item_finds_its_own_digests(record):
    starts = digest_starts(record.columns)
    assert starts[0] == 0
    assert starts[-1] == len(record.columns.digests)
    for start, stop, size, block in zip(
        starts,
        starts[1:],
        record.columns.payload_bytes,
        record.columns.block_bytes,
        strict=False,
    ):
        assert stop - start == len(range(0, size, block))
