"""Tensors of every kind: what comes back is what was saved, or it is refused by its key.

The table is `zoo_tensors.py`. Each is tried as a value of its own and among others; tensors
of every dtype also as buffer and as state of an optimizer.
"""

import pytest
import torch
from torch import nn
from zoo_tensors import EXACT, LARGE, PLAIN_DTYPES, REFUSED, differs, filled

from dcp_checkfreq import Checkpointer, UnsupportedState

# Torch's own, when such tensors are made, and where the table reads bits of complex numbers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:" + text)
    for text in (
        *("Casting complex", "ComplexHalf support", "Sparse invariant checks", "Sparse CSR tensor"),
        *("The PyTorch API of nested", "torch.quantize_per_tensor", "Sparse B", "Sparse C"),
        ".*quantized",
    )
]


def save(root, parts):
    with Checkpointer(root, parts, every=1000) as ckpt:
        ckpt.step = 1
        ckpt.save(wait=True)


def restored(root, parts):
    with Checkpointer(root, parts, every=1000) as ckpt:
        ckpt.restore()
    return parts


class Optimizer(torch.optim.Optimizer):
    """Keeps what it is given."""

    def __init__(self, parameter, state=()):
        super().__init__([parameter], {"lr": 1.0})
        if state:
            self.state[parameter].update(state)

    def step(self, closure=None):
        raise AssertionError("a step was taken")


def job(buffers, state):
    module = nn.Linear(2, 2, bias=False)
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return {"model": module, "optim": Optimizer(module.weight, state)}


@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype):
    shapes = [(), (0,), (3,), (2, 3), (LARGE,)]
    every = {str(number): filled(shape, dtype) for number, shape in enumerate(shapes)}
    save(
        tmp_path,
        {"value": list(every.values()), **job({"b" + k: v for k, v in every.items()}, every)},
    )
    fresh = {"b" + key: torch.zeros_like(one) for key, one in every.items()}
    parts = restored(tmp_path, {"value": None, **job(fresh, ())})
    state = parts["optim"].state[parts["model"].weight]
    for key, one in every.items():
        assert differs(one, parts["value"][int(key)]) is None
        assert differs(one, getattr(parts["model"], "b" + key)) is None
        assert differs(one, state[key]) is None


@pytest.mark.parametrize("name", EXACT)
def test_a_tensor_comes_back_as_what_it_was(tmp_path, name):
    made = EXACT[name]()
    save(tmp_path, {"alone": made, "inner": {"deep": [(made,)], 3: {"again": made}}})
    parts = restored(tmp_path, {"alone": None, "inner": None})
    assert differs(made, parts["alone"]) is None
    assert differs(made, parts["inner"]["deep"][0][0]) is None
    assert differs(made, parts["inner"][3]["again"]) is None


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("place", ["value", "optimizer"])
def test_what_has_no_elements_is_refused_with_its_key_when_registered(tmp_path, name, place):
    make, kind = REFUSED[name]
    if place == "value":
        parts, key = {"job": {"fine": 1, "bad": [make()]}}, "job.bad.0"
    else:
        parts, key = job({}, {"bad": make()}), "optim.state.weight.bad"
    with pytest.raises(UnsupportedState) as caught:
        Checkpointer(tmp_path, parts, every=1000)
    assert caught.value.key == key
    assert kind in str(caught.value)


@pytest.mark.long
def test_a_tensor_of_more_than_4_gib_comes_back(tmp_path):
    made = torch.zeros((1 << 32) + 5, dtype=torch.uint8)
    made[:: 1 << 20] = 7
    made[-3:] = torch.tensor([1, 2, 3])
    save(tmp_path, {"large": [made]})
    (back,) = restored(tmp_path, {"large": None})["large"]
    assert torch.equal(back, made)


@pytest.mark.parametrize(
    "kind", [torch.nn.UninitializedParameter, torch.nn.parameter.UninitializedBuffer]
)
@pytest.mark.parametrize("place", ["value", "optimizer"])
def test_what_is_not_initialised_is_refused_with_its_key_when_registered(tmp_path, kind, place):
    if place == "value":
        parts, key = {"job": {"fine": 1, "bad": (kind(),)}}, "job.bad.0"
    else:
        parts, key = job({}, {"bad": kind()}), "optim.state.weight.bad"
    with pytest.raises(UnsupportedState, match="has no data yet") as caught:
        Checkpointer(tmp_path, parts, every=1000)
    assert caught.value.key == key
