"""Digests of values that are alike wherever a value is, and paths of what differs in them."""

import collections
import dataclasses
import enum
import math
import pathlib
import pickle
import struct

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner

from dcp_checkfreq.errors import ReplicasDiffer
from dcp_checkfreq.state.packed import pack
from dcp_checkfreq.state.replica_paths import MOST_PARTS, differences_of, look_into, text_of_path
from dcp_checkfreq.state.value_digests import value_digest


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Point:
    x: object
    y: object = 0


class Plain:
    def __init__(self, **fields):
        vars(self).update(fields)


class Names(set):
    pass


Pair = collections.namedtuple("Pair", "left right")


def twice(make):
    """Return what is one object twice, and what is two equal ones."""
    one = make()
    return [one, one], [make(), make()]


def other_nan():
    return struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]


SAME = {
    "order of keys": ({"a": 1, "b": [2]}, {"b": [2], "a": 1}),
    "order of keys of many types": ({1: "x", "1": "y", None: 0}, {None: 0, "1": "y", 1: "x"}),
    "order below": ([{"a": {"x": 1, "y": 2}}], [{"a": {"y": 2, "x": 1}}]),
    "a text that is one object": twice(lambda: "".join(["ad", "am"])),
    "a list that is one object": twice(lambda: [1, {"a": 2}]),
    "an array that is one object": twice(lambda: np.arange(3)),
    "a set that has grown": ({1, 2, 64}, {64, 2, 1}),
    "a set of tuples": ({(8, "x"), (16, "x")}, {(16, "x"), (8, "x")}),
    "a set in an object": (Plain(names={8, 16, 0}), Plain(names={0, 16, 8})),
    "a set of one's own": (Names([8, 16, 0]), Names([0, 16, 8])),
    "a defaultdict": (
        collections.defaultdict(int, {"a": 1, "b": 2}),
        collections.defaultdict(int, {"b": 2, "a": 1}),
    ),
    "a counter": (collections.Counter("aab"), collections.Counter("baa")),
    "NaN": ([math.nan], [float("nan")]),
    "a tensor of NaN": (torch.full((3,), math.nan), torch.full((3,), math.nan)),
    "a view and what it shows": (torch.arange(9)[::2], torch.tensor([0, 2, 4, 6, 8])),
    "a path": (pathlib.PurePosixPath("/a") / "b", pathlib.PurePosixPath("/a/b")),
}
OTHER = {
    "a number and a truth value": (1, True),
    "a number and a float": (1, 1.0),
    "zeros": (0.0, -0.0),
    "bits of NaN": (math.nan, other_nan()),
    "a list and a tuple": ([1], (1,)),
    "texts and bytes": ("a", b"a"),
    "keys of other types": ({1: 0}, {"1": 0}),
    "nested otherwise": ([[1], 2], [[1, 2]]),
    "sets": ({1, 2}, {1, 3}),
    "a set and a frozen one": ({1}, frozenset([1])),
    "order of an OrderedDict": (
        collections.OrderedDict(a=1, b=2),
        collections.OrderedDict(b=2, a=1),
    ),
    "order of an OrderedDict in tags": (
        pack(collections.OrderedDict(a={1, 2}, b=2)),
        pack(collections.OrderedDict(b=2, a={1, 2})),
    ),
    "a dict and a Counter": ({"a": 1}, collections.Counter("a")),
    "enums": (Colour.RED, Colour.BLUE),
    "dataclasses": (Point(1), Point(2)),
    "objects": (Plain(a=1), Plain(a=2)),
    "arrays": (np.arange(3), np.arange(3, dtype=np.int32)),
    "dtypes": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "shapes": (torch.zeros(2), torch.zeros(1, 2)),
    "functions": (len, max),
    "classes": (int, str),
    "dtypes of torch": (torch.float32, torch.float16),
    "sparse tensors": (torch.ones(2).to_sparse(), torch.tensor([1.0, 2.0]).to_sparse()),
}


@pytest.mark.parametrize("name", SAME)
def test_a_value_has_one_digest(name):
    one, other = SAME[name]
    assert value_digest(one) == value_digest(other)
    assert value_digest({"in": (one,)}) == value_digest({"in": (other,)})


