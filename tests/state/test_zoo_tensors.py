"""Tensors of every kind: what comes back is what was saved, or it is refused by its key.

The table is `zoo_tensors.py`. Each is tried as a value of its own and among others; tensors
of every dtype also as buffer and as state of an optimizer.
"""

import pytest
import torch
from torch import nn
from zoo_tensors import (
    EXACT,
    IN_MODULES,
    LARGE,
    PLAIN_DTYPES,
    REFUSED,
    blocks,
    differs,
    filled,
    jagged,
    quantised,
    some,
)

from dcp_checkfreq import Checkpointer, StateMismatch, UnsupportedState
from dcp_checkfreq.state.odd_fill import copy_odd

# Torch's own, when such tensors are made, and where the table reads bits of complex numbers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:" + text)
    for text in (
        *(
            "Casting complex",
            "B?Complex(Half|32) support",
            "Sparse invariant checks",
            "Sparse CSR tensor",
        ),
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
    fresh = {"b" + key: torch.empty_like(one) for key, one in every.items()}
    for one in fresh.values():
        one.untyped_storage().fill_(0)  # torch has no zeros of every dtype
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


class Own(nn.Module):
    """Is not one of torch's."""


class Holds(nn.Module):
    """Has a tensor as buffer and as parameter, and one as state of an optimizer."""

    def __init__(self, make, seed, share=0.5):
        super().__init__()
        torch.manual_seed(seed)
        self.body = Own()
        self.body.register_buffer("buffer", make(share))
        self.body.parameter = nn.Parameter(make(share), requires_grad=False)
        self.weight = nn.Parameter(torch.rand(2))
        self.of_optimizer = make(share)

    def parts(self, *, is_fresh=False):
        state = () if is_fresh else {"odd": self.of_optimizer}
        return {"model": self, "optim": Optimizer(self.weight, state)}

    def facts(self):
        return [self.body.buffer, self.body.parameter, self.weight]


@pytest.mark.parametrize("share", [0.5, 0.0, 1.0])
@pytest.mark.parametrize("name", IN_MODULES)
def test_modules_and_optimizers_get_tensors_of_every_kind_back(tmp_path, name, share):
    saved = Holds(IN_MODULES[name], 1)
    save(tmp_path, saved.parts())
    fresh = Holds(IN_MODULES[name], 2, share)
    ids = list(map(id, fresh.facts()))
    assert differs(fresh.facts(), saved.facts()) is not None
    parts = restored(tmp_path, fresh.parts(is_fresh=True))
    assert differs(fresh.facts(), saved.facts()) is None
    assert list(map(id, fresh.facts())) == ids
    state = parts["optim"].state[fresh.weight]["odd"]
    assert differs(state, saved.of_optimizer) is None


class Refuses:
    """Can be saved, and not restored."""

    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        raise ValueError("not this one")


class HasASay(Holds):
    """Is restored first, as it might fail."""

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)


@pytest.mark.parametrize("name", IN_MODULES)
def test_modules_have_their_tensors_again_when_a_restore_fails(tmp_path, name):
    save(tmp_path, {**HasASay(IN_MODULES[name], 1).parts(), "other": Refuses()})
    fresh, twin = (HasASay(IN_MODULES[name], 2, 0.25) for _ in range(2))
    parts = {**fresh.parts(), "other": Refuses()}
    with (
        Checkpointer(tmp_path, parts, every=1000) as ckpt,
        pytest.raises(ValueError, match="not this one"),
    ):
        ckpt.restore()
    assert differs(fresh.facts(), twin.facts()) is None
    assert differs(parts["optim"].state[fresh.weight]["odd"], twin.of_optimizer) is None


