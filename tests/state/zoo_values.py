"""Plain values of every kind, and how to tell whether one came back as it was."""

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import http
import io
import ipaddress
import math
import pathlib
import random
import re
import signal
import struct
import threading
import types
import typing
import uuid
import zoneinfo

import numpy as np
import torch


class Color(enum.Enum):
    RED = 1
    BLUE = ("b", 2)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 9


class Name(str, enum.Enum):
    A = "a"


class Access(enum.Flag):
    READ = 1
    WRITE = 2
    BOTH = 3


class Bits(enum.IntFlag):
    ONE = 1
    FOUR = 4


Point = collections.namedtuple("Point", "x y")


class Typed(typing.NamedTuple):
    name: str
    at: Point = Point(0, 0)


class Sorted(collections.namedtuple("Sorted", "x y")):
    """Its own way to be made is not asked: what was saved was in order already."""

    __slots__ = ()

    def __new__(cls, x, y):
        raise AssertionError("code of the user's ran")


@dataclasses.dataclass
class Config:
    lr: float
    where: pathlib.Path
    more: list = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.more.append("made")


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int


@dataclasses.dataclass(slots=True)
class Slots:
    x: int
    y: object


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    x: int
    y: object


@dataclasses.dataclass
class Derived(Config):
    last: int = 3


@dataclasses.dataclass
class WithState:
    x: int

    def __setstate__(self, state):
        raise AssertionError("code of the user's ran")


@dataclasses.dataclass
class WithNew:
    x: int

    def __new__(cls, *args):
        return object.__new__(cls)


class Plain:
    def __init__(self):
        self.x = 1


class OwnDict(dict):
    pass


def shared():
    inner = [1, {2}]
    return {"a": inner, "b": (inner, inner), "c": collections.deque([inner])}


def deep(make, levels=50):
    value = "end"
    for _ in range(levels):
        value = make(value)
    return value


def with_attributes():
    made = collections.OrderedDict(w=1)
    made._metadata = {"": {"version": 2}}
    return made


def used(generator, take):
    take(generator)
    return generator


def advanced_torch():
    generator = torch.Generator()
    generator.manual_seed(5)
    torch.rand(7, generator=generator)
    return generator


def spawned():
    generator = np.random.default_rng(3)
    generator.spawn(2)
    return generator


def numpy_arrays():
    names = [
        "?",
        "b",
        "B",
        "h",
        "H",
        "i",
        "I",
        "l",
        "L",
        "q",
        "Q",
        "e",
        "f",
        "d",
        "g",
        "F",
        "D",
        "G",
    ]
    return {name: np.arange(6).reshape(2, 3).astype(name) for name in names}


KEYS = {
    None: 0,
    True: 1,
    2: 2,
    2.5: 3,
    "2": 4,
    b"x": 5,
    (1, ("a", None)): 6,
    frozenset({1, "a", ("b",)}): 7,
    Color.RED: 8,
    Level.HIGH: 9,
    Point(1, (2, Color.BLUE)): 10,
    pathlib.PurePosixPath("a/b"): 11,
    datetime.date(2026, 1, 2): 12,
    decimal.Decimal("1.50"): 13,
    fractions.Fraction(1, 3): 14,
    uuid.UUID(int=5): 15,
    torch.float32: 16,
    torch.Size([2]): 17,
    1 + 2j: 18,
    range(3): 19,
    np.float64(7.5): 20,
    ipaddress.ip_address("::1"): 21,
    Access.READ: 22,
    1 << 3000: 23,
    math.inf: 24,
    int: 25,
}

