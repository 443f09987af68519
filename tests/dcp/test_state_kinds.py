"""Cases 26, 28, 31, 32: what a state may hold, and that it comes back as it was."""

import collections

import pytest
import torch
import torch.distributed.checkpoint as dcp
from behaviour_tools import fails_with, files_in, save
from torch import nn
from torch.utils._pytree import tree_map

from dcp_checkfreq import (
    CheckFreqLoadPlanner,
    CheckFreqReader,
    CheckFreqSavePlanner,
    CheckFreqWriter,
    Checkpointer,
    SnapshotFailed,
    StateMismatch,
    UnsupportedState,
)

MODES = {
    "save": lambda state, **options: dcp.save(state, **options),
    "async_save": lambda state, **options: dcp.async_save(state, **options).result(),
}
both_modes = pytest.mark.parametrize("run", MODES.values(), ids=MODES.keys())


class QTensor(torch.Tensor):
    """A small int8 + scale weight, as quantisation libraries make them."""

    @staticmethod
    def __new__(cls, q, s):
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=torch.float32)

    def __init__(self, q, s):
        self._q, self._s = q, s

    def __tensor_flatten__(self):
        return ["_q", "_s"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, *sizes):
        return cls(inner["_q"], inner["_s"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0]._q, args[0]._s)

        def plain(value):
            return value._q.float() * value._s if isinstance(value, QTensor) else value

        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


@both_modes
@pytest.mark.parametrize("planner", [lambda: None, CheckFreqSavePlanner], ids=["default", "ours"])
@pytest.mark.parametrize("wrap", [lambda q: q, nn.Parameter], ids=["tensor", "parameter"])
def test_a_wrapper_subclass_is_refused_by_key_and_class_at_save(tmp_path, run, planner, wrap):
    quantised = QTensor(torch.arange(-8, 8, dtype=torch.int8).reshape(4, 4), torch.tensor(0.5))
    if wrap is nn.Parameter:
        quantised = nn.Parameter(quantised, requires_grad=False)
    state = {"good": torch.ones(3), "layer": {"w": quantised}}
    with fails_with(UnsupportedState, "'layer.w' is a QTensor"):
        run(state, storage_writer=CheckFreqWriter(tmp_path), planner=planner())
    assert not files_in(tmp_path)


def test_after_a_refused_state_the_next_background_save_works(tmp_path):
    writer = CheckFreqWriter(tmp_path / "a")
    bad = QTensor(torch.zeros(2, 2, dtype=torch.int8), torch.tensor(0.5))
    with pytest.raises(UnsupportedState):
        dcp.async_save({"w": bad}, storage_writer=writer)
    dcp.async_save({"w": torch.ones(2, 2)}, storage_writer=writer).result()
    target = {"w": torch.zeros(2, 2)}
    dcp.load(target, storage_reader=CheckFreqReader(tmp_path / "a"))
    assert target["w"].tolist() == [[1, 1], [1, 1]]


def test_a_value_that_cannot_be_copied_fails_at_once_and_nothing_is_written(tmp_path):
    import threading

    with pytest.raises(SnapshotFailed, match="cannot be copied"):
        dcp.async_save(
            {"w": torch.ones(2), "lock": threading.Lock()},
            storage_writer=CheckFreqWriter(tmp_path),
        )
    assert not files_in(tmp_path)
    dcp.async_save({"w": torch.ones(2)}, storage_writer=CheckFreqWriter(tmp_path)).result()
    assert ".metadata" in files_in(tmp_path)


# --- case 28: integer keys ---


def new_scheduler():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 6], gamma=0.1)


def advanced(steps):
    optimizer, scheduler = new_scheduler()
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return optimizer, scheduler


def rates_from(optimizer, scheduler, steps):
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_milestones_keep_their_integer_keys_through_checkpointer(tmp_path):
    _, scheduler = advanced(2)
    with Checkpointer(tmp_path, {"sched": scheduler}, every=1) as ckpt:
        ckpt.restore()
        ckpt.after_step()
    for step in (2, 3):  # restore, save, restore again: nothing piles up
        optimizer, restored = new_scheduler()
        with Checkpointer(tmp_path, {"sched": restored}, every=1) as ckpt:
            ckpt.restore()
            ckpt.after_step()
            assert ckpt.step == step
        assert restored.milestones == collections.Counter({3: 1, 6: 1})
        assert type(restored.milestones) is collections.Counter
        assert restored.last_epoch == 2
    optimizer.param_groups[0]["lr"] = 1.0
    assert rates_from(optimizer, restored, 5) == rates_from(*advanced(2), 5)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_milestones_keep_their_integer_keys_through_the_load_planner(tmp_path):
    _, scheduler = advanced(2)
    for number in range(3):
        save({"sched": scheduler}, tmp_path / f"{number}")
        _, scheduler = new_scheduler()
        dcp.load(
            {"sched": scheduler},
            storage_reader=CheckFreqReader(tmp_path / f"{number}"),
            planner=CheckFreqLoadPlanner(),
        )
        assert dict(scheduler.milestones) == {3: 1, 6: 1}
        assert scheduler.last_epoch == 2


