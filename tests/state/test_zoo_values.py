"""Plain values of every kind: what comes back is what was saved, or it is refused by its key.

The table is `zoo_values.py`. ``pytest tests/state/test_zoo_values.py`` tries every row through
`Checkpointer`: alone, and all in one state.
"""

import collections
import pathlib
import random
import sys
import types

import numpy as np
import pytest
import torch
import zoo_values
from torch.distributed import checkpoint as dcp
from zoo_values import EXACT, REFUSED, Color, Config, Point, differs

from dcp_checkfreq import Checkpointer, UnsafePickle, UnsupportedState, find_latest_valid
from dcp_checkfreq.errors import CheckFreqError
from dcp_checkfreq.state.packed import pack
from dcp_checkfreq.state.unpacked import unpack


def save(root, parts):
    with Checkpointer(root, parts, every=1000) as ckpt:
        ckpt.step = 1
        ckpt.save(wait=True)


def restored(root, parts, **options):
    with Checkpointer(root, parts, every=1000, **options) as ckpt:
        ckpt.restore()
    return parts


@pytest.mark.parametrize("name", EXACT)
def test_a_value_comes_back_as_what_it_was(tmp_path, name):
    save(tmp_path, {"alone": EXACT[name](), "inner": {"deep": [(EXACT[name](),)]}})
    parts = restored(tmp_path, {"alone": None, "inner": None})
    assert differs(EXACT[name](), parts["alone"]) is None
    assert differs(EXACT[name](), parts["inner"]["deep"][0][0]) is None


def test_all_of_them_in_one_state_and_again(tmp_path):
    every = {name: make() for name, make in EXACT.items()}
    save(tmp_path / "1", {"all": every})
    once = restored(tmp_path / "1", {"all": None})["all"]
    assert differs(every, once) is None
    save(tmp_path / "2", {"all": once})
    assert differs(every, restored(tmp_path / "2", {"all": 3})["all"]) is None


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_come_back_is_refused_with_its_key_when_registered(tmp_path, name):
    make, kind = REFUSED[name]
    with pytest.raises(UnsupportedState) as caught:
        Checkpointer(tmp_path, {"job": {"fine": 1, "bad": [make()]}}, every=1000)
    assert caught.value.key.startswith("job.bad.0")
    assert kind in str(caught.value)
    assert list(tmp_path.glob("step*")) == []


def test_what_needs_code_comes_back_if_that_is_allowed(tmp_path):
    part = {"own": zoo_values.OwnDict(a=Color.RED), "path": pathlib.Path("x")}
    with Checkpointer(tmp_path, {"job": part}, every=1000, allow_pickle=True) as ckpt:
        ckpt.step = 1
        ckpt.save(wait=True)
    parts = restored(tmp_path, {"job": None}, allow_pickle=True)
    assert differs(part, parts["job"]) is None


# --- what is in it twice ---


def test_what_is_in_a_value_twice_is_one_object_afterwards(tmp_path):
    save(tmp_path, {"job": zoo_values.shared()})
    value = restored(tmp_path, {"job": None})["job"]
    assert value["a"] is value["b"][0] is value["b"][1] is value["c"][0]


@pytest.mark.parametrize("size", [3, 9000])
def test_a_tensor_that_is_in_a_value_twice_is_one_tensor_afterwards(tmp_path, size):
    weight = torch.nn.Parameter(torch.rand(size))
    save(tmp_path, {"job": {"tied": [weight, {"x": weight}]}})
    first, second = restored(tmp_path, {"job": None})["job"]["tied"]
    assert first is second["x"]
    assert type(first) is torch.nn.Parameter
    assert torch.equal(first, weight)


def test_two_processes_pack_the_same_set_alike():
    items = [f"item {n}" for n in range(50)]
    assert pack(set(items)) == pack(set(reversed(items)))
    assert pack({8, 0, 16}) == pack({16, 0, 8})


# --- generators are set where they are ---


GENERATORS = {
    "torch": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda g: torch.rand(3, generator=g),
    ),
    "python": (random.Random, lambda g: torch.tensor(g.random())),
    "numpy": (np.random.default_rng, lambda g: torch.tensor(g.random(3))),
    "old numpy": (np.random.RandomState, lambda g: torch.tensor(g.normal(size=3))),
}


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("place", ["alone", "in a dict"])
def test_who_holds_a_generator_goes_on_with_what_was_saved(tmp_path, kind, place):
    make, draw = GENERATORS[kind]
    wrap = (lambda one: {"x": [1, (one,)]}) if place == "in a dict" else (lambda one: one)
    live = make(5)
    draw(live)
    save(tmp_path, {"rng": wrap(live)})
    expected = draw(live)
    fresh = make(6)
    restored(tmp_path, {"rng": wrap(fresh)})
    assert torch.equal(draw(fresh), expected)


