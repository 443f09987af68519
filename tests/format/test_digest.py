"""Digests: the same as xxhash in one piece, and no changed byte goes unseen."""

import random

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.format.digest import (
    MAX_BLOCK_BYTES,
    MIN_BLOCK_BYTES,
    block_bytes,
    digest,
    first_bad_block,
)

SIZES = st.integers(0, 1 << 45)


@given(size=SIZES)
def test_a_block_is_a_power_of_two_within_its_bounds(size):
    block = block_bytes(size)
    assert MIN_BLOCK_BYTES <= block <= MAX_BLOCK_BYTES
    assert block & (block - 1) == 0


@given(one=SIZES, other=SIZES)
def test_a_larger_payload_never_has_a_smaller_block(one, other):
    small, large = sorted((one, other))
    assert block_bytes(small) <= block_bytes(large)


@given(size=st.integers(0, 128 << 20))
def test_a_payload_below_the_largest_block_has_few_digests(size):
    assert size / block_bytes(size) <= 64


@pytest.mark.parametrize(
    "size",
    [0, 1, 239, 240, 241, 65_535, 65_536, 65_537, 131_072, 131_073, 1 << 20, (4 << 20) + 5],
)
def test_a_digest_is_xxh3_of_the_bytes_in_one_piece(size):
    data = random.Random(size).randbytes(size)
    assert digest(data) == xxhash.xxh3_64_intdigest(data)
    assert digest(memoryview(bytearray(data))) == xxhash.xxh3_64_intdigest(data)


@given(data=st.data(), size=st.integers(1, 5000), block=st.integers(1, 2000))
def test_a_flipped_bit_at_any_place_is_found_in_its_block(data, size, block):
    content = bytearray(random.Random(size).randbytes(size))
    expected = [digest(content[at : at + block]) for at in range(0, size, block)]
    assert first_bad_block(memoryview(content), block, expected) is None
    at = data.draw(st.integers(0, size - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    assert first_bad_block(memoryview(content), block, expected) == at // block


@pytest.mark.parametrize("at", [0, 65_535, 65_536, 200_000, 262_143, 262_144, 300_000])
def test_a_flipped_bit_in_a_block_that_is_fed_in_pieces_is_found(at):
    block = 256 << 10
    content = bytearray(random.Random(3).randbytes(300_001))
    expected = [digest(content[start : start + block]) for start in range(0, len(content), block)]
    content[at] ^= 0x10
    assert first_bad_block(memoryview(content), block, expected) == at // block


def test_an_empty_payload_has_nothing_to_fail():
    assert block_bytes(0) == MIN_BLOCK_BYTES
    assert first_bad_block(memoryview(b""), MIN_BLOCK_BYTES, []) is None
