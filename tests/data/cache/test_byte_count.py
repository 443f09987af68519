import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.data.cache.byte_count import (
    decode,
    encode,
    locked_byte_count,
    peek,
)
from dcp_checkfreq.testing import ManualClock

BOOTS = st.text("0123456789abcdef-", min_size=2)
RECORDS = st.tuples(st.integers(0, 1 << 60), st.booleans(), BOOTS)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "books")


def byte_count_at(path, boot="here"):
    return locked_byte_count(path, boot, ManualClock(), 1.0)


@given(RECORDS)
def test_a_record_comes_back(record):
    assert decode(encode(*record)) == record


@given(RECORDS, st.data())
def test_no_damage_passes_for_a_record(record, data):
    content = bytearray(encode(*record))
    at = data.draw(st.integers(0, len(content) - 2))
    kind = data.draw(st.sampled_from(["cut", "flip", "zero"]))
    if kind == "cut":
        del content[at:]
    elif kind == "flip":
        content[at] ^= data.draw(st.integers(1, 255))
    else:
        content[at:] = bytes(len(content) - at)
    found = decode(bytes(content))
    assert found is None or found == record  # another case of a hex digit says the same


def test_a_new_file_is_not_trusted(path):
    with byte_count_at(path) as byte_count:
        assert byte_count.must_clear
        assert byte_count.must_count


def test_what_is_ended_is_found_and_seen_at_a_glance(path):
    with byte_count_at(path) as byte_count:
        byte_count.begin()
        byte_count.used_bytes = 123
    assert peek(path, "here") == 123
    with byte_count_at(path) as byte_count:
        assert (byte_count.used_bytes, byte_count.must_count, byte_count.must_clear) == (
            123,
            False,
            False,
        )


def test_what_was_begun_and_not_ended_must_be_counted(path):
    with byte_count_at(path) as byte_count:
        byte_count.begin()
    with pytest.raises(KeyError):
        fail_with_a_change_begun(path)
    assert peek(path, "here") is None
    with byte_count_at(path) as byte_count:
        assert byte_count.must_count
        assert not byte_count.must_clear


def fail_with_a_change_begun(path):
    with byte_count_at(path) as byte_count:
        byte_count.begin()
        raise KeyError


def test_a_record_of_another_boot_is_not_trusted(path):
    with byte_count_at(path) as byte_count:
        byte_count.begin()
    assert peek(path, "there") is None
    with byte_count_at(path, boot="there") as byte_count:
        assert byte_count.must_clear


def test_only_one_has_the_byte_count(path):
    with byte_count_at(path), pytest.raises(TimeoutError), byte_count_at(path):
        pass