# --- classes of the user's ---


@pytest.fixture
def module():
    made = types.ModuleType("zoo_values_of_a_user")
    exec(  # a module that can be taken away again
        "import collections, dataclasses, enum\n"
        "class Mode(enum.Enum):\n    A = 1\n"
        "Pair = collections.namedtuple('Pair', 'a b')\n"
        "@dataclasses.dataclass\nclass Data:\n    x: int\n",
        made.__dict__,
    )
    sys.modules[made.__name__] = made
    yield made
    sys.modules.pop(made.__name__, None)


OWN = {
    "Enum": lambda module: module.Mode.A,
    "namedtuple": lambda module: module.Pair(1, 2),
    "dataclass": lambda module: module.Data(1),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_class_is_never_imported_for_a_checkpoint(tmp_path, kind, module):
    save(tmp_path, {"job": {"own": OWN[kind](module)}})
    del sys.modules[module.__name__]
    with pytest.raises(CheckFreqError, match=r"zoo_values_of_a_user.*import it first"):
        restored(tmp_path, {"job": None})


CHANGED = {
    "Enum": "import enum\nclass Mode(enum.Enum):\n    B = 1\n",
    "namedtuple": "import collections\nPair = collections.namedtuple('Pair', 'a b c')\n",
    "dataclass": "import dataclasses as d\n@d.dataclass\nclass Data:\n    x: int\n    z: int\n",
}


@pytest.mark.parametrize("kind", OWN)
def test_a_class_that_has_changed_since_is_refused(tmp_path, kind, module):
    save(tmp_path, {"job": {"own": OWN[kind](module)}})
    exec(CHANGED[kind], module.__dict__)
    with pytest.raises(CheckFreqError, match="zoo_values_of_a_user"):
        restored(tmp_path, {"job": None})


def test_no_code_of_a_class_runs_when_it_is_made(tmp_path):
    save(tmp_path, {"job": [Config(0.1, pathlib.Path("a"), [])]})
    (back,) = restored(tmp_path, {"job": None})["job"]
    assert back.more == ["made"]  # and not once more


# --- other readers ---


def test_values_without_tags_are_saved_as_they_always_were(tmp_path):
    value = {"a": (1, [torch.ones(9000), 2.5]), 3: {"x"}, "c": collections.Counter("ab")}
    assert pack(value)["tree"] == (
        {
            "a": (1, [("__dcp_checkfreq_tensor__", 0), 2.5]),
            3: {"x"},
            "c": collections.Counter("ab"),
        },
    )


def test_what_older_versions_have_saved_is_read_as_they_meant_it():
    tree = ({"like": ("__dcp_checkfreq_kind__", "int", "3"), "w": ("__dcp_checkfreq_tensor__", 0)},)
    weight = torch.ones(3)
    assert unpack({"tree": tree, "tensors": [weight]}) == {
        "like": ("__dcp_checkfreq_kind__", "int", "3"),
        "w": weight,
    }


def test_stock_readers_see_the_tags_as_plain_tuples(tmp_path):
    save(tmp_path, {"job": {"at": Point(1, pathlib.PurePosixPath("x"))}})
    state = {"job": {"tree": (), "tensors": []}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(find_latest_valid(tmp_path).path))
    (tree, _) = state["job"]["tree"]
    assert tree["at"][:2] == ("__dcp_checkfreq_kind__", "namedtuple")
    assert tree["at"][-1] == (1, ("__dcp_checkfreq_kind__", "path", "PurePosixPath", "x"))


def test_the_module_parts_of_a_state_may_be_of_any_kind(tmp_path):
    class Net(torch.nn.Linear):
        def __init__(self, extra):
            super().__init__(2, 2)
            self.extra = extra

        def get_extra_state(self):
            return self.extra

        def set_extra_state(self, state):
            self.extra = state

    extra = (Color.RED, collections.deque([1], 3), torch.ones(9000))
    save(tmp_path, {"net": Net(extra)})
    net = restored(tmp_path, {"net": Net(None)})["net"]
    assert differs(extra, net.extra) is None


def test_the_error_for_a_class_that_is_missing_says_where_and_what(tmp_path, module):
    save(tmp_path, {"job": {"own": module.Mode.A}})
    path = find_latest_valid(tmp_path).path
    del sys.modules[module.__name__]
    with (
        Checkpointer(tmp_path, {"job": None}, every=1000) as ckpt,
        pytest.raises(CheckFreqError) as caught,
    ):
        ckpt.restore()
    assert "job.tree" in str(caught.value)
    assert str(path) in str(caught.value)
    assert "UnsafePickle" in repr(caught.value) or isinstance(caught.value, UnsafePickle)