OTHERS = {
    "dense": lambda _: torch.rand(4, 4),
    "COO of another size": lambda share: some(share, 4, 9).to_sparse(),
    "COO in doubles": lambda share: some(share, 4, 4).double().to_sparse(),
    "CSR of another size": lambda share: some(share, 9, 5).to_sparse_csr(),
    "BSR with other blocks": lambda share: blocks(share).to_sparse_bsr((2, 2)),
    "nested, other rows": lambda _: torch.nested.nested_tensor([torch.rand(6, 3)]),
    "jagged, other rows": lambda _: jagged(5),
    "quantised, another size": lambda _: quantised(4, 4),
    "quantised, another dtype": lambda _: quantised(3, 4, dtype=torch.quint8),
}


@pytest.mark.parametrize("there", ["COO", "CSR", "BSR", "nested", "jagged", "quantised by tensor"])
@pytest.mark.parametrize("here", OTHERS)
def test_what_is_of_another_form_here_is_refused_by_name_and_left_alone(tmp_path, there, here):
    save(tmp_path, {"model": Holds(IN_MODULES[there], 1)})
    fresh, twin = (Holds(OTHERS[here], 2) for _ in range(2))
    with Checkpointer(tmp_path, {"model": fresh}, every=1000) as ckpt:
        with pytest.raises(StateMismatch, match=r"model\.body\.buffer") as caught:
            ckpt.restore()
        assert "model.body.parameter" in str(caught.value)
    assert differs(fresh.facts(), twin.facts()) is None


@pytest.mark.parametrize("name", IN_MODULES)
def test_a_hook_that_changes_such_a_tensor_is_noticed(tmp_path, name):
    save(tmp_path, {"model": Holds(IN_MODULES[name], 1)})
    fresh = Holds(IN_MODULES[name], 2)
    another = IN_MODULES[name](0.5)

    def spoil(module, _):
        copy_odd(module.body.buffer, another)

    fresh.register_load_state_dict_post_hook(spoil)
    with (
        Checkpointer(tmp_path, {"model": fresh}, every=1000) as ckpt,
        pytest.raises(StateMismatch, match=r"not what was saved: body\.buffer\."),
    ):
        ckpt.restore()


@pytest.mark.parametrize("name", IN_MODULES)
def test_a_buffer_that_is_none_is_made_of_any_kind(tmp_path, name):
    saved, fresh = Holds(IN_MODULES[name], 1), Holds(IN_MODULES[name], 2)
    save(tmp_path, {"model": saved, "other": Refuses()})
    fresh.body.buffer = None
    with (
        Checkpointer(tmp_path, {"model": fresh, "other": Refuses()}, every=1000) as ckpt,
        pytest.raises(ValueError, match="not this one"),
    ):
        ckpt.restore()
    assert fresh.body.buffer is None
    with Checkpointer(tmp_path, {"model": fresh}, every=1000) as ckpt:
        ckpt.restore(only=["model"])
    assert differs(fresh.facts(), saved.facts()) is None


def test_a_buffer_that_becomes_a_sparse_one_is_saved_as_one(tmp_path):
    saved = Holds(lambda share: torch.rand(4, 4), 1)
    with Checkpointer(tmp_path, {"model": saved}, every=1000) as ckpt:
        ckpt.save(wait=True)
        saved.body.buffer = saved.body.buffer.to_sparse_csr()
        ckpt.step = 1
        ckpt.save(wait=True)
    fresh = Holds(lambda share: torch.rand(4, 4), 2)
    fresh.body.buffer = fresh.body.buffer.to_sparse_csr()
    restored(tmp_path, {"model": fresh})
    assert differs(fresh.facts(), saved.facts()) is None


def test_a_module_that_makes_a_quantised_tensor_for_its_state_gets_it_back(tmp_path):
    def made(seed):
        torch.manual_seed(seed)
        module = torch.ao.nn.quantized.Conv2d(2, 3, 2)
        module.set_weight_bias(quantised(3, 2, 2, 2), torch.rand(3))
        return module

    saved, fresh = made(1), made(2)
    save(tmp_path, {"model": saved})
    restored(tmp_path, {"model": fresh})
    assert differs(list(fresh._weight_bias()), list(saved._weight_bias())) is None
