"""What is left of a pickle after `without_dicts` cannot hash, call or take more than its size."""

import collections
import io
import pickle
import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_checkfreq.format.opcodes import DICT_MARK, OddPickle, next_opcode, without_dicts

LEAVES = st.none() | st.booleans() | st.floats() | st.binary(max_size=300) | st.text(max_size=300)
LEAVES = LEAVES | st.integers(-(2**120), 2**120)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=30,
)


class Marks(pickle.Unpickler):
    def find_class(self, module, name):
        return (module, name)


def read(content):
    return Marks(io.BytesIO(content)).load()


def as_pairs(value):
    """Return a value as it reads with its dicts told by a mark; a tuple may stand for a pair."""
    if isinstance(value, dict):
        return [DICT_MARK, *((k, as_pairs(v)) for k, v in value.items())]
    if isinstance(value, (list, tuple)):
        return type(value)(map(as_pairs, value))
    return value


def in_pairs(value):
    if isinstance(value, list) and value[:1] == [DICT_MARK]:
        left, pairs = iter(value[1:]), []
        for key in left:
            key, inner = key[:2] if isinstance(key, tuple) else (key, next(left))
            pairs.append((key, in_pairs(inner)))
        return [DICT_MARK, *pairs]
    if isinstance(value, (list, tuple)):
        return type(value)(map(in_pairs, value))
    return value


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
@given(value=VALUES)
def test_any_value_reads_the_same_but_for_its_dicts(protocol, value):
    # From 3 on: before, bytes were calls.
    rewritten = without_dicts(pickle.dumps(value, protocol), tell_dicts=True)
    assert repr(in_pairs(read(rewritten))) == repr(as_pairs(value))


@given(value=VALUES)
def test_the_expression_of_python_3_10_does_the_same(value):
    content = pickle.dumps(value)
    patterns = [next_opcode(possessive=False)]
    if sys.version_info >= (3, 11):
        patterns.append(next_opcode(possessive=True))
    assert len({without_dicts(content, pattern=pattern) for pattern in patterns}) == 1


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65_535, 65_536, 10**6])
@pytest.mark.parametrize("protocol", [3, 4])
def test_texts_and_bytes_of_any_size_keep_the_step(size, protocol):
    value = ["}us]." * (size // 5), b"}us]." * (size // 5), ["after"]]
    assert read(without_dicts(pickle.dumps(value, protocol))) == value


def test_what_follows_the_end_is_left_out():
    content = pickle.dumps([1, 2])
    assert without_dicts(content + b"anything at all") == without_dicts(content)


def memo_of(number):
    return b"\x80\x04Nr" + struct.pack("<I", number) + b"."


@pytest.mark.parametrize(
    "content",
    [
        memo_of(2**32 - 1),  # 32 GiB of memo
        memo_of(1000),
        b"\x80\x04\x8b\xff\xff\xff\x7f",  # LONG4
        b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b".",  # BINBYTES8
        b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b".",  # BINUNICODE8
        b"\x80\x04\x96" + struct.pack("<Q", 2**62) + b".",  # BYTEARRAY8
        b"\x80\x04B\xff\xff\xff\xff.",  # BINBYTES beyond the end
        b"\x80\x04X\xff\xff\xff\xff.",
        b"\x80\x04\x8c\xffshort.",
        b"\x80\x04\x8a\xff" + bytes(255) + b".",  # a number of 255 bytes
        b"]" * 5000 + b".",
        b"}" * 5000 + b".",
        b"N2.",  # DUP
        b"N0.",  # POP
        b"(1.",
        b"\x8f(K\x01\x90.",  # sets
        b"(K\x01\x91.",
        b"(ios\nsystem\n.",  # INST
        b"(cos\nsystem\no.",
        b"Pfoo\n.",  # persistent ids
        b"NQ.",
        b"\x82\x01.",  # registered extensions
        b"I1\n.",
        b"L1L\n.",
        b"F1\n.",
        b"S'x'\n.",
        b"Vx\n.",
        b"g0\n.",
        b"Np0\n.",
        b"c" + b"a" * 1000 + b"\nb\n.",
        b"",
        b"N",
        b"\x80",
    ],
    ids=lambda content: repr(content[:24]),
)
def test_opcodes_that_no_metadata_needs_are_refused(content):
    with pytest.raises(OddPickle) as caught:
        without_dicts(content)
    assert len(str(caught.value)) < 200


def test_a_pickle_never_hashes_once_it_was_rewritten():
    hashed = collections.Counter()

    class Counted:
        def __hash__(self):
            hashed["times"] += 1
            return 1

    class Making(pickle.Unpickler):
        def find_class(self, module, name):
            return Counted

    one = b"c__main__\nx\n)\x81"
    content = b"\x80\x04}(" + one + b"N" + one + b"Nu" + one + b"Ns."
    Making(io.BytesIO(content)).load()
    assert hashed["times"], "the test proves nothing"
    hashed.clear()
    Making(io.BytesIO(without_dicts(content))).load()
    assert not hashed
