"""Byte items that would take any memory or time are refused for their few bytes, as broken."""

import collections
import datetime
import io
import pickle
import random
import struct
import time
import zipfile

import numpy as np
import pytest
import torch
from metadata_tools import Calls

from dcp_checkfreq.errors import BrokenShard, LoadFailed, UnsafePickle
from dcp_checkfreq.format.safe_bytes import load_object, load_tensor


def archive(content, *, method=zipfile.ZIP_STORED, more=(), comment=b""):
    """Return an archive as `torch.save` writes it, with this pickle in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/byteorder", b"little")
        file.writestr("archive/version", b"3\n")
        for name, data in more:
            file.writestr(name, data)
        file.comment = comment
    return out.getvalue()


def load(data):
    return load_object(io.BytesIO(data), "a key", "/runs/step_7", allow_pickle=False)


def calls(function, *arguments):
    return archive(pickle.dumps(Calls(function, *arguments), protocol=2))


def shared_tuples(depth, *, as_key):
    content = b"\x80\x02K\x01\x85q\x00"
    for n in range(depth):
        content += b"0" * 0 + b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1])
    last = b"h" + bytes([depth])
    return content + (b"}" + last + b"Ns." if as_key else last + b".")


def nested(depth, *, as_key):
    content = b")" + b"\x85" * depth
    return b"\x80\x02" + (b"}" + content + b"Ns." if as_key else content + b".")


def colliding(count):
    keys = b"".join(
        b"\x8a\x0a" + (n * (2**61 - 1)).to_bytes(10, "little", signed=True) + b"N"
        for n in range(1, count)
    )
    return b"\x80\x02}(" + keys + b"u."


def dtype_of_pointers(*, name, flags):
    dtype = b"cnumpy\ndtype\nX" + struct.pack("<I", len(name)) + name.encode() + b"\x89\x88\x87R"
    return b"\x80\x02" + dtype + b"(K\x03X\x01\x00\x00\x00|NNNK\x08K\x08K" + bytes([flags]) + b"tb."


BOMBS = {
    "bytearray of a number": lambda: calls(bytearray, 10**13),
    "bytes of a number": lambda: calls(bytes, 10**13),
    "set of a range": lambda: calls(set, range(10**10)),
    "list of a range": lambda: calls(list, range(10**10)),
    "tuple of a range": lambda: calls(tuple, range(10**10)),
    "counter of a range": lambda: calls(collections.Counter, range(10**10)),
    "frozenset of a range": lambda: calls(frozenset, range(10**10)),
    "array of any size": lambda: calls(np.ndarray, (10**13,)),
    "tensor of any size": lambda: calls(torch.Tensor, 10**13),
    "storage of any size": lambda: calls(torch.UntypedStorage, 10**13),
    "text of shared lists": lambda: calls(str, shared_lists(60)),
    "number of shared lists": lambda: calls(int, shared_lists(60)),
    "a key of 2**200 parts": lambda: archive(shared_tuples(200, as_key=True)),
    "a key 10**6 deep": lambda: archive(nested(10**6, as_key=True)),
    "10**6 deep": lambda: archive(nested(10**6, as_key=False)),
    "colliding keys": lambda: archive(colliding(50_000)),
    "pointers by flags": lambda: archive(dtype_of_pointers(name="f8", flags=63)),
    "pointers by halves of flags": lambda: archive(dtype_of_pointers(name="O8", flags=1)),
    "compressed": lambda: archive(
        b"\x80\x02N." + bytes(1 << 26),
        method=zipfile.ZIP_DEFLATED,
    ),
    "a comment behind it": lambda: archive(b"\x80\x02N.", comment=b"PK\x05\x06" + bytes(18)),
    "bytes before it": lambda: b"PK\x03\x04" + archive(b"\x80\x02N."),
    "the legacy format": lambda: legacy(torch.ones(3)),
    "opcodes of later protocols": lambda: archive(pickle.dumps([1, {2: 3}], protocol=4)),
    "a whole number of 5000 digits": lambda: calls(int, "9" * 5000),
    "cut pickle": lambda: archive(b"\x80\x02]q\x00(K\x01"),
    "no pickle": lambda: archive(b""),
}


def shared_lists(depth):
    inner = ["x"]
    for _ in range(depth):
        inner = [inner, inner]
    return inner


def legacy(value):
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


@pytest.mark.parametrize("name", BOMBS)
def test_it_is_refused_soon_and_with_a_short_text(name):
    data = BOMBS[name]()
    begun = time.process_time()
    with pytest.raises(LoadFailed, match="a key") as caught:
        load(data)
    assert time.process_time() - begun < 3
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "value",
    [
        io.BytesIO(b"some bytes"),
        {"deep": [io.BytesIO(b"")]},
        {(n, str(n)): n for n in range(5000)},
        {n: None for n in range(100_000)},
        set(range(5000)),
        range(10**12),
        [[[[[[1]]]]]] * 3,
        {"a": np.array(["ab", None, [1]], dtype=object)},
        [np.zeros((2, 0, 3), dtype=kind) for kind in ("?", "i1", "u8", "f2", "c16", "S3", "U2")],
        [np.ones(3, dtype=kind) for kind in ("<i4", "<f8", "f4", "c8", "?", "V3")],
        np.array(["2026-01-02", "NaT"], dtype="M8[3D]"),
        [np.datetime64("2026-01-02"), np.timedelta64(5, "s"), np.str_("ab"), np.bytes_(b"x")],
        np.random.RandomState(1).get_state(),
        random.Random(1).getstate(),
        [datetime.timedelta(seconds=1)] * 100,
        bytes(100_000),
        bytearray(100_000),
        "ä" * 100_000,
        [torch.arange(9.0)[2:5], torch.ones(2, 3).t()],
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_large_or_odd_and_harmless_still_loads(value):
    out = io.BytesIO()
    torch.save(value, out)
    loaded = load(out.getvalue())
    shown = [repr(v.getvalue()) if isinstance(v, io.BytesIO) else repr(v) for v in (value, loaded)]
    if not isinstance(value, dict) or "deep" not in value:
        assert shown[0] == shown[1]


def test_records_of_numpy_need_trust():
    out = io.BytesIO()
    torch.save(np.zeros(3, dtype=[("a", "f8"), ("b", "i4")]), out)
    with pytest.raises(UnsafePickle, match="allow_pickle"):
        load(out.getvalue())
    assert len(load_object(io.BytesIO(out.getvalue()), "k", "here", allow_pickle=True)) == 3


STATE = (3, "<", None, None, None, -1, -1, 0)


@pytest.mark.parametrize(
    "state",
    [
        STATE[:2] + STATE[3:],  # one field less: this ended the process
        (*STATE, None),
        (*STATE[:5], 100, -1, 0),  # elements of 100 bytes, so they say
        (*STATE[:5], 1, 1, 0),
        (*STATE[:7], 63),
        (2, *STATE[1:]),
        (3, "<", None, ("a",), {"a": 1}, -1, -1, 0),
        (3, "<", (1, 2), None, None, -1, -1, 0),
        "text",
        None,
    ],
    ids=str,
)
def test_a_dtype_with_another_state_is_refused(state):
    class Dtype:
        def __reduce__(self):
            return np.dtype, ("f8", False, True), state

    if state is None:  # pickle leaves it out
        content = pickle.dumps(np.dtype("f8"), protocol=2)[:-1] + b"Nb."
    else:
        content = pickle.dumps(Dtype(), protocol=2)
    with pytest.raises(LoadFailed):
        load(archive(content))


@pytest.mark.parametrize(
    "change", [{1: (-1, -3)}, {1: (2**62, 4)}, {1: (10**9,)}, {2: 5}, {4: [1, 2, 3]}, {4: "abc"}]
)
def test_an_array_with_another_state_is_refused(change):
    function, arguments, state = np.zeros(3).__reduce__()
    parts = list(state)
    for at, value in change.items():
        parts[at] = value

    class Array:
        def __reduce__(self):
            return function, arguments, tuple(parts)

    with pytest.raises(LoadFailed):
        load(archive(pickle.dumps(Array(), protocol=2)))


def test_where_a_tensor_should_be_nothing_else_is_taken():
    def saved(value):
        out = io.BytesIO()
        torch.save(value, out)
        return bytearray(out.getvalue())

    size = torch.Size([2, 3])
    assert load_tensor(saved(torch.ones(2, 3)), size, "w", "here").shape == size
    for other in (torch.ones(3), torch.ones(1), {"a": 1}, None, Calls(print, "x")):
        with pytest.raises(BrokenShard, match="'w'"):
            load_tensor(saved(other), size, "w", "here")