EXACT = {
    "None": lambda: None,
    "bool": lambda: [True, False],
    "int": lambda: [0, -1, 1 << 63, -(1 << 64)],
    "huge int": lambda: [1 << 5000, -(1 << 9000), {1 << 4000}],
    "float": lambda: [0.1, -0.0, math.inf, -math.inf, 5e-324],
    "nan": lambda: (math.nan, struct.unpack("<d", b"\1\0\0\0\0\0\xf8\xff")[0]),
    "complex": lambda: [1 + 2j, complex(-0.0, math.inf)],
    "str": lambda: ["", "ä\0\n", "\U0001f600"],
    "half a character": lambda: "a\ud800b",
    "huge str": lambda: "xyz" * 100_000,
    "bytes": lambda: [b"", bytes(range(256))],
    "bytearray": lambda: bytearray(range(256)),
    "empty bytearray": lambda: [bytearray()],
    "list": lambda: [[], [1, [2]]],
    "tuple": lambda: ((), (1,), (1, (2, [3]))),
    "set": lambda: [set(), {1}, {1, "a", None, (2, "b"), 2.5}],
    "set of texts": lambda: {"a", "b", "c", "d"},
    "frozenset": lambda: frozenset({frozenset(), frozenset({"x", 1})}),
    "set of paths": lambda: {pathlib.PurePosixPath("a"), Color.RED},
    "dict": lambda: {"b": 1, "a": {}},
    "keys of every kind": lambda: dict(KEYS),
    "empty key": lambda: {"": 1, ".": 2, "a.b": 3, "/": 4},
    "keys alike as text": lambda: {1: "a", "1": "b", (1,): "c", "(1,)": "d"},
    "OrderedDict": lambda: collections.OrderedDict([("b", 1), ("a", {2})]),
    "OrderedDict of paths": lambda: collections.OrderedDict([(Color.RED, pathlib.Path("x"))]),
    "OrderedDict with attributes": with_attributes,
    "defaultdict": lambda: collections.defaultdict(list, {1: [2]}),
    "defaultdict without a factory": lambda: collections.defaultdict(None, a=1),
    "defaultdict of Counters": lambda: collections.defaultdict(
        collections.Counter, {"a": collections.Counter("xxy")}
    ),
    "deque": lambda: collections.deque([1, (2,), [3]], maxlen=5),
    "empty deque": lambda: [collections.deque(), collections.deque(maxlen=0)],
    "Counter": lambda: collections.Counter("hello"),
    "Counter of enums": lambda: collections.Counter([Color.RED, Color.RED]),
    "ChainMap": lambda: collections.ChainMap({"a": 1}, {"a": 2, "b": [3]}),
    "SimpleNamespace": lambda: types.SimpleNamespace(a=1, b=types.SimpleNamespace(c={2})),
    "mappingproxy": lambda: types.MappingProxyType({"a": [1]}),
    "namedtuple": lambda: Point(1, [Point(2, "x")]),
    "NamedTuple": lambda: Typed("a", Point(1, 2)),
    "namedtuple with its own way to be made": lambda: tuple.__new__(Sorted, (1, 2)),
    "dataclass": lambda: Config(0.1, pathlib.Path("a"), [1]),
    "frozen dataclass": lambda: Frozen(3),
    "dataclass with slots": lambda: Slots(1, [Frozen(2)]),
    "frozen dataclass with slots": lambda: FrozenSlots(1, {"a": (Frozen(2),)}),
    "derived dataclass": lambda: Derived(0.1, pathlib.Path("b")),
    "Enum": lambda: [Color.RED, Color.BLUE],
    "IntEnum": lambda: {"level": Level.HIGH},
    "str Enum": lambda: Name.A,
    "Flag": lambda: [Access.READ, Access.BOTH, Access.READ | Access.WRITE, Access(0)],
    "IntFlag": lambda: [Bits.ONE | Bits.FOUR, Bits(0)],
    "enums of the library": lambda: [http.HTTPStatus.OK, signal.SIGTERM, re.I | re.M],
    "Path": lambda: [pathlib.Path("/a/b"), pathlib.PurePath("x"), pathlib.PureWindowsPath("c:/x")],
    "datetime": lambda: datetime.datetime(2026, 1, 2, 3, 4, 5, 6),  # noqa: DTZ001
    "datetime in UTC": lambda: datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
    "datetime of a zone, said twice": lambda: datetime.datetime(
        2026, 10, 25, 2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"), fold=1
    ),
    "fold": lambda: [datetime.datetime(2026, 1, 2, fold=1), datetime.time(3, fold=1)],  # noqa: DTZ001
    "date": lambda: datetime.date(2026, 1, 2),
    "time": lambda: datetime.time(1, 2, 3, 4, datetime.timezone(datetime.timedelta(hours=1))),
    "timedelta": lambda: datetime.timedelta(days=-1, microseconds=7),
    "timezone": lambda: datetime.timezone(datetime.timedelta(hours=2), "x"),
    "ZoneInfo": lambda: zoneinfo.ZoneInfo("America/New_York"),
    "Decimal": lambda: [decimal.Decimal(one) for one in ("1.500", "-0", "NaN", "sNaN12", "1E+99")],
    "Fraction": lambda: fractions.Fraction(-22, 7),
    "UUID": lambda: uuid.UUID("12345678123456781234567812345678"),
    "range": lambda: [range(10), range(5, 1, -2), range(10**12)],
    "slice": lambda: [slice(1, None, 2), slice("a", "b")],
    "array": lambda: [array.array(code, [1, 2, 3]) for code in "bBhHiIlLqQfd"],
    "array of characters": lambda: array.array("u", "aä\U0001f600"),
    "ellipsis": lambda: [..., NotImplemented],
    "addresses": lambda: [
        *(ipaddress.ip_address("10.0.0.1"), ipaddress.ip_address("fe80::1%eth0")),
        *(ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_interface("10.1.2.3/8")),
    ],
    "numpy scalars": lambda: [
        *(np.float32(0.1), np.int8(-3), np.bool_(True), np.complex64(1j), np.float16(2)),
        *(np.datetime64("2026-01-02"), np.timedelta64(5, "s"), np.str_("x"), np.bytes_(b"y")),
    ],
    "numpy arrays": numpy_arrays,
    "numpy 0-d, empty and in F order": lambda: [
        *(np.array(3.5), np.zeros((0, 3)), np.asfortranarray(np.arange(6).reshape(2, 3))),
    ],
    "numpy views": lambda: [np.arange(10)[::2], np.arange(6).reshape(2, 3).T, np.arange(4)[::-1]],
    "numpy big-endian, texts, dates": lambda: [
        *(np.arange(3, dtype=">i4"), np.array(["a", "bcd"]), np.array([b"x"])),
        np.array(["2026-01-02"], "datetime64[D]"),
    ],
    "numpy objects": lambda: np.array([1, "a", None], dtype=object),
    "numpy dtype": lambda: [np.dtype("f4"), np.dtype(">i2")],
    "numpy Generator": lambda: used(np.random.default_rng(3), lambda one: one.integers(9, size=3)),
    "numpy bit generators": lambda: [
        used(np.random.Generator(kind(7)), lambda one: one.random(5, dtype=np.float32))
        for kind in (
            *(np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox),
            np.random.SFC64,
        )
    ],
    "numpy Generator that has spawned": spawned,
    "numpy RandomState": lambda: used(np.random.RandomState(3), lambda one: one.normal(size=3)),
    "random.Random": lambda: used(random.Random(3), lambda one: one.gauss(0, 1)),
    "states of generators": lambda: {
        "python": random.Random(1).getstate(),
        "numpy": np.random.RandomState(1).get_state(),
        "torch": torch.Generator().get_state(),
    },
    "torch.dtype": lambda: [torch.float32, torch.float8_e4m3fn, torch.uint16],
    "torch.device": lambda: [torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")],
    "torch.Size": lambda: torch.Size([2, 3]),
    "torch.layout": lambda: [torch.strided, torch.sparse_coo, torch.sparse_bsc],
    "torch.memory_format": lambda: [torch.channels_last, torch.contiguous_format],
    "torch.qscheme": lambda: torch.per_channel_affine,
    "torch.Generator": advanced_torch,
    "torch.return_types": lambda: torch.max(torch.arange(6.0).reshape(2, 3), 0),
    "BytesIO": lambda: io.BytesIO(b"abc"),
    "classes of builtins": lambda: [int, dict, str],
    "nested 50 deep": lambda: deep(lambda one: [{"x": (one,)}], 17),
    "deques 50 deep": lambda: deep(lambda one: collections.deque([one])),
    "dataclasses 50 deep": lambda: deep(Frozen),
    "shared": shared,
    "like a tag": lambda: [
        *(("__dcp_checkfreq_kind__", "int", "3"), ("__dcp_checkfreq_kind__",)),
        *(("__dcp_checkfreq_tensor__", 0), ("__dcp_checkfreq_tensor__", torch.zeros(9000))),
        {("__dcp_checkfreq_kind__", "path"): 1},
    ],
    "like a packed value": lambda: {"tree": (1, "__dcp_checkfreq_tagged_1__"), "tensors": []},
    "a tree and tensors": lambda: {"tree": ({"a": 1},), "tensors": [torch.ones(9000)]},
}

REFUSED = {
    "memoryview": (lambda: memoryview(b"x"), "memoryview"),
    "lock": (threading.Lock, "_thread.lock"),
    "generator": (lambda: (x for x in ()), "generator"),
    "lambda": (lambda: lambda: 1, "function"),
    "function": (lambda: shared, "function"),
    "partial": (lambda: functools.partial(int, base=2), "partial"),
    "module": (lambda: math, "module"),
    "class of the user's": (lambda: Plain, "type"),
    "object of the user's": (Plain, "zoo_values.Plain"),
    "dict of the user's": (lambda: OwnDict(a=1), "zoo_values.OwnDict"),
    "dataclass with its own state": (lambda: WithState(1), "zoo_values.WithState"),
    "dataclass with its own new": (lambda: WithNew(1), "zoo_values.WithNew"),
    "dataclass of a function": (
        lambda: dataclasses.make_dataclass("Here", ["x"])(1),
        "Here",
    ),
    "defaultdict of a lambda": (lambda: collections.defaultdict(lambda: 1), "defaultdict"),
    "regular expression": (lambda: re.compile("a+"), "re.Pattern"),
    "numpy records": (lambda: np.zeros(2, [("a", "i4"), ("b", "f4")]), "numpy.ndarray"),
    "text file in memory": (lambda: io.StringIO("x"), "StringIO"),
    "exception": (lambda: ValueError("x"), "ValueError"),
    "frozen dataclass as a key": (lambda: {Frozen(1): 2}, "dict"),
    "holds itself": (lambda: (lambda one: one.append(one) or one)([]), "list"),
    "holds itself in a deque": (
        lambda: (lambda one: one.append(one) or one)(collections.deque()),
        "deque",
    ),
}


def _in_order(value):
    """Return a text that shows types as `repr` does, and sets in one order."""
    if isinstance(value, (set, frozenset, tuple)):
        inner = list(map(_in_order, value))
        return f"{type(value)}{inner if isinstance(value, tuple) else sorted(inner)}"
    return repr(value)


def differs(a, b, at="value"):
    """Return the path of a difference in type, order, value or bits; None if there is none."""
    if type(a) is not type(b):
        return f"{at}: {type(a)} is {type(b)}"
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return None if same else at
    if isinstance(a, float):
        return None if struct.pack("<d", a) == struct.pack("<d", b) else at
    if isinstance(a, complex):
        return differs((a.real, a.imag), (b.real, b.imag), at)
    if isinstance(a, np.ndarray):
        # numpy's own pickles keep no other order of bytes than the machine's, and no steps.
        same = a.dtype.newbyteorder("=") == b.dtype and a.shape == b.shape
        same = same and a.tolist() == b.tolist()
        is_packed = a.flags.f_contiguous or a.flags.c_contiguous
        return None if same and b.flags.f_contiguous >= (is_packed and a.flags.f_contiguous) else at
    if isinstance(a, np.generic):
        return None if a.dtype == b.dtype and a.tobytes() == b.tobytes() else at
    if isinstance(a, (set, frozenset)):
        return None if a == b and _in_order(a) == _in_order(b) else at
    if isinstance(a, (dict, types.MappingProxyType)):
        found = differs(list(a.items()), list(b.items()), at)
        for name in ("default_factory", "__dict__"):
            found = found or differs(getattr(a, name, None), getattr(b, name, None), at + name)
        return found
    if isinstance(a, collections.ChainMap):
        return differs(a.maps, b.maps, at)
    if isinstance(a, (list, tuple, collections.deque)):
        if len(a) != len(b) or getattr(a, "maxlen", 0) != getattr(b, "maxlen", 0):
            return f"{at}: {len(a)}, {len(b)}"
        pairs = zip(a, b, strict=True)
        found = (differs(*pair, f"{at}.{n}") for n, pair in enumerate(pairs))
        return next((one for one in found if one), None)
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        names = [field.name for field in dataclasses.fields(a)]
        return differs(
            [getattr(a, name) for name in names], [getattr(b, name) for name in names], at
        )
    if isinstance(a, types.SimpleNamespace):
        return differs(vars(a), vars(b), at)
    if isinstance(a, torch.Generator):
        return differs((a.device, a.get_state()), (b.device, b.get_state()), at)
    if isinstance(a, random.Random):
        return differs(a.getstate(), b.getstate(), at)
    if isinstance(a, np.random.RandomState):
        return differs(a.get_state(legacy=False), b.get_state(legacy=False), at)
    if isinstance(a, np.random.Generator):
        seeds = [one.bit_generator.seed_seq.state for one in (a, b)]
        return differs(a.bit_generator.state, b.bit_generator.state, at) or differs(*seeds, at)
    if isinstance(a, io.BytesIO):
        return differs((a.getvalue(), a.tell()), (b.getvalue(), b.tell()), at)
    if isinstance(a, (datetime.datetime, datetime.time)):
        return None if repr(a) == repr(b) else at
    if isinstance(a, decimal.Decimal):
        return None if str(a) == str(b) else at
    return None if a == b or a is b else at