class CountingOptimizer(torch.optim.Optimizer):
    """Keeps a Python int per parameter, as some optimizers do."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state.setdefault("m", torch.zeros_like(parameter)).add_(1)


def test_an_integer_step_under_integer_parameter_ids_is_restored(tmp_path):
    optimizer = CountingOptimizer(nn.Linear(2, 2).parameters())
    for _ in range(5):
        optimizer.step()
    save({"opt": optimizer.state_dict()}, tmp_path)
    fresh = CountingOptimizer(nn.Linear(2, 2).parameters())
    fresh.step()
    target = {"opt": fresh.state_dict()}
    dcp.load(target, storage_reader=CheckFreqReader(tmp_path), planner=CheckFreqLoadPlanner())
    assert [key for key in target["opt"]["state"] if isinstance(key, str)] == []
    fresh.load_state_dict(target["opt"])
    for state in fresh.state.values():
        assert state["step"] == 5
        assert state["m"].unique().tolist() == [5]


def test_an_integer_step_is_restored_through_checkpointer(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = CountingOptimizer(model.parameters())
    with Checkpointer(tmp_path, {"model": model, "optim": optimizer}, every=5) as ckpt:
        for _ in range(5):
            optimizer.step()
            ckpt.after_step()
    fresh_model = nn.Linear(2, 2)
    fresh = CountingOptimizer(fresh_model.parameters())
    with Checkpointer(tmp_path, {"model": fresh_model, "optim": fresh}, every=5) as ckpt:
        assert ckpt.restore().step == 5
    assert [state["step"] for state in fresh.state.values()] == [5, 5]
    assert torch.equal(fresh_model.weight, model.weight)


def test_key_types_of_plain_values_survive(tmp_path):
    table = {0: "a", "0": "b", 1.5: "c", (1, 2): [3, (4,)], "dotted.key": {7: torch.ones(2)}}
    with Checkpointer(tmp_path, {"table": table}, every=1) as ckpt:
        ckpt.after_step()
    state = {"table": None}
    with Checkpointer(tmp_path, state, every=1) as ckpt:
        ckpt.restore()
    got = state["table"]
    assert torch.equal(got["dotted.key"].pop(7), table["dotted.key"].pop(7))
    assert got == table
    assert list(map(type, got)) == list(map(type, table))


# --- case 31: optimizers in odd states ---


def two_linears():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, steps=1):
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved_and_restored(root, model, optimizer, fresh_model, fresh_optimizer):
    with Checkpointer(root, {"model": model, "optim": optimizer}, every=1) as ckpt:
        ckpt.after_step()
    with Checkpointer(root, {"model": fresh_model, "optim": fresh_optimizer}, every=1) as ckpt:
        ckpt.restore()


def test_a_restored_optimizer_goes_on_bit_for_bit(tmp_path):
    model, optimizer = two_linears()
    train(model, optimizer, 3)
    fresh = two_linears()
    saved_and_restored(tmp_path, model, optimizer, *fresh)
    train(model, optimizer, 3)
    train(*fresh, 3)
    for ours, theirs in zip(fresh[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_optimizer_that_has_stepped_on_part_of_its_parameters_goes_on_alike(tmp_path):
    model, optimizer = two_linears()
    model[0].weight.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    fresh = two_linears()
    saved_and_restored(tmp_path, model, optimizer, *fresh)
    assert len(fresh[1].state.get(fresh[0][0].weight, {})) == 3
    train(model, optimizer, 2)
    train(*fresh, 2)
    for ours, theirs in zip(fresh[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_state_of_a_parameter_that_is_frozen_now_comes_back(tmp_path):
    model, optimizer = two_linears()
    train(model, optimizer, 2)
    fresh_model, fresh_optimizer = two_linears()
    fresh_model[0].weight.requires_grad_(False)
    saved_and_restored(tmp_path, model, optimizer, fresh_model, fresh_optimizer)
    assert torch.equal(fresh_model[0].weight, model[0].weight)
    for ours, theirs in zip(fresh_model.parameters(), model.parameters(), strict=True):
        kept = fresh_optimizer.state[ours]["exp_avg"]
        assert torch.equal(kept, optimizer.state[theirs]["exp_avg"])


def test_an_empty_group_and_every_group_option_survive(tmp_path):
    def make(lr, empty_lr):
        model = nn.Linear(2, 2)
        groups = [
            {"params": list(model.parameters()), "lr": lr, "betas": (0.8, 0.9)},
            {"params": [], "lr": empty_lr},
        ]
        return model, torch.optim.AdamW(groups)

    model, optimizer = make(0.1, 0.5)
    train(model, optimizer)
    fresh_model, fresh_optimizer = make(0.3, 0.9)
    saved_and_restored(tmp_path, model, optimizer, fresh_model, fresh_optimizer)
    assert [group["lr"] for group in fresh_optimizer.param_groups] == [0.1, 0.5]
    assert fresh_optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    train(fresh_model, fresh_optimizer)


def test_an_optimizer_without_its_module_is_refused_by_name(tmp_path):
    _, optimizer = two_linears()
    with pytest.raises(UnsupportedState, match="'optim' is a AdamW"):
        Checkpointer(tmp_path, {"optim": optimizer}, every=1)


# --- case 32: all parts from one step ---


class Part:
    """A Stateful that knows its step and how often it was asked."""

    def __init__(self, value=0):
        self.value, self.asked = value, 0

    def state_dict(self):
        self.asked += 1
        return {"value": self.value, "big": torch.full((5000,), float(self.value))}

    def load_state_dict(self, state):
        self.value = state["value"]
        assert state["big"].unique().tolist() == [float(self.value)]


PARTS = ("model_like", "sched", "scaler", "ema", "data", "rng")


def test_six_parts_always_come_from_one_step_and_each_is_asked_once_per_save(tmp_path):
    parts = {name: Part() for name in PARTS}
    with Checkpointer(tmp_path, parts, every=1, keep_last=10) as ckpt:
        for step in range(1, 5):
            for part in parts.values():
                part.value = step
            ckpt.after_step()
            for part in parts.values():  # training goes on while the save is being written
                part.value = -step
    assert {part.asked for part in parts.values()} == {4 + 1}  # and once when it is registered
    for step in range(1, 5):
        fresh = {name: Part(99) for name in PARTS}
        with Checkpointer(tmp_path, fresh, every=1) as ckpt:
            ckpt.restore(step)
        assert {part.value for part in fresh.values()} == {step}


def test_a_registered_part_that_is_missing_in_the_checkpoint_is_named(tmp_path):
    with Checkpointer(tmp_path, {"sched": Part(1)}, every=1) as ckpt:
        ckpt.after_step()
    state = {"sched": Part(0), "scaler": Part(7)}
    with (
        Checkpointer(tmp_path, state, every=1) as ckpt,
        pytest.raises(StateMismatch, match="'scaler'"),
    ):
        ckpt.restore()
    assert (state["sched"].value, state["scaler"].value) == (0, 7)


def test_parts_that_the_job_no_longer_registers_are_left_alone(tmp_path):
    with Checkpointer(tmp_path, {"sched": Part(1), "old": Part(2)}, every=1) as ckpt:
        ckpt.after_step()
    state = {"sched": Part(0)}
    with Checkpointer(tmp_path, state, every=1) as ckpt:
        ckpt.restore()
    assert state["sched"].value == 1


def test_a_grad_scaler_and_batch_norm_statistics_round_trip(tmp_path):
    def make():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        return model, torch.amp.GradScaler("cpu", init_scale=256.0)

    model, scaler = make()
    scaler._scale = None
    scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0, "_growth_tracker": 3})
    model(torch.randn(8, 4))
    with Checkpointer(tmp_path, {"model": model, "scaler": scaler}, every=1) as ckpt:
        ckpt.after_step()
    fresh, fresh_scaler = make()
    with Checkpointer(tmp_path, {"model": fresh, "scaler": fresh_scaler}, every=1) as ckpt:
        ckpt.restore()
    assert fresh_scaler.state_dict() == scaler.state_dict()
    assert torch.equal(fresh[1].running_mean, model[1].running_mean)
    assert int(fresh[1].num_batches_tracked) == 1
