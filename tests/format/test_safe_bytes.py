"""Byte items: what training states hold comes back, what would run code is refused and not run."""

import collections
import datetime
import io
import math
import os
import random
import signal

import numpy as np
import pytest
import torch

from dcp_checkfreq.errors import LoadFailed, UnsafePickle
from dcp_checkfreq.format import safe_bytes
from dcp_checkfreq.format.safe_bytes import load_object


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def load(value, *, allow_pickle=False):
    return load_object(saved(value), "a key", "/runs/step_7", allow_pickle=allow_pickle)


PLAIN = [
    None, True, 0, -1, 2**63, -(2**200), 1.5, math.inf, "", "ä\n", b"", b"\x00\xff",
    bytearray(b"x"), 1 + 2j, (), (1, (2, "x")), [], [None, [1]], {}, {1: "int key", "1": 2},
    {(1, 2): 3}, {1, 2}, frozenset({1}), collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.Counter("hello"), range(1, 9, 2), slice(1, 2),
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6), datetime.date(2026, 1, 2),  # noqa: DTZ001
    datetime.timedelta(days=1, seconds=2), torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{type(value).__name__} {value!r}"[:40])
def test_a_plain_value_comes_back_as_it_was(value):
    loaded = load(value)
    assert loaded == value
    assert type(loaded) is type(value)


def test_nan_comes_back():
    assert math.isnan(load({"loss": math.nan})["loss"])


def test_the_order_of_an_ordered_dict_comes_back():
    assert list(load(collections.OrderedDict([("b", 1), ("a", 2)]))) == ["b", "a"]


@pytest.mark.parametrize(
    "value",
    [collections.deque([1, 2], maxlen=5), collections.defaultdict(list, {"a": [1]})],
    ids=["deque", "defaultdict"],
)
def test_containers_that_torch_cannot_fill_safely_are_refused_by_name(value):
    with pytest.raises(UnsafePickle, match=type(value).__name__):
        load(value)
    assert load(value, allow_pickle=True) == value


NUMPY_TYPES = [
    np.float64, np.float32, np.float16, np.int64, np.int32, np.int8, np.uint8, np.uint64, np.bool_,
    np.complex64, np.complex128,
]  # fmt: skip


@pytest.mark.parametrize("kind", NUMPY_TYPES, ids=lambda kind: kind.__name__)
def test_numpy_scalars_and_arrays_come_back(kind):
    scalar = kind(1)
    assert load(scalar) == scalar
    assert type(load(scalar)) is kind
    for array in (
        np.arange(6).astype(kind).reshape(2, 3),
        np.zeros((0, 3), dtype=kind),
        np.asfortranarray(np.ones((2, 3), dtype=kind)),
        np.array(1, dtype=kind),
    ):
        loaded = load({"a": array})["a"]
        assert loaded.dtype == array.dtype
        assert loaded.shape == array.shape
        assert np.array_equal(loaded, array)


def test_numpy_texts_and_dates_come_back():
    for array in (
        np.array(["ab", "c"]),
        np.array([b"ab"]),
        np.array(["2026-01-02"], dtype="M8[D]"),
    ):
        assert np.array_equal(load(array), array)


def test_the_states_of_every_random_generator_come_back():
    states = {
        "python": random.Random(5).getstate(),
        "numpy legacy": np.random.RandomState(5).get_state(),
        "numpy": np.random.default_rng(5).bit_generator.state,
        "torch": torch.Generator().manual_seed(5).get_state(),
    }
    loaded = load(states)
    restored = random.Random()
    restored.setstate(loaded["python"])
    assert restored.random() == random.Random(5).random()
    legacy = np.random.RandomState()
    legacy.set_state(loaded["numpy legacy"])
    assert legacy.rand() == np.random.RandomState(5).rand()
    generator = np.random.default_rng()
    generator.bit_generator.state = loaded["numpy"]
    assert generator.random() == np.random.default_rng(5).random()
    assert torch.equal(loaded["torch"], states["torch"])


def model_and(optimizer_class, **options):
    model = torch.nn.Linear(3, 2)
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
    for _ in range(2):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True, "fused": False}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.1}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.NAdam, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_optimizers_hold_comes_back(optimizer, options):
    state = model_and(optimizer, **options).state_dict()
    loaded = load(state)
    assert loaded["param_groups"] == state["param_groups"]
    for key, parts in state["state"].items():
        for name, value in parts.items():
            same = loaded["state"][key][name]
            assert torch.equal(same, value) if torch.is_tensor(value) else same == value


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": (
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 5)
    ),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_what_schedulers_hold_comes_back(name):
    optimizer = model_and(torch.optim.SGD)
    scheduler = SCHEDULERS[name](optimizer)
    optimizer.step()
    scheduler.step(*([0.5] if name == "ReduceLROnPlateau" else []))
    state = scheduler.state_dict()
    assert load(state) == state


def test_what_a_grad_scaler_holds_comes_back():
    state = torch.amp.GradScaler("cpu").state_dict()
    assert load(state) == state


class Bomb:
    def __init__(self, flag):
        self.flag = flag

    def __reduce__(self):
        return os.mkdir, (str(self.flag),)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"deep": [(x,)]}], ids=["bare", "deep"])
def test_code_is_refused_and_not_run(tmp_path, wrap):
    flag = tmp_path / "the code ran"
    with pytest.raises(UnsafePickle, match=r"a key.*mkdir") as raised:
        load(wrap(Bomb(flag)))
    assert not flag.exists()
    assert raised.value.where == "/runs/step_7"
    assert "allow_pickle=True" in str(raised.value)
    load(wrap(Bomb(flag)), allow_pickle=True)
    assert flag.exists(), "the test proves nothing: this item runs no code at all"


class Ordinary:
    def __init__(self):
        self.value = 1


def test_an_object_of_a_class_of_the_user_needs_to_be_allowed():
    with pytest.raises(UnsafePickle, match="Ordinary"):
        load(Ordinary())
    assert load(Ordinary(), allow_pickle=True).value == 1


@pytest.mark.parametrize(
    "function", [eval, getattr, print, os.system, np.fromfile, np.load, io.open]
)
def test_no_function_is_reached(function):
    class Calls:
        def __reduce__(self):
            return function, ("x",)

    with pytest.raises(UnsafePickle):
        load(Calls())


def test_the_process_wide_allow_list_is_as_it_was_before():
    before = torch.serialization.get_safe_globals()
    load({"a": np.float64(1)})
    with pytest.raises(UnsafePickle):
        load(Ordinary())
    assert torch.serialization.get_safe_globals() == before


@pytest.mark.parametrize(
    "content",
    [b"", b"abc", b"PK\x03\x04" + bytes(100), b"\x80\x02}q\x00."],
    ids=["empty", "text", "zip", "pickle"],
)
def test_what_is_no_archive_at_all_is_a_failed_load_that_names_the_key(content):
    with pytest.raises(LoadFailed, match="a key"):
        load_object(io.BytesIO(content), "a key", "/runs/step_7", allow_pickle=False)


def test_a_child_forked_while_another_thread_reads_can_read():

    with safe_bytes._lock:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                signal.alarm(20)  # it would wait for ever
                code = 0 if safe_bytes._lock.acquire(blocking=False) else 2
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