@pytest.mark.parametrize("name", OTHER)
def test_other_values_have_other_digests(name):
    one, other = OTHER[name]
    assert value_digest(one) != value_digest(other)
    assert value_digest({"in": (one,)}) != value_digest({"in": (other,)})


def test_what_is_in_a_value_many_times_is_looked_at_once():
    value = Point(0)
    for _ in range(60):
        value = [value, {"again": value}]
    assert value_digest(value) == value_digest(value)


def test_what_holds_itself_has_a_digest():
    one, other, longer = Plain(a=1), Plain(a=1), Plain(a=2)
    one.me, other.me, longer.me = one, other, longer
    assert value_digest(one) == value_digest(other) != value_digest(longer)


def test_what_is_nested_deeper_than_this_can_look_has_a_digest_as_long_as_it_has_a_pickle():
    def nested(inner):
        for _ in range(320):
            inner = (inner,)
        return inner

    assert value_digest(nested(1)) == value_digest(nested(1)) != value_digest(nested(2))


# --- paths ---


def flattened(state):
    """Return a state and the paths of its keys, as DCP's planners have them."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    return planner.state_dict, planner.mappings


def found(first, *others, only=None):
    """Save the states as ranks would, up to the comparison; return paths with what is there."""
    flat = [flattened({key: pack(part) for key, part in one.items()})
            for one in (first, *others)]  # fmt: skip
    digests = [{key: value_digest(value) for key, value in state.items()} for state, _ in flat]
    keys = sorted(
        {key for one in digests for key in one if any(one[key] != d.get(key, one[key])
                                                      for d in digests)}
    )  # fmt: skip
    views = [
        look_into(state, paths, own, keys)
        for (state, paths), own in zip(flat, digests, strict=True)
    ]
    views = pickle.loads(pickle.dumps(views))
    told = differences_of(list(enumerate(views)))
    error = ReplicasDiffer("there", keys, [[0, 1]] * len(keys), told)
    assert pickle.loads(pickle.dumps(error)).differences == error.differences
    return {path: [text for _, text in held] for path, held in told}


def test_the_four_of_twenty_five_fields_are_named_with_their_values():
    def state(rank):
        fields = {f"field_{n}": {"value": [n, n / 2], "name": f"n{n}"} for n in range(21)}
        return {
            **fields,
            "seen_samples": 640 + 32 * rank,
            "hooks": [{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3 + rank}],
            "host": f"node-{rank}",
            "last": Point(Colour.RED, (1, 2 + rank)),
        }

    assert found({"trainer": state(0)}, {"trainer": state(1)}) == {
        "trainer.seen_samples": ["640", "672"],
        "trainer.hooks[2].lr": ["0.3", "1.3"],
        "trainer.host": ["'node-0'", "'node-1'"],
        "trainer.last.y[1]": ["2", "3"],
    }


PLACES = {
    "a key that one lacks": ({"a": 1, "b": 2}, {"a": 1}, {"p.b": ["2", "nothing"]}),
    "a longer list": ({"a": [1]}, {"a": [1, 7]}, {"p.a[1]": ["nothing", "7"]}),
    "other types": ({"a": [1]}, {"a": {"x": 1}},
                    {"p.a[0]": ["1", "nothing"], "p.a.x": ["nothing", "1"]}),
    "two kinds of one content": ([1, 2], (1, 2), {"p": ["a list", "a tuple"]}),
    "a value and a container": ({"a": 1}, {"a": [1]}, {"p.a": ["1", "a list"]}),
    "keys that are no names": ({3: 0, "a.b": 0, (1, "x"): 0, Colour.RED: 0},
                               {3: 1, "a.b": 1, (1, "x"): 1, Colour.RED: 1},
                               {"p[3]": ["0", "1"], "p['a.b']": ["0", "1"],
                                "p[(1, 'x')]": ["0", "1"], "p[Colour.RED]": ["0", "1"]}),
    "a set": ({"s": {"b", "a"}}, {"s": {"a", "c"}}, {"p.s": ["{'a', 'b'}", "{'a', 'c'}"]}),
    "a named tuple": (Pair(1, {"x": 2}), Pair(1, {"x": 3}), {"p.right.x": ["2", "3"]}),
    "a deque": ({"d": collections.deque([1, 2], 5)}, {"d": collections.deque([1, 3], 5)},
                {"p.d[1]": ["2", "3"]}),
    "a small tensor": ({"t": torch.tensor(1.5)}, {"t": torch.tensor(2.5)},
                       {"p.t": ["tensor(1.5)", "tensor(2.5)"]}),
    "a path": ({"f": pathlib.PurePosixPath("/a")}, {"f": pathlib.PurePosixPath("/b")},
               {"p.f": ["PurePosixPath('/a')", "PurePosixPath('/b')"]}),
    "an array": ({"n": np.arange(3)}, {"n": np.arange(1, 4)}, {"p.n": ["a ndarray"] * 2}),
    "a value itself": (1000, 1001, {"p": ["1000", "1001"]}),
    "zeros": ({"z": 0.0}, {"z": -0.0}, {"p.z": ["0.0", "-0.0"]}),
    "order": (collections.OrderedDict(a=1, b={2}), collections.OrderedDict([("b", {2}), ("a", 1)]),
              {"p": ["a OrderedDict"] * 2}),
    "a Parameter": ({"w": torch.nn.Parameter(torch.ones(2))}, {"w": torch.ones(2)},
                    {"p": ["", ""]}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_paths_are_those_of_the_program(name):
    one, other, paths = PLACES[name]
    assert found({"p": one}, {"p": other}) == paths


def test_large_tensors_are_named_by_where_they_are_in_the_value():
    def state(size):
        return {"ema": {"a": torch.ones(9_000), "b": torch.ones(9_000) * size}, "decay": 0.9}

    differing = found({"p": state(1)}, {"p": state(2)})
    assert differing == {"p.ema.b": ["a tensor of shape [9000]"] * 2}


def test_the_content_of_tensors_that_are_not_compared_is_not_looked_at():
    state = {"w": torch.ones(9_000, device="meta"), "seen": 1}
    flat, paths = flattened({"p": pack(state)})
    other, _ = flattened({"p": pack({"w": torch.zeros(9_000), "seen": 2})})
    views = [
        look_into(one, paths, {"p.tree": number}, ["p.tree"])
        for number, one in enumerate((flat, other))
    ]
    assert [path for path, _ in differences_of(list(enumerate(views)))] == ["p.seen"]


def test_of_several_ranks_each_path_is_named_once_with_two_that_differ():
    states = [{"p": {"a": a, "b": b}} for a, b in ((1, 1), (1, 2), (5, 1))]
    assert found(*states) == {"p.b": ["1", "2"], "p.a": ["1", "5"]}


def test_what_is_told_is_bounded_and_what_is_cut_is_named_by_what_holds_it():
    deep = {f"k{n}": {"x": list(range(40))} for n in range(MOST_PARTS // 10)}
    other = {key: dict(value) for key, value in deep.items()}
    other["k499"]["x"] = [*range(39), 0]
    flat, paths = flattened({"p": pack(deep)})
    [view] = look_into(flat, paths, {"p.tree": 1}, ["p.tree"]).values()
    assert len(pickle.dumps(view)) < 100 * MOST_PARTS
    assert list(found({"p": deep}, {"p": other})) == ["p.k499.x"]
    numbers = list(range(MOST_PARTS))
    assert found({"p": {"n": numbers}}, {"p": {"n": [*numbers[:-1], 0]}}) == {
        "p.n": [f"a list of {MOST_PARTS}"] * 2
    }


def test_a_value_that_is_there_many_times_has_no_more_paths_than_can_be_read():
    def state(rank):
        value = {"leaf": rank}
        for _ in range(40):
            value = {"a": value, "b": value}
        return {"p": value}

    assert 0 < len(found(state(0), state(1))) <= MOST_PARTS


def test_keys_of_dcp_are_told_as_programs_write_them():
    assert text_of_path(("optim", "param_groups", 1, "lr")) == "optim.param_groups[1].lr"


def test_the_text_names_the_first_paths_and_counts_the_others():
    held = [(f"p.f{n}", [(0, "1"), (3, "2")]) for n in range(14)]
    text = str(ReplicasDiffer("/runs", ["p.tree"], [[0, 3]], held))
    assert "p.f0 (rank 0: 1, rank 3: 2), p.f1" in text
    assert "and 4 more" in text
    assert "p.f10" not in text
    assert "PerRank" in text
    same = str(ReplicasDiffer("/runs", ["w"], [[0, 1]], [("w", [(0, "a list"), (1, "a list")])]))
    assert "values of w;" in same
